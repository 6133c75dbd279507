"""Options of the number formats of a run. Standard library only."""

from dataclasses import dataclass, fields
from typing import Literal

from mcore_base.field_checks import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """In what number format the model computes."""

    precision: Literal["", "auto"] = ""
    """auto: --bf16 or --fp16 by what the GPU multiplies in (bf16 from Ampere on, fp16 on
    Volta and Turing), and neither on a CPU. Empty: what the next two say."""
    bf16: bool = False
    """Parameters and activations in bfloat16; main weights and optimizer in float32."""
    fp16: bool = False
    """Parameters and activations in float16, main weights and optimizer in float32; the loss
    is scaled, and a step whose gradients overflow is skipped."""
    loss_scale: float = 0.0
    """Fixed factor of the loss under --fp16, best a power of two: gradients that overflow end
    the run. Megatron skips such steps without end. 0: it moves."""
    initial_loss_scale: float = 2.0**32
    """Factor of the loss at the first step under --fp16."""
    min_loss_scale: float = 1.0
    """Least factor of the loss; gradients that overflow even so end the run."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the factor is doubled."""
    hysteresis: int = 2
    """Overflows within a window from which on each halves the factor."""

    def __post_init__(self) -> None:
        if self.precision and (self.fp16 or self.bf16):
            raise ValueError(
                "--precision auto chooses the format: leave --bf16 and --fp16 out."
            )
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other: give one.")
        given = [
            "--" + each.name.replace("_", "-")
            for each in fields(self)
            if each.name not in ("precision", "fp16", "bf16")
            and getattr(self, each.name) != each.default
        ]
        if given and not self.fp16 and not self.precision:
            raise ValueError(f"{given[0]} has no effect without --fp16: leave it out.")
        if self.loss_scale and (moving := [flag for flag in given if flag != "--loss-scale"]):
            raise ValueError(
                f"{moving[0]} has no effect with --loss-scale {self.loss_scale:g}, which "
                "stays: leave one out."
            )
        if self.loss_scale < 0.0 or not 0.0 < self.min_loss_scale <= self.initial_loss_scale:
            raise ValueError(
                "--loss-scale must be 0 or more, and --min-loss-scale above 0 and not above "
                "--initial-loss-scale."
            )
        check_at_least(self, 1, "loss_scale_window", "hysteresis")
