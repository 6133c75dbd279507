"""Constants of the update rules, and the formats of what they keep. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_above_zero, check_field


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """AdamW: decoupled weight decay, bias correction (Loshchilov and Hutter 2019)."""

    adam_beta1: float = 0.9
    """Decay of the mean of gradients, 0 to below 1."""

    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients, 0 to below 1."""

    adam_eps: float = 1e-8
    """Added to the root of the mean square; above 0."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of gradients is kept: fp32 or bf16. Computed in fp32."""

    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of squared gradients is kept: fp32 or bf16. bf16 holds steps of
    no less than 0.4 %, so it needs an --adam-beta2 of about 0.95."""

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            check_field(self, name, 0 <= getattr(self, name) < 1, "at least 0, below 1")
        check_above_zero(self, "adam_eps")


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig:
    """Stochastic gradient descent with momentum."""

    sgd_momentum: float = 0.9
    """Share of the last update in the next, 0 to below 1."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sgd_momentum < 1.0:
            raise ValueError(f"--sgd-momentum {self.sgd_momentum} must be at least 0, below 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MainWeightsConfig:
    """What the optimizer keeps of the weights themselves."""

    main_params_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the main weights of 16-bit weights. bf16: none are kept; an update is computed
    in fp32 and rounded to bf16 at random, up as often as it is near, so that small updates
    are not lost. Saves 4 bytes a weight."""
