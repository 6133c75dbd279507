"""Options of fp8: which GEMMs, in which format, scaled how. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config(Options):
    """Which GEMMs run in fp8, and how tensors are scaled for it."""

    fp8_format: Literal["", "e4m3", "hybrid"] = ""
    """Run the GEMMs of attention and feed-forward layers in fp8: e4m3 for all factors, or
    hybrid, e5m2 for gradients. Empty: in the run's own format."""

    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise"] = option(
        "tensorwise", needs={"fp8_format": ("e4m3", "hybrid")}
    )
    """How factors are scaled: tensorwise, one scale from each tensor's own largest magnitude;
    delayed, one scale from those of earlier steps; rowwise, a scale for each row that a GEMM
    sums along; blockwise, one for 128 numbers of it, 128 x 128 of a weight, with --fp8-format
    e4m3. Megatron's default: delayed."""

    fp8_amax_history_len: int = option(1, minimum=1, needs={"fp8_recipe": "delayed"})
    """Steps whose largest magnitudes --fp8-recipe delayed remembers."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent", needs={"fp8_recipe": "delayed"}
    )
    """What --fp8-recipe delayed scales by: the latest of them, or the largest."""

    first_last_layers_bf16: bool = option(False, needs={"fp8_format": ("e4m3", "hybrid")})
    """Keep layers at both ends of the model out of fp8: as many as the next two say."""

    num_layers_at_start_in_bf16: int = option(
        1, minimum=0, needs={"first_last_layers_bf16": ON}
    )
    """First layers that --first-last-layers-bf16 keeps out of fp8."""

    num_layers_at_end_in_bf16: int = option(1, minimum=0, needs={"first_last_layers_bf16": ON})
    """Last layers that --first-last-layers-bf16 keeps out of fp8."""

    rules = (
        Rule(
            ("fp8_recipe", "fp8_format"),
            lambda v: v.fp8_recipe == "blockwise" and v.fp8_format == "hybrid",
            "--fp8-recipe {fp8_recipe} takes --fp8-format e4m3 only: the GEMM of scales for "
            "blocks has no e5m2.",
        ),
        Rule(
            ("first_last_layers_bf16", "depth"),
            lambda v: (
                v.first_last_layers_bf16
                and v.num_layers_at_start_in_bf16 + v.num_layers_at_end_in_bf16 >= v.depth
            ),
            "--num-layers-at-start-in-bf16 {num_layers_at_start_in_bf16} and "
            "--num-layers-at-end-in-bf16 {num_layers_at_end_in_bf16} keep all {depth} layers "
            "out of fp8: lower them, or leave --fp8-format out.",
        ),
    )
