"""Degrees of parallelism and the switches that go with them: plain frozen data.

Field names are Megatron's flags with underscores; each field's docstring is its help
text. Nothing here needs the world or the hardware: what does is checked by
``rank_grid.build_grids``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import ON, Options, Rule, When, option

AXES = ("tp", "cp", "ep", "dp", "pp")
"""What --rank-order is made of, in the usual order."""


def _wrong_context_levels(values: Any) -> str:
    """Return what the sizes of a ring of groups lack; empty: nothing."""
    sizes, cp = values.hierarchical_context_parallel_sizes, values.context_parallel_size
    fits = len(sizes) == 2 and min(sizes) > 1 and sizes[0] * sizes[1] == cp
    if values.cp_comm_type != "a2a+p2p" or fits:
        return ""
    given = " ".join(map(str, sizes)) or "is not given"
    return (
        f"--hierarchical-context-parallel-sizes {given}: --cp-comm-type a2a+p2p takes two "
        f"sizes of 2 or more whose product is --context-parallel-size {cp}, such as 2 "
        f"{max(2, cp // 2)}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Options):
    """How a world of ranks is factorised: TP x CP x DP x PP, and ETP x EP x EDP x PP."""

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
    """How attention reaches the keys of other context ranks: p2p passes them round a ring,
    all_gather collects them, a2a exchanges heads for sequence, a2a+p2p does so among
    neighbours and passes keys round a ring of these groups. Empty: p2p, or all_gather for
    layers with a window or with attention dropout. Megatron's default: p2p."""

    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (), needs={"cp_comm_type": "a2a+p2p"}
    )
    """With --cp-comm-type a2a+p2p: neighbouring ranks that exchange heads, such as those of a
    node, and how many groups of them the ring has."""

    expert_model_parallel_size: int = option(1, minimum=1, needs={"num_experts": ON})
    """Ranks that split the experts; folded over data, context and tensor ranks."""

    hierarchical_expert_parallel_size: int = 0
    """Neighbouring expert-parallel ranks that share a node: a token crosses to another node
    once, however many of its experts are there. 0: tokens travel to their ranks in one step."""

    expert_tensor_parallel_size: int = option(
        0, minimum=0, zero="as --tensor-model-parallel-size"
    )
    """Ranks that split each expert's matrices; 0: the tensor-parallel size."""

    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the sequence over the tensor ranks."""

    use_tp_pp_dp_mapping: bool = option(False, excludes={"rank_order": ON})
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    rank_order: str = ""
    """Order of the axes over the ranks, the first varying fastest, such as tp-cp-ep-dp-pp;
    empty: that one, or what --use-tp-pp-dp-mapping says."""

    num_distributed_optimizer_instances: int = option(
        1,
        minimum=1,
        needs=(
            When(
                "sharding",
                lambda sharding: sharding != "no_shard",
                "--use-distributed-optimizer",
                "as every data rank holds a whole optimizer then",
            ),
        ),
    )
    """Replicated groups of optimizer shards: each holds a whole optimizer state."""

    distributed_timeout_minutes: float = option(10.0, above=0)
    """Minutes after which a collective that does not finish ends the job."""

    nccl_communicator_config_path: str = ""
    """TOML file with a table for some axes, such as [dp_cp] max_ctas = 8: how many
    multiprocessors nccl may take from the GEMMs that run at the same time."""

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
                and _is_no_part(
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


def _is_no_part(size: int, whole: int) -> bool:
    """Whether a size does not divide a larger one into two parts or more."""
    return not 1 < size < whole or whole % size != 0


ShardingStrategy = Literal["", "no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Megatron's words for what data ranks shard."""
FULLY_SHARDED = ("optim_grads", "optim_grads_params")
"""Those of torch's ``fully_shard``."""


def fully_sharded(why: str) -> When:
    """Return the condition that gradients are sharded, with why another option excludes it."""
    name = "--data-parallel-sharding-strategy optim_grads or optim_grads_params"
    return When("is_fully_sharded", bool, name, why)


_BY_LAYERS = (fully_sharded("which move a layer at a time"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelConfig(Options):
    """How gradients travel between data-parallel ranks, and who owns the optimizer state."""

    data_parallel_sharding_strategy: ShardingStrategy = ""
    """What data ranks shard: no_shard; optim, the optimizer (ZeRO-1); optim_grads, gradients
    and main weights too (ZeRO-2); optim_grads_params, weights as well, gathered layer by layer
    (ZeRO-3, FSDP). Empty: what the next two say, else no_shard."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer over the data ranks (ZeRO-1): each updates a slice of the weights."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer over the data ranks by torch's fully_shard."""

    overlap_grad_reduce: bool = False
    """Start reducing a bucket of gradients while backward still computes the others."""

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
    """Gather updated weights bucket by bucket under the next forward pass."""

    ddp_bucket_size: int = option(0, minimum=0, zero="derive", idle_with=_BY_LAYERS)
    """Elements after which a bucket closes; 0: max(40e6, 1e6 x data ranks) when gradients or
    weights travel under computation, else one bucket."""

    grad_reduce_in_bf16: bool = option(
        False, needs=(When("has_16_bits", bool, "--bf16 or --fp16"),)
    )
    """Keep and reduce main gradients in the weights' own 16-bit type, not in float32."""

    main_grads_dtype: Literal["fp32", "bf16"] = option("fp32", needs={"bf16": ON})
    """Format in which gradients are kept and summed; bf16 says what --grad-reduce-in-bf16 says.
    Rows of fully sharded weights have the format of their gradients: in bf16 they are not the
    main weights."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Keep and reduce main gradients in float32; so it is without --grad-reduce-in-bf16."""

    fp8_param_gather: bool = False
    """Send weights that --fp8-recipe tensorwise casts in fp8 when the distributed optimizer
    gathers them: half the bytes, the same numbers in every GEMM. Checkpoints hold all bits of
    the weights' format."""

    ddp_pad_buckets_for_high_nccl_busbw: bool = option(False, idle_with=_BY_LAYERS)
    """Pad buckets to multiples of 65536 elements, which NCCL moves faster on many ranks."""

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
            "--fp8-param-gather sends what the distributed optimizer gathers: it needs "
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
            "backward, and --pipeline-schedule {pipeline_schedule} makes those of weights "
            "later: use 1f1b or interleaved, or optim.",
        ),
    )

    @property
    def sharding(self) -> ShardingStrategy:
        """What data ranks shard, one of ``ShardingStrategy`` but the empty one."""
        if self.data_parallel_sharding_strategy:
            return self.data_parallel_sharding_strategy
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def has_narrow_grads(self) -> bool:
        """Whether gradients are kept and summed in the weights' own 16-bit type."""
        return self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16"

    @property
    def is_fully_sharded(self) -> bool:
        """Whether gradients are sharded, by torch's ``fully_shard``."""
        return self.sharding in FULLY_SHARDED
