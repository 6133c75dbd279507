"""Options of the number formats of a run. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Because, Options, Rule, When, option

_SCALED = (When("is_scaled", bool, "--fp16"),)
_FIXED = {"loss_scale": Because("which stays")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Options):
    """Number format of parameters and activations."""

    precision: Literal["", "auto"] = option("", excludes={"bf16": ON, "fp16": ON})
    """auto: --bf16 or --fp16 by what the GPU multiplies in (bf16 from Ampere on, fp16 on
    Volta and Turing), and neither on a CPU. Empty: --bf16 or --fp16 as given."""
    bf16: bool = option(False, excludes={"fp16": ON})
    """Parameters and activations in bfloat16; main weights and optimizer in float32."""
    fp16: bool = False
    """Parameters and activations in float16, main weights and optimizer in float32; the loss
    is scaled, and a step whose gradients overflow is skipped."""
    loss_scale: float = option(0.0, minimum=0, needs=_SCALED)
    """Fixed factor of the loss under --fp16, best a power of two: gradients that overflow end
    the run. Megatron skips such steps without end. 0: it moves."""
    initial_loss_scale: float = option(2.0**32, above=0, needs=_SCALED, idle_with=_FIXED)
    """Factor of the loss at the first step under --fp16."""
    min_loss_scale: float = option(1.0, above=0, needs=_SCALED, idle_with=_FIXED)
    """Least factor of the loss; gradients that overflow even so end the run."""
    loss_scale_window: int = option(1000, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Steps without overflow after which the factor is doubled."""
    hysteresis: int = option(2, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Overflows within a window from which on each halves the factor."""

    rules = (
        Rule(
            ("min_loss_scale", "initial_loss_scale"),
            lambda v: v.min_loss_scale > v.initial_loss_scale,
            "--min-loss-scale {min_loss_scale} must not be above --initial-loss-scale "
            "{initial_loss_scale}.",
        ),
        Rule(
            ("precision", "lr"),  # an option of a run: as part of one it has been chosen
            lambda v: v.precision == "auto",
            "--precision auto is chosen where a run trains: give --bf16 or --fp16 here.",
        ),
    )

    @property
    def has_16_bits(self) -> bool:
        """Whether the model computes in 16 bits."""
        return self.bf16 or self.fp16 or bool(self.precision)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss may be scaled."""
        return self.fp16 or bool(self.precision)
