"""Constants of the update rules, and the formats of what they keep. Standard library only."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mcore_base.options import ON, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig(Options):
    """AdamW: decoupled weight decay, bias correction (Loshchilov and Hutter 2019)."""

    part_of: ClassVar = {"optimizer": "adam"}

    adam_beta1: float = option(0.9, minimum=0, below=1)
    """Decay of the mean of gradients, 0 to below 1."""

    adam_beta2: float = option(0.999, minimum=0, below=1)
    """Decay of the mean of squared gradients, 0 to below 1."""

    adam_eps: float = option(1e-8, above=0)
    """Added to the root of the mean square; above 0."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of gradients is kept: fp32 or bf16. Computed in fp32."""

    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of squared gradients is kept: fp32 or bf16. bf16 holds steps of
    no less than 0.4 %, so it needs an --adam-beta2 of about 0.95."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig(Options):
    """Stochastic gradient descent with momentum."""

    part_of: ClassVar = {"optimizer": "sgd"}

    sgd_momentum: float = option(0.9, minimum=0, below=1)
    """Share of the last update in the next, 0 to below 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MainWeightsConfig(Options):
    """What the optimizer keeps of the weights themselves."""

    main_params_dtype: Literal["fp32", "bf16"] = option("fp32", needs={"bf16": ON})
    """Format of the main weights of 16-bit weights. bf16: none are kept; an update is computed
    in fp32 and rounded to bf16 at random, up as often as it is near, so that small updates
    are not lost. Saves 4 bytes a weight."""

    rules = (
        Rule(
            ("main_params_dtype", "is_fully_sharded", "main_grads_dtype"),
            lambda v: (
                v.main_params_dtype == "bf16"
                and v.is_fully_sharded
                and v.main_grads_dtype == "fp32"
            ),
            "--main-params-dtype bf16: {sharding} keeps rows of float32, which are the main "
            "weights: add --main-grads-dtype bf16, with which rows are bf16 too.",
        ),
    )
