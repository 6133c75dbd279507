"""Options of fp8: which GEMMs run in fp8, the format, and the scaling recipe."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config(Options):
    """Which GEMMs run in fp8, and how tensors are scaled for it."""

    fp8_format: Literal["", "e4m3", "hybrid"] = ""
    """Run the GEMMs of attention and feed-forward layers in fp8: e4m3 for all factors; hybrid,
    e5m2 for gradients and e4m3 for other factors. Empty: GEMMs run in the run's precision."""

    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise"] = option(
        "tensorwise", needs={"fp8_format": ("e4m3", "hybrid")}
    )
    """How factors are scaled: tensorwise, one scale per tensor from its largest magnitude;
    delayed, one scale per tensor from the largest magnitudes of earlier steps; rowwise, one
    scale per row that a GEMM sums along; blockwise, one scale per 128 numbers of such a row,
    128 x 128 of a weight, with --fp8-format e4m3. Megatron's default: delayed."""

    fp8_amax_history_len: int = option(1, minimum=1, needs={"fp8_recipe": "delayed"})
    """Steps in the history of largest magnitudes of --fp8-recipe delayed."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent", needs={"fp8_recipe": "delayed"}
    )
    """Which magnitude of the history --fp8-recipe delayed scales by: the most recent one, or
    the maximum."""

    first_last_layers_bf16: bool = option(False, needs={"fp8_format": ("e4m3", "hybrid")})
    """Run layers at both ends of the model without fp8: --num-layers-at-start-in-bf16 and
    --num-layers-at-end-in-bf16 of them."""

    num_layers_at_start_in_bf16: int = option(
        1, minimum=0, needs={"first_last_layers_bf16": ON}
    )
    """First layers that --first-last-layers-bf16 runs without fp8."""

    num_layers_at_end_in_bf16: int = option(1, minimum=0, needs={"first_last_layers_bf16": ON})
    """Last layers that --first-last-layers-bf16 runs without fp8."""

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
