"""Degrees of parallelism and the switches that go with them: plain frozen data.

Field names are Megatron's flags with underscores; each field's docstring is its help
text. Nothing here needs the world or the hardware: what does is checked by
``rank_grid.build_grids``.
"""

from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_at_least

AXES = ("tp", "cp", "ep", "dp", "pp")
"""What --rank-order is made of, in the usual order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a world of ranks is factorised: TP x CP x DP x PP, and ETP x EP x EDP x PP."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each weight matrix."""

    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""

    context_parallel_size: int = 1
    """Ranks that split each sequence."""

    cp_comm_type: str = ""
    """How attention reaches the keys of other context ranks: p2p passes them round a ring,
    all_gather collects them, a2a exchanges heads for sequence, a2a+p2p does so among
    neighbours and passes keys round a ring of these groups. Empty: p2p, or all_gather for
    layers with a window or with attention dropout. Megatron's default: p2p."""

    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """With --cp-comm-type a2a+p2p: neighbouring ranks that exchange heads, such as those of a
    node, and how many groups of them the ring has."""

    expert_model_parallel_size: int = 1
    """Ranks that split the experts; folded over data, context and tensor ranks."""

    hierarchical_expert_parallel_size: int = 0
    """Neighbouring expert-parallel ranks that share a node: a token crosses to another node
    once, however many of its experts are there. 0: tokens travel to their ranks in one step."""

    expert_tensor_parallel_size: int = 0
    """Ranks that split each expert's matrices; 0: the tensor-parallel size."""

    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the sequence over the tensor ranks."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    rank_order: str = ""
    """Order of the axes over the ranks, the first varying fastest, such as tp-cp-ep-dp-pp;
    empty: that one, or what --use-tp-pp-dp-mapping says."""

    num_distributed_optimizer_instances: int = 1
    """Replicated groups of optimizer shards: each holds a whole optimizer state."""

    distributed_timeout_minutes: float = 10.0
    """Minutes after which a collective that does not finish ends the job."""

    nccl_communicator_config_path: str = ""
    """TOML file with a table for some axes, such as [dp_cp] max_ctas = 8: how many
    multiprocessors nccl may take from the GEMMs that run at the same time."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size"),
            "num_distributed_optimizer_instances",
        )
        if self.expert_tensor_parallel_size < 0:
            raise ValueError(
                f"--expert-tensor-parallel-size {self.expert_tensor_parallel_size} must be 0 "
                "(as --tensor-model-parallel-size) or more."
            )
        size, ep = self.hierarchical_expert_parallel_size, self.expert_model_parallel_size
        if size and (not 1 < size < ep or ep % size):
            raise ValueError(
                f"--hierarchical-expert-parallel-size {size} must be a divisor of "
                f"--expert-model-parallel-size {ep} other than 1 and itself; or leave it out."
            )
        if size and (self.expert_tensor_parallel_size or self.tensor_model_parallel_size) > 1:
            raise ValueError(
                f"--hierarchical-expert-parallel-size {size} needs whole experts on every "
                "rank: use --expert-tensor-parallel-size 1."
            )
        if self.distributed_timeout_minutes <= 0:
            raise ValueError("--distributed-timeout-minutes must be above 0.")
        if self.rank_order and sorted(self.rank_order.split("-")) != sorted(AXES):
            raise ValueError(
                f"--rank-order {self.rank_order} must name each of {', '.join(AXES)} once, "
                "with dashes between."
            )
        if self.rank_order and self.use_tp_pp_dp_mapping:
            raise ValueError(
                "--rank-order and --use-tp-pp-dp-mapping contradict: leave one out."
            )
        if self.cp_comm_type not in ("", "p2p", "all_gather", "a2a", "a2a+p2p"):
            raise ValueError(
                f"--cp-comm-type {self.cp_comm_type} is not known: use p2p, all_gather, a2a or "
                "a2a+p2p."
            )
        self._check_context_levels()
        if self.cp_comm_type and self.context_parallel_size == 1:
            raise ValueError(
                f"--cp-comm-type {self.cp_comm_type} has no effect with "
                "--context-parallel-size 1: leave it out, or raise the context-parallel size."
            )

    def _check_context_levels(self) -> None:
        sizes, cp = self.hierarchical_context_parallel_sizes, self.context_parallel_size
        flag = "--hierarchical-context-parallel-sizes"
        if sizes and self.cp_comm_type != "a2a+p2p":
            raise ValueError(
                f"{flag} has no effect without --cp-comm-type a2a+p2p: leave one out."
            )
        fits = len(sizes) == 2 and min(sizes) > 1 and sizes[0] * sizes[1] == cp
        if self.cp_comm_type == "a2a+p2p" and not fits:
            given = " ".join(map(str, sizes)) or "is not given"
            raise ValueError(
                f"{flag} {given}: --cp-comm-type a2a+p2p takes two sizes of 2 or more whose "
                f"product is --context-parallel-size {cp}, such as 2 {max(2, cp // 2)}."
            )


ShardingStrategy = Literal["", "no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Megatron's words for what data ranks shard."""
FULLY_SHARDED = ("optim_grads", "optim_grads_params")
"""Those of torch's ``fully_shard``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelConfig:
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

    overlap_param_gather: bool = False
    """Gather updated weights bucket by bucket under the next forward pass."""

    ddp_bucket_size: int = 0
    """Elements after which a bucket closes; 0: max(40e6, 1e6 x data ranks) when gradients or
    weights travel under computation, else one bucket."""

    grad_reduce_in_bf16: bool = False
    """Keep and reduce main gradients in the weights' own 16-bit type, not in float32."""

    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are kept and summed; bf16 says what --grad-reduce-in-bf16 says.
    Rows of fully sharded weights have the format of their gradients: in bf16 they are not the
    main weights."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Keep and reduce main gradients in float32; so it is without --grad-reduce-in-bf16."""

    fp8_param_gather: bool = False
    """Send weights that --fp8-recipe tensorwise casts in fp8 when the distributed optimizer
    gathers them: half the bytes, the same numbers in every GEMM. Checkpoints hold all bits of
    the weights' format."""

    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to multiples of 65536 elements, which NCCL moves faster on many ranks."""

    def __post_init__(self) -> None:
        if self.ddp_bucket_size < 0:
            raise ValueError(
                f"--ddp-bucket-size {self.ddp_bucket_size} must be 0 (derive) or more elements."
            )
        if self.has_narrow_grads and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError(
                "--grad-reduce-in-bf16 (--main-grads-dtype bf16) and "
                "--accumulate-allreduce-grads-in-fp32 contradict: leave one out."
            )
        if self.overlap_param_gather and self.sharding == "no_shard":
            raise ValueError(
                "--overlap-param-gather needs --use-distributed-optimizer: without it no "
                "weights are gathered."
            )
        if self.fp8_param_gather and self.sharding != "optim":
            raise ValueError(
                "--fp8-param-gather sends what the distributed optimizer gathers: it needs "
                "--use-distributed-optimizer."
            )
        self._check_sharding()

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

    def _check_sharding(self) -> None:
        strategy = f"--data-parallel-sharding-strategy {self.data_parallel_sharding_strategy}"
        if self.use_distributed_optimizer and self.sharding == "no_shard":
            raise ValueError(
                f"--use-distributed-optimizer shards the optimizer and {strategy} does not: "
                "leave one out."
            )
        if not self.is_fully_sharded:
            if self.use_torch_fsdp2:
                raise ValueError(
                    f"--use-torch-fsdp2 shards gradients and {strategy} does not: leave one "
                    "out, or use optim_grads or optim_grads_params."
                )
            return
        for name in ("ddp_bucket_size", "ddp_pad_buckets_for_high_nccl_busbw"):
            if getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} has no effect where torch's fully_shard moves a layer at a time "
                    "(--data-parallel-sharding-strategy, --use-torch-fsdp2): leave it out."
                )
