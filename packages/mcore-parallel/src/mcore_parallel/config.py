"""Options of model and data parallelism: frozen dataclasses, no torch.

Field names are Megatron's flags with underscores; each field's docstring is its help
text. Rules here compare options only; ``rank_grid.build_grids`` checks them against the
world size.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import ON, Options, Rule, When, option

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Names that --rank-order arranges, in the default order."""


def _wrong_context_levels(values: Any) -> str:
    """Return the error message for sizes that do not factor the context size, else ''."""
    sizes, cp = values.hierarchical_context_parallel_sizes, values.context_parallel_size
    fits = len(sizes) == 2 and min(sizes) > 1 and sizes[0] * sizes[1] == cp
    if values.cp_comm_type != "a2a+p2p" or fits:
        return ""
    sizes_text = " ".join(map(str, sizes)) or "is not given"
    return (
        f"--hierarchical-context-parallel-sizes {sizes_text}: --cp-comm-type a2a+p2p takes two "
        f"sizes of 2 or more whose product is --context-parallel-size {cp}, such as 2 "
        f"{max(2, cp // 2)}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Options):
    """How the world size is factorised: TP x CP x DP x PP, and ETP x EP x EDP x PP."""

    tensor_model_parallel_size: int = option(1, minimum=1)
    """Ranks that split each weight matrix."""

    pipeline_model_parallel_size: int = option(1, minimum=1)
    """Ranks that split the layers."""

    context_parallel_size: int = option(1, minimum=1)
    """Ranks that split each sequence."""

    cp_comm_type: Literal["", "p2p", "all_gather", "a2a", "a2a+p2p"] = option(
        "",
        idle_with={"context_parallel_size": 1},
        selects_path="context_parallel.{cp_comm_type}",
    )
    """How attention gets the keys and values of other context ranks: p2p passes them around a
    ring, all_gather gathers them, a2a exchanges heads for sequence, a2a+p2p exchanges heads
    within groups of neighbouring ranks and passes keys around a ring of these groups. Empty:
    p2p, or all_gather for layers with a window or with attention dropout. Megatron's default:
    p2p."""

    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (), needs={"cp_comm_type": "a2a+p2p"}
    )
    """Two sizes for --cp-comm-type a2a+p2p: neighbouring ranks that exchange heads, such as
    those of a node, and the number of such groups in the ring."""

    expert_model_parallel_size: int = option(1, minimum=1, needs={"num_experts": ON})
    """Ranks that split the experts; folded over data, context and tensor ranks."""

    hierarchical_expert_parallel_size: int = 0
    """Neighbouring expert-parallel ranks on one node: tokens are dispatched first between
    nodes, once for all experts of a node, then inside the node. 0: one all-to-all over all
    expert-parallel ranks."""

    expert_tensor_parallel_size: int = option(
        0, minimum=0, zero="as --tensor-model-parallel-size"
    )
    """Ranks that split each expert's matrices; 0: the tensor-parallel size."""

    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the sequence over the tensor ranks."""

    use_tp_pp_dp_mapping: bool = option(False, excludes={"rank_order": ON})
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    rank_order: str = ""
    """Order of the axes over the ranks, fastest-varying first. Empty: tp-cp-ep-dp-pp, or
    tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping."""

    num_distributed_optimizer_instances: int = option(
        1,
        minimum=1,
        needs=(
            When(
                "sharding",
                lambda sharding: sharding != "no_shard",
                "--use-distributed-optimizer",
                "since every data rank then holds a complete optimizer",
            ),
        ),
    )
    """Replicas of the sharded optimizer: the data ranks are cut into as many groups, and the
    optimizer state is sharded inside each group."""

    distributed_timeout_minutes: float = option(10.0, above=0)
    """Minutes after which an unfinished collective ends the job."""

    nccl_communicator_config_path: str = ""
    """TOML file with NCCL settings by axis, such as [dp_cp] max_ctas = 8, which limits the
    multiprocessors that NCCL takes from concurrent GEMMs."""

    rules = (
        Rule(
            ("sequence_parallel", "tensor_model_parallel_size", "seq_length"),
            lambda v: v.sequence_parallel and v.tensor_model_parallel_size == 1,
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: leave it "
            "out, or raise the tensor-parallel size.",
        ),
        Rule(
            ("rank_order",),
            lambda v: v.rank_order and sorted(v.rank_order.split("-")) != sorted(AXES),
            f"--rank-order {{rank_order}} must name each of {', '.join(AXES)} once, with "
            "dashes between.",
        ),
        Rule(
            ("hierarchical_context_parallel_sizes", "cp_comm_type", "context_parallel_size"),
            _wrong_context_levels,
        ),
        Rule(
            ("hierarchical_expert_parallel_size", "expert_model_parallel_size"),
            lambda v: (
                v.hierarchical_expert_parallel_size
                and not _divides_properly(
                    v.hierarchical_expert_parallel_size, v.expert_model_parallel_size
                )
            ),
            "--hierarchical-expert-parallel-size {hierarchical_expert_parallel_size} must be a "
            "divisor of --expert-model-parallel-size {expert_model_parallel_size} other than 1 "
            "and itself; or leave it out.",
        ),
        Rule(
            ("hierarchical_expert_parallel_size", "expert_tensor_size"),
            lambda v: v.hierarchical_expert_parallel_size and v.expert_tensor_size > 1,
            "--hierarchical-expert-parallel-size {hierarchical_expert_parallel_size} needs "
            "whole experts on every rank: use --expert-tensor-parallel-size 1.",
        ),
        Rule(
            ("expert_tensor_size", "tensor_model_parallel_size", "num_experts"),
            lambda v: (
                not v.num_experts and v.expert_tensor_size != v.tensor_model_parallel_size
            ),
            "--expert-tensor-parallel-size {expert_tensor_size} has no effect without "
            "--num-experts.",
        ),
    )

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that split each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


def _divides_properly(divisor: int, number: int) -> bool:
    return 1 < divisor < number and number % divisor == 0


ShardingStrategy = Literal["", "no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Megatron's names for what data ranks shard."""
FULLY_SHARDED = ("optim_grads", "optim_grads_params")
"""Strategies that torch's ``fully_shard`` implements."""


def fully_sharded(why: str) -> When:
    """Return the condition "gradients are sharded", with the reason that excludes it."""
    name = "--data-parallel-sharding-strategy optim_grads or optim_grads_params"
    return When("is_fully_sharded", bool, name, why)


_BY_LAYERS = (fully_sharded("which move a layer at a time"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelConfig(Options):
    """How data ranks reduce gradients, and how they shard weights and optimizer state."""

    data_parallel_sharding_strategy: ShardingStrategy = ""
    """What data ranks shard: no_shard; optim, the optimizer (ZeRO-1); optim_grads, gradients
    and main weights too (ZeRO-2); optim_grads_params, weights as well, gathered layer by layer
    (ZeRO-3, FSDP). Empty: optim with --use-distributed-optimizer, optim_grads_params with
    --use-torch-fsdp2, else no_shard."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer over the data ranks (ZeRO-1): each rank updates a slice of the
    weights."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer over the data ranks by torch's fully_shard."""

    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while backward computes the next ones."""

    overlap_param_gather: bool = option(
        False,
        needs=(
            When(
                "sharding",
                lambda sharding: sharding != "no_shard",
                "--use-distributed-optimizer",
                "by which weights are gathered",
            ),
        ),
    )
    """Gather updated weights bucket by bucket during the next forward pass."""

    ddp_bucket_size: int = option(0, minimum=0, zero="derive", idle_with=_BY_LAYERS)
    """Elements after which a bucket closes; 0: max(40e6, 1e6 x data ranks) with
    --overlap-grad-reduce or --overlap-param-gather, else one bucket."""

    grad_reduce_in_bf16: bool = option(
        False, needs=(When("has_16_bits", bool, "--bf16 or --fp16"),)
    )
    """Accumulate and reduce main gradients in the weights' 16-bit type, not in float32."""

    main_grads_dtype: Literal["fp32", "bf16"] = option("fp32", needs={"bf16": ON})
    """Format in which gradients are accumulated and reduced; bf16 has the effect of
    --grad-reduce-in-bf16. Fully sharded weights are stored in the format of their gradients:
    in bf16 they are not the main weights."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce main gradients in float32, as without --grad-reduce-in-bf16."""

    fp8_param_gather: bool = False
    """Let the distributed optimizer gather in fp8 those weights that --fp8-recipe tensorwise
    casts: half the bytes, equal results of every GEMM. Checkpoints keep the weights' full
    precision."""

    ddp_pad_buckets_for_high_nccl_busbw: bool = option(False, idle_with=_BY_LAYERS)
    """Pad buckets to multiples of 65536 elements, which NCCL reduces faster on many ranks."""

    rules = (
        Rule(
            ("has_narrow_grads", "accumulate_allreduce_grads_in_fp32"),
            lambda v: v.has_narrow_grads and v.accumulate_allreduce_grads_in_fp32,
            "--grad-reduce-in-bf16 (--main-grads-dtype bf16) and "
            "--accumulate-allreduce-grads-in-fp32 contradict: leave one out.",
        ),
        Rule(
            ("fp8_param_gather", "sharding"),
            lambda v: v.fp8_param_gather and v.sharding != "optim",
            "--fp8-param-gather changes the gathers of the distributed optimizer: add "
            "--use-distributed-optimizer.",
        ),
        Rule(
            ("fp8_param_gather", "fp8_format", "fp8_recipe", "bf16", "main_params_dtype"),
            lambda v: (
                v.fp8_param_gather
                and not (
                    v.fp8_format
                    and v.fp8_recipe == "tensorwise"
                    and v.bf16
                    and v.main_params_dtype == "fp32"
                )
            ),
            "--fp8-param-gather needs --bf16 with main weights in float32, and --fp8-format "
            "with --fp8-recipe tensorwise, whose casts it sends.",
        ),
        Rule(
            ("use_distributed_optimizer", "sharding"),
            lambda v: v.use_distributed_optimizer and v.sharding == "no_shard",
            "--use-distributed-optimizer shards the optimizer and "
            "--data-parallel-sharding-strategy {data_parallel_sharding_strategy} does not: "
            "leave one out.",
        ),
        Rule(
            ("use_torch_fsdp2", "is_fully_sharded"),
            lambda v: v.use_torch_fsdp2 and not v.is_fully_sharded,
            "--use-torch-fsdp2 shards gradients and --data-parallel-sharding-strategy "
            "{data_parallel_sharding_strategy} does not: leave one out, or use optim_grads or "
            "optim_grads_params.",
        ),
        Rule(
            ("is_fully_sharded", "splits_backward", "pipeline_schedule"),
            lambda v: v.is_fully_sharded and v.splits_backward,
            "--data-parallel-sharding-strategy {sharding} sums a layer's gradients in its "
            "backward, and --pipeline-schedule {pipeline_schedule} computes weight gradients "
            "later: use 1f1b or interleaved, or optim.",
        ),
    )

    @property
    def sharding(self) -> ShardingStrategy:
        """What data ranks shard: the ``ShardingStrategy``, never empty."""
        if self.data_parallel_sharding_strategy:
            return self.data_parallel_sharding_strategy
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def has_narrow_grads(self) -> bool:
        """Whether gradients are accumulated and reduced in the weights' 16-bit type."""
        return self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16"

    @property
    def is_fully_sharded(self) -> bool:
        """Whether gradients are sharded, by torch's ``fully_shard``."""
        return self.sharding in FULLY_SHARDED
