"""Options of fp8: which GEMMs, in which format, scaled how. Standard library only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """Which GEMMs run in fp8, and how tensors are scaled for it."""

    fp8_format: Literal["", "e4m3", "hybrid"] = ""
    """Run the GEMMs of attention and feed-forward layers in fp8: e4m3 for all factors, or
    hybrid, e5m2 for gradients. Empty: in the run's own format."""

    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise"] = "tensorwise"
    """How factors are scaled: tensorwise, one scale from each tensor's own largest magnitude;
    delayed, one scale from those of earlier steps; rowwise, a scale for each row that a GEMM
    sums along; blockwise, one for 128 numbers of it, 128 x 128 of a weight, with --fp8-format
    e4m3. Megatron's default: delayed."""

    fp8_amax_history_len: int = 1
    """Steps whose largest magnitudes --fp8-recipe delayed remembers."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """What --fp8-recipe delayed scales by: the latest of them, or the largest."""

    first_last_layers_bf16: bool = False
    """Keep layers at both ends of the model out of fp8: as many as the next two say."""

    num_layers_at_start_in_bf16: int = 1
    """First layers that --first-last-layers-bf16 keeps out of fp8."""

    num_layers_at_end_in_bf16: int = 1
    """Last layers that --first-last-layers-bf16 keeps out of fp8."""

    def __post_init__(self) -> None:
        if self.fp8_amax_history_len < 1:
            raise ValueError(
                f"--fp8-amax-history-len {self.fp8_amax_history_len} must be 1 or more."
            )
        history = self.fp8_amax_history_len, self.fp8_amax_compute_algo
        if history != (1, "most_recent") and self.fp8_recipe != "delayed":
            raise ValueError(
                "--fp8-amax-history-len and --fp8-amax-compute-algo have no effect without "
                "--fp8-recipe delayed."
            )
        if self.fp8_recipe != "tensorwise" and not self.fp8_format:
            raise ValueError(
                f"--fp8-recipe {self.fp8_recipe} has no effect without --fp8-format e4m3 or "
                "hybrid."
            )
        if self.fp8_recipe == "blockwise" and self.fp8_format == "hybrid":
            raise ValueError(
                f"--fp8-recipe {self.fp8_recipe} takes --fp8-format e4m3 only: the GEMM of "
                "scales for blocks has no e5m2."
            )
        counts = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        for name, count in zip(("start", "end"), counts, strict=True):
            if count < 0:
                raise ValueError(f"--num-layers-at-{name}-in-bf16 {count} must be 0 or more.")
        if self.first_last_layers_bf16 and not self.fp8_format:
            raise ValueError(
                "--first-last-layers-bf16 has no effect without --fp8-format e4m3 or hybrid."
            )
        if counts != (1, 1) and not self.first_last_layers_bf16:
            raise ValueError(
                "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 have no effect "
                "without --first-last-layers-bf16."
            )
