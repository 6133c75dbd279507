"""What experts contradict, and need: exchanges beside computation, narrow formats, graphs."""

from collections.abc import Iterator, Sequence

from mcore_base.field_checks import flag
from mcore_models.logical_tensors import expert_size
from mcore_moe.config import MoEConfig, one_step_option
from mcore_train.composition import TrainConfig


def find_expert_conflicts(config: TrainConfig) -> Iterator[str]:
    """Name what options of experts contradict or lack, one line each."""
    yield from _idle_rate(config.experts)
    yield from _pair_conflicts(config)
    yield from _narrow_expert_conflicts(config)
    yield from _shared_gradient_conflicts(config)


def expert_graph_conflicts(config: TrainConfig, name: str) -> Iterator[str]:
    """What experts need so that the host waits for no number of theirs."""
    parallel, experts = config.parallelism, config.experts
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    is_spread = parallel.expert_model_parallel_size > 1 or expert_tp > 1
    kind, limit = experts.moe_token_dispatcher_type, experts.moe_expert_rows_limit
    is_one_part = limit >= parallel.expert_model_parallel_size or (
        kind == "symmetric" and not limit
    )
    if is_spread and not (kind in ("allgather", "symmetric") and is_one_part):
        yield (
            f"{name} cannot record experts that exchange tokens in other numbers each step: "
            "leave it out, or use --moe-token-dispatcher-type allgather or symmetric and "
            f"--moe-expert-rows-limit {parallel.expert_model_parallel_size}."
        )
    sizes = _expert_sizes(config)
    is_grouped = experts.moe_grouped_gemm and config.precision.bf16
    if not is_grouped or any(size % 8 for size in sizes):
        yield (
            f"{name} can record experts only as grouped GEMMs: use --bf16, leave out "
            "--no-moe-grouped-gemm, and make their sizes multiples of 8; or leave it out."
        )


def _idle_rate(experts: MoEConfig) -> Iterator[str]:
    """Refuse another rate for a bias that there is not."""
    rate = experts.moe_router_bias_update_rate
    is_idle = experts.num_experts and not experts.moe_router_enable_expert_bias
    if is_idle and rate != MoEConfig().moe_router_bias_update_rate:
        yield (
            f"--moe-router-bias-update-rate {rate} has no effect without "
            "--moe-router-enable-expert-bias: leave it out, or give both."
        )


def _pair_conflicts(config: TrainConfig) -> Iterator[str]:
    """What forwards beside backwards need, and cannot be combined with."""
    name = "--overlap-moe-expert-parallel-comm"
    if not config.pipeline.overlap_moe_expert_parallel_comm:
        return
    if not config.experts.num_experts or config.parallelism.expert_model_parallel_size == 1:
        yield (
            f"{name} has no effect without experts that --expert-model-parallel-size 2 or more "
            "spreads: leave it out."
        )
    if config.data_parallelism.is_fully_sharded:
        yield (
            f"{name} runs a layer's forward and backward at one time, and "
            f"--data-parallel-sharding-strategy {config.data_parallelism.sharding} gathers its "
            "weights for one of them: leave it out, or use optim."
        )
    if config.offloading.cpu_offloading:
        yield f"{name} keeps no order in which --cpu-offloading could fetch: leave one out."
    is_alltoall = config.experts.moe_token_dispatcher_type == "alltoall"
    if is_alltoall and config.experts.moe_expert_rows_limit:
        yield (
            f"{name} takes as many turns on all ranks, and --moe-expert-rows-limit cuts "
            "exchanges by routing: leave one out, or use --moe-token-dispatcher-type allgather."
        )
    if config.parallelism.hierarchical_expert_parallel_size:
        yield (
            f"{name} has no effect with --hierarchical-expert-parallel-size, whose two steps "
            "give no turn away: leave one out."
        )
    kind = config.experts.moe_token_dispatcher_type
    if kind in ("deepep", "symmetric"):
        yield (
            f"{name} has no effect with --moe-token-dispatcher-type {kind}, which gives no "
            "turn away: use alltoall or allgather."
        )


def _narrow_expert_conflicts(config: TrainConfig) -> Iterator[str]:
    """What experts and tokens in fp8 need, and what runs beside exchanges."""
    experts, parallel = config.experts, config.parallelism
    is_spread = parallel.expert_model_parallel_size > 1
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    for name in ("moe_shared_expert_overlap", "moe_split_batch_overlap"):
        if getattr(experts, name) and (not is_spread or expert_tp > 1):
            yield (
                f"{flag(name)} has an effect only with --expert-model-parallel-size above 1 "
                "and --expert-tensor-parallel-size 1: leave it out."
            )
    problem = one_step_option(experts)
    if parallel.hierarchical_expert_parallel_size and problem:
        yield problem
    if experts.moe_token_dispatcher_type == "deepep" and (
        not config.precision.bf16 or not is_spread or expert_tp > 1
    ):
        yield (
            "--moe-token-dispatcher-type deepep sends bfloat16 tokens of whole experts over "
            "--expert-model-parallel-size: use --bf16, an --expert-model-parallel-size above 1 "
            "and --expert-tensor-parallel-size 1, or another dispatcher."
        )
    if experts.moe_token_dispatcher_type == "symmetric" and (not is_spread or expert_tp > 1):
        yield (
            "--moe-token-dispatcher-type symmetric reads rows of whole experts over "
            "--expert-model-parallel-size: use one above 1 and --expert-tensor-parallel-size "
            "1, or another dispatcher."
        )
    if not experts.moe_experts_dtype or not experts.num_experts:
        return
    sizes = _expert_sizes(config)
    name = f"--moe-experts-dtype {experts.moe_experts_dtype}"
    if not config.fp8.fp8_format:
        yield f"{name} needs --fp8-format, as other linears do: give it, or leave it out."
    if any(size % 16 for size in sizes):
        yield f"{name} needs experts whose sizes are multiples of 16, and theirs are {sizes}."
    if expert_tp > 1:
        yield (
            f"{name} scales whole rows, which --expert-tensor-parallel-size {expert_tp} cuts: "
            "use 1."
        )


def _shared_gradient_conflicts(config: TrainConfig) -> Iterator[str]:
    """What keeps rows of several micro-batches from one GEMM into main gradients."""
    number = config.experts.moe_wgrad_micro_batches
    if number == 1 or not config.experts.num_experts:
        return
    schedule, sharding = config.pipeline.pipeline_schedule, config.data_parallelism.sharding
    for name, is_on, why in (
        (f"--pipeline-schedule {schedule}", config.pipeline.splits_backward,
         "has its own time for weight gradients"),
        (f"--data-parallel-sharding-strategy {sharding}",
         config.data_parallelism.is_fully_sharded, "sums gradients in every backward"),
        ("--main-grads-dtype bf16 or --grad-reduce-in-bf16",
         config.data_parallelism.has_narrow_grads, "has no main gradients in float32"),
        ("--cuda-graph-impl local", config.run.cuda_graph_impl == "local",
         "writes rows of the next micro-batch over these"),
        ("--transformer-impl transformer_engine",
         config.kernels.transformer_impl == "transformer_engine", "adds each by itself"),
        ("--no-moe-grouped-gemm", not config.experts.moe_grouped_gemm, "has no such GEMM"),
        ("--peft", config.peft.peft != "none", "freezes these weights"),
    ):  # fmt: skip
        if is_on:
            yield f"--moe-wgrad-micro-batches {number}: {name} {why}; leave one out."


def idle_gradient_sums(config: TrainConfig, counts: Sequence[int]) -> Iterator[str]:
    """Refuse to wait for micro-batches that do not come; ``counts``: of the steps."""
    number = config.experts.moe_wgrad_micro_batches
    if number > 1 and max(counts) == 1:
        yield (
            f"--moe-wgrad-micro-batches {number} has no effect with one micro-batch a step: "
            "leave it out, or lower --micro-batch-size."
        )


def _expert_sizes(config: TrainConfig) -> tuple[int, int]:
    """Return the widths of an expert's input and of its inside."""
    experts = config.experts
    width = experts.moe_latent_size or config.model.hidden_size
    return width, expert_size(config.model, experts)
