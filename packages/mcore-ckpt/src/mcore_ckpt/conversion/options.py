"""Options of convert, merge and upcycle; each field is a flag. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import Because, Options, Rule, option
from mcore_base.terminal import parse_size

DTYPE_WORDS = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16"} | {
    "bf16": "BF16",
    "bfloat16": "BF16",
}
"""Safetensors' name of each dtype of ``--dtype``."""


def _wrong_size(values: Any) -> str:
    """Return the error message for an invalid ``--max-shard-size``, else ''."""
    try:
        parse_size(values.max_shard_size)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(Options):
    """Casts, cuts, carried parts and checks of a conversion."""

    dtype: str = option(
        "",
        excludes={
            "optimizer": Because("as main weights and moments belong to the unchanged weights")
        },
    )
    """Cast weights to bf16, fp16 or fp32; empty: keep their dtype."""

    max_shard_size: str = "5GB"
    """Largest weight file of an output, such as 500MB or 5GB."""

    model_type: str = ""
    """Hugging Face family to write; empty: the family that the weights came from, else the
    first that can express the model."""

    config: str = ""
    """config.json of the model, or a folder with one, for inputs that do not name their
    model."""

    vocab_size: int = option(0, minimum=0)
    """Rows of vocabulary: further rows are removed, missing ones are zeros; 0: unchanged."""

    make_vocab_size_divisible_by: int = 128
    """Megatron's vocabulary is padded to a multiple of this."""

    transformer_impl: str = "transformer_engine"
    """Megatron's layers that will load the output: transformer_engine or local."""

    dcp_names: str = "mcore"
    """Names in a torch.distributed.checkpoint directory: mcore or hf."""

    keep_unknown_config_fields: bool = False
    """Copy unknown fields of a config.json instead of refusing them; the fields must not change
    what the model computes."""

    optimizer: bool = False
    """Between mcore and megatron, also convert the optimizer's state, iteration, schedule and
    position in the data, so that training can resume."""

    experts_apart: bool = False
    """With --optimizer to megatron: write a separate optimizer for experts, which runs with
    --expert-model-parallel-size above 1 have."""

    verify: bool = True
    """Read the result back and compare it with the source, bit by bit."""

    check: bool = False
    """Compare logits of mcore-models with those of transformers, in float32 on the CPU; an
    output whose logits differ, or whose model cannot run here, is removed."""

    @property
    def max_shard_bytes(self) -> int:
        """Largest number of bytes of tensors in one file."""
        return parse_size(self.max_shard_size)

    rules = (
        Rule(
            ("dtype",),
            lambda v: v.dtype and v.dtype not in DTYPE_WORDS,
            f"--dtype {{dtype}} is not known: use {', '.join(DTYPE_WORDS)}.",
        ),
        Rule(("max_shard_size",), _wrong_size),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions(Options):
    """Method and factors by which the weights of several checkpoints are merged."""

    method: Literal["linear", "slerp", "task_arithmetic", "ties"] = "linear"
    """Mean (linear); arc between two models (slerp); the base plus the sum of all changes to it
    (task_arithmetic), or plus the mean of the largest changes of one sign (ties)."""

    weights: tuple[float, ...] = ()
    """A factor for each checkpoint; linear and slerp divide them by their sum; empty: equal."""

    base: str = option("", needs={"method": ("task_arithmetic", "ties")})
    """Checkpoint that the others were tuned from."""

    scale: float = option(1.0, needs={"method": ("task_arithmetic", "ties")})
    """Factor on the merged changes."""

    density: float = option(0.2, above=0, maximum=1, needs={"method": "ties"})
    """Share of each tensor's changes that is kept, the largest."""

    rules = (
        Rule(
            ("method", "base"),
            lambda v: v.method in ("task_arithmetic", "ties") and not v.base,
            "--method {method} needs --base: the checkpoint that the others were tuned from.",
        ),
        Rule(
            ("weights",),
            lambda v: v.weights and (sum(v.weights) <= 0 or min(v.weights) < 0),
            "--weights {weights} must be 0 or more, and not all 0.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleOptions(Options):
    """Number, routing and layers of the new experts."""

    num_experts: int
    """Experts of each layer that gets some: copies of the dense network, or of its slices."""

    moe_router_topk: int = 2
    """Experts that each token goes to."""

    moe_upcycling_granularity: int = 1
    """Slices of the dense network, one for each expert; the model computes the same function if
    --moe-router-topk is a multiple of this number."""

    moe_layer_freq: str = "1"
    """Which layers get experts: N for every N-th, or a list of 0 and 1."""

    moe_router_pre_softmax: bool = False
    """Weights are a softmax over all experts, not the chosen ones."""

    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss in training."""

    init_method_std: float = option(0.02, minimum=0)
    """Standard deviation of the routers' initial weights; 0: zeros."""

    seed: int = 1234
    """Seed of the routers' initial weights."""

    rules = (
        Rule(
            ("num_experts", "moe_upcycling_granularity"),
            lambda v: (
                min(v.num_experts, v.moe_upcycling_granularity) < 1
                or v.num_experts % v.moe_upcycling_granularity
            ),
            "--num-experts {num_experts} must be a multiple of --moe-upcycling-granularity "
            "{moe_upcycling_granularity}, so that all slices of the dense network have "
            "equally many experts.",
        ),
        Rule(
            ("moe_router_topk", "num_experts"),
            lambda v: not 1 <= v.moe_router_topk <= v.num_experts,
            "--moe-router-topk {moe_router_topk} must be from 1 to --num-experts "
            "{num_experts}.",
        ),
        Rule(
            ("moe_router_topk", "moe_router_pre_softmax"),
            lambda v: v.moe_router_topk == 1 and not v.moe_router_pre_softmax,
            "--moe-router-topk 1 gives every token weight 1, and the router no gradient: add "
            "--moe-router-pre-softmax.",
        ),
    )

    @property
    def scale(self) -> float:
        """Factor on an expert's output that makes the sum over k experts the dense output."""
        if not self.moe_router_pre_softmax:
            return float(self.moe_upcycling_granularity)
        # At the start each weight is about 1/E, and k of them are chosen.
        return self.num_experts * self.moe_upcycling_granularity / self.moe_router_topk
