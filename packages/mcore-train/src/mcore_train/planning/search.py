"""Searches all layouts of a model on a cluster, ranked by predicted tokens per second.

Every layout is a config that ``mcore-train`` accepts. Impossible layouts are counted by their
reason. The others are timed with the formula of their bubble; the best are timed again by
simulating their schedule, and their options are resolved as a run does.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

from mcore_models.config import RecomputeConfig
from mcore_models.families import Family
from mcore_models.flops import num_parameters
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.pipeline_parallel.config import SCHEDULES, V_SHAPED, PipelineConfig
from mcore_train.composition import TrainConfig
from mcore_train.planning.expert_wgrads import with_chosen_wgrads
from mcore_train.planning.memory import CONTEXT_GIB, GIB, RankMemory, predict_memory
from mcore_train.planning.model_work import is_t5, model_shape
from mcore_train.planning.step_time import StepTime, predict_step
from mcore_train.planning.system import System
from mcore_train.resolution import ConflictError, resolve

MOST_CHUNKS = 4
GRAPH_GAIN = 0.02
"""Share of a step that the host takes, above which a CUDA graph is tried."""
_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout with its prediction."""

    config: TrainConfig
    step: StepTime
    memory: RankMemory
    tokens_per_s: float
    """Per GPU."""
    mfu: float

    @property
    def name(self) -> str:
        """Short name of the layout."""
        return layout_name(self.config)


@dataclass(kw_only=True, slots=True)
class Search:
    """Result of a search."""

    rows: list[Row]
    """Layouts that fit, fastest first."""
    num_tried: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of impossible layouts by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """One example of each reason, with its numbers."""


def search_layouts(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    pinned: Sequence[str] = (),
    *,
    searches_fp8: bool = False,
    top: int = 10,
) -> Search:
    """Return the layouts of a run that fit, ranked by tokens per second.

    Args:
        config: the model, its batches and options that are not searched.
        family: of the model.
        world_size: GPUs.
        vocab_size: tokens of the model.
        system: constants of the cluster.
        pinned: fields that the user gave; they are not searched.
        searches_fp8: also try fp8 linears.
        top: largest number of layouts to return; the schedules of three times as many are
            simulated.

    Raises:
        ConflictError: (a ValueError) for faults of the options that every layout has.
        ValueError: if no layout fits, with the reasons.
    """
    if lines := _command_faults(config, family, world_size, vocab_size, system, pinned):
        raise ConflictError(lines)
    search = Search(rows=[])
    flops = _step_flops(config, family, vocab_size)
    rough: list[tuple[float, TrainConfig, RankMemory]] = []
    for layout in _layouts(config, family, world_size, vocab_size, system, pinned, search):
        bases = list(_variants(layout, family, world_size, pinned, searches_fp8))
        if not bases:
            _reject(
                search,
                "no micro-batch divides --global-batch-size over the data ranks",
                layout_name(layout),
            )
        for base in bases:
            fitting, smallest = _fitting(base, family, world_size, vocab_size, system, pinned)
            if not fitting:
                _reject(
                    search,
                    "does not fit, even with full recomputation and offloading",
                    f"{layout_name(base)}: {smallest / GIB:.0f} GiB of {system.memory_gib:.0f}",
                )
            for tried, memory in fitting:
                search.num_tried += 1
                step = predict_step(
                    tried, family, world_size, vocab_size, system, simulates=False
                )
                rough.append((step.total, tried, memory))
                graph = _with_graph(tried, pinned)
                if graph and step.parts.get("host", 0.0) > GRAPH_GAIN * step.total:
                    step = predict_step(
                        graph, family, world_size, vocab_size, system, simulates=False
                    )
                    rough.append((step.total, graph, memory))
    rough.sort(key=lambda each: each[0])
    finalists = []
    # The bubble formulas favour some schedules, so layouts with and without a pipeline are
    # ranked separately before the simulation. Up to here ``--moe-wgrad-micro-batches auto`` was
    # counted as 1; finalists are counted with the number that a run would choose.
    by_kind: tuple[list, list] = ([], [])
    for each in rough:
        by_kind[each[1].parallelism.pipeline_model_parallel_size > 1].append(each)
    for _, tried, memory_of_one in chain.from_iterable(kind[: 3 * top + 5] for kind in by_kind):
        resolved = with_chosen_wgrads(tried, family, world_size, vocab_size, system)
        memory = memory_of_one
        if resolved is not tried:
            memory = predict_memory(resolved, family, world_size, vocab_size, system)
        try:
            step = predict_step(resolved, family, world_size, vocab_size, system)
        except ValueError as error:  # impossible schedule, such as with few micro-batches
            _reject(search, _plain(str(error)), layout_name(tried))
            continue
        finalists.append((step.total, tried, memory, step))
    finalists.sort(key=lambda each: each[0])
    num_tokens = _step_tokens(config)
    for seconds, tried, memory, step in finalists:
        if len(search.rows) >= top:
            break
        if problem := _problem(tried, family, world_size):
            _reject(search, problem, layout_name(tried))
            continue
        search.rows.append(
            Row(
                config=tried,
                step=step,
                memory=memory,
                tokens_per_s=num_tokens / seconds / world_size,
                mfu=flops / seconds / world_size / (system.peak_tflops * 1e12),
            )
        )
    if not search.rows:
        reasons = "; ".join(
            f"{reason} ({count}, such as {search.examples[reason]})"
            for reason, count in search.rejected.most_common(4)
        )
        raise ValueError(
            f"no layout of this model fits on {world_size} GPUs of {system.memory_gib:.0f} "
            f"GiB: {reasons}. Use more GPUs, a shorter --seq-length, or "
            "--optimizer-cpu-offload."
        )
    return search


def layout_name(config: TrainConfig) -> str:
    """Return a short name of a layout, such as ``tp4 sp pp2 (zb-v) mb1``."""
    parallel, pipeline = config.parallelism, config.pipeline
    words = []
    for short, name in _FIELDS.items():
        size = getattr(parallel, name)
        if size > 1 or (short == "tp" and size == 1):
            words.append(f"{short}{size}")
        if short == "tp" and parallel.sequence_parallel:
            words.append("sp")
        if short == "pp" and size > 1:
            is_v = pipeline.v_shaped
            chunks = f" x {pipeline.num_chunks}" if pipeline.num_chunks > 1 and not is_v else ""
            words.append(f"({pipeline.pipeline_schedule or '1f1b'}{chunks})")
        if short == "cp" and size > 1:
            words.append(f"({parallel.cp_comm_type or 'p2p'})")
        if short == "ep" and size > 1:
            words.append(f"({config.experts.moe_token_dispatcher_type})")
    sharding = config.data_parallelism.sharding
    zero = {"optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
    words.append(zero.get(sharding, "no-shard"))
    words.append(f"mb{config.batch.micro_batch_size}")
    if config.recomputation.recompute_granularity:
        options = config.recomputation
        half = "-half" if options.recompute_method == "block" else ""
        words.append(f"recompute-{options.recompute_granularity}{half}")
    if config.fp8.fp8_format:
        words.append("fp8")
    if config.offloading.optimizer_cpu_offload:
        words.append(f"offload-{config.offloading.optimizer_offload_fraction:g}")
    if config.run.cuda_graph_impl != "none":
        words.append("graph")
    return " ".join(words)


def _layouts(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    pinned: Sequence[str],
    found: Search,
) -> Iterator[TrainConfig]:
    """Yield configs with the possible degrees; count impossible degrees in ``found``."""
    requested = config.parallelism
    powers = [2**n for n in range(14) if 2**n <= world_size]
    degrees = sorted({*powers, *(3 * n for n in powers), world_size})

    def choices(name: str, values: list[int]) -> list[int]:
        return [getattr(requested, name)] if name in pinned else values

    experts, layers = config.experts.num_experts, family.num_layers(config.model)
    long = config.batch.seq_length > 8192
    tps = choices(_FIELDS["tp"], [n for n in powers if n <= 2 * system.gpus_per_node])
    pps = choices(_FIELDS["pp"], [n for n in degrees if n <= min(layers, 64)])
    cps = choices(_FIELDS["cp"], [n for n in powers if n == 1 or (long and n <= 64)])
    eps = choices(_FIELDS["ep"], [n for n in powers if n == 1 or experts % n == 0 < experts])
    etps = choices(_FIELDS["etp"], [0, 1] if experts else [0])
    for tp, pp, cp in product(tps, pps, cps):
        name = f"tp{tp} pp{pp} cp{cp}"
        if world_size % (tp * pp * cp):
            _reject(found, f"tp x pp x cp does not divide {world_size} GPUs", name)
            continue
        if layers % pp and not _uneven(layers, pp):
            _reject(found, "pipeline ranks do not divide the layers", f"{layers} over pp{pp}")
            continue
        if tp > system.gpus_per_node and _FIELDS["tp"] not in pinned:
            _reject(
                found,
                f"tp {tp} crosses hosts",
                _crossing(config, family, world_size, vocab_size, system, tp, pp),
            )
            continue
        dp = world_size // (tp * pp * cp)
        if config.batch.global_batch_size % dp:
            _reject(found, "data ranks do not divide --global-batch-size", f"{name} dp{dp}")
            continue
        for ep, etp in product(eps, etps):
            if (ep > 1 and (world_size // pp) % (ep * (etp or tp))) or (etp and tp == 1):
                continue
            parallel = _with_degrees(requested, tp, pp, cp, ep, etp, pinned)
            problems = family.layout_problems(
                config.model, parallel, config.experts, config.batch.seq_length
            )
            if problems:
                _reject(found, _plain(problems[0]), name)
                continue
            yield replace(config, parallelism=parallel)


def _command_faults(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    pinned: Sequence[str],
) -> list[str]:
    """Return the conflicts that all layouts share: those of options that are not searched.

    Usually the first layout has no conflict, and the function returns. Otherwise it checks each
    set of degrees once, and all variants of the first, the middle and the last set.
    """
    layouts = list(
        _layouts(config, family, world_size, vocab_size, system, pinned, Search(rows=[]))
    )
    kinds = {
        number: list(_variants(layouts[number], family, world_size, pinned, searches_fp8=True))
        for number in (0, len(layouts) // 2, len(layouts) - 1)
        if layouts
    }
    several = [
        tried
        for base in chain.from_iterable(kinds.values())
        for tried in (
            *(replace(base, offloading=each) for each in _offloads(base, pinned)),
            *(replace(base, recomputation=each) for each in _recomputing(base, family, pinned)),
        )
    ]
    shared: list[str] | None = None
    for tried in (*layouts, *several):
        lines = _conflicts(tried, family, world_size)
        shared = lines if shared is None else [each for each in shared if each in lines]
        if not shared:
            break
    return shared or []


def _with_degrees(
    given: ParallelConfig, tp: int, pp: int, cp: int, ep: int, etp: int, pinned: Sequence[str]
) -> ParallelConfig:
    sp = given.sequence_parallel if "sequence_parallel" in pinned else tp > 1
    return replace(
        given,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=sp and tp > 1,
    )


def _variants(
    config: TrainConfig,
    family: Family,
    world_size: int,
    pinned: Sequence[str],
    searches_fp8: bool,
) -> Iterator[TrainConfig]:
    """Yield all variants of the other options for one set of degrees."""
    parallel, batch = config.parallelism, config.batch
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    dp = world_size // (parallel.tensor_model_parallel_size * pp * cp)
    share = batch.global_batch_size // dp
    sizes = [n for n in (1, 2, 4, 8, 16) if share % n == 0]
    if "micro_batch_size" in pinned:
        sizes = [n for n in (batch.micro_batch_size,) if share % n == 0]
    choices: list[list[dict[str, Any]]] = [
        [{"batch": replace(batch, micro_batch_size=n)} for n in sizes],
        _pipelines(config, family, pinned),
        _context_kinds(config, pinned),
        _shardings(config, dp * cp, pinned),
        _dispatchers(config, pinned),
        _formats(config, pinned, searches_fp8),
    ]
    for parts in product(*choices):
        merged: dict[str, Any] = {}
        for part in parts:
            merged |= part
        tried = replace(config, **merged)
        if tried.batch.micro_batch_size > 1 and share // tried.batch.micro_batch_size < pp:
            continue  # the pipeline would not be filled
        yield tried


def _pipelines(
    config: TrainConfig, family: Family, pinned: Sequence[str]
) -> list[dict[str, Any]]:
    names = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank",
             "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
             "decoder_last_pipeline_num_layers")  # fmt: skip
    pp = config.parallelism.pipeline_model_parallel_size
    if pp == 1 or set(names) & set(pinned):
        return [{}]
    layers = family.num_layers(config.model)
    pipelines: list[PipelineConfig] = []
    for name in SCHEDULES:
        for chunks in range(2, MOST_CHUNKS + 1) if name == "interleaved" else (1,):
            stages = pp * (2 if name in V_SHAPED else chunks)
            first_last = _uneven(layers, pp) if layers % pp else (0, 0)
            if layers % stages and (stages > pp or not first_last):
                continue
            first, last = first_last or (0, 0)
            pipelines.append(
                replace(
                    config.pipeline,
                    pipeline_schedule=name,
                    num_virtual_stages_per_pipeline_rank=chunks,
                    decoder_first_pipeline_num_layers=first,
                    decoder_last_pipeline_num_layers=last,
                )
            )
    return [{"pipeline": each} for each in pipelines]


def _uneven(layers: int, pp: int) -> tuple[int, int] | None:
    """Return layers of the first and last rank, if only these have fewer; None: impossible."""
    rest = layers - (pp - 2) * -(-layers // pp)
    return (rest - rest // 2, rest // 2) if pp > 2 and rest > 1 else None


def _context_kinds(config: TrainConfig, pinned: Sequence[str]) -> list[dict[str, Any]]:
    parallel = config.parallelism
    if parallel.context_parallel_size == 1 or "cp_comm_type" in pinned:
        return [{}]
    return [
        {"parallelism": replace(parallel, cp_comm_type=kind)}
        for kind in ("p2p", "all_gather", "a2a")
    ]


def _shardings(config: TrainConfig, ranks: int, pinned: Sequence[str]) -> list[dict[str, Any]]:
    names = {"use_distributed_optimizer", "use_torch_fsdp2", "data_parallel_sharding_strategy"}
    requested = config.data_parallelism
    if ranks == 1 or names & set(pinned):
        return [{}]
    zero1 = replace(
        requested,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    shardings = [zero1]
    parallel = config.parallelism
    if parallel.pipeline_model_parallel_size == parallel.expert_model_parallel_size == 1:
        shardings += [
            DataParallelConfig(
                data_parallel_sharding_strategy=name,
                main_grads_dtype=requested.main_grads_dtype,
            )
            for name in ("optim_grads", "optim_grads_params")
        ]
    return [{"data_parallelism": each} for each in shardings]


def _dispatchers(config: TrainConfig, pinned: Sequence[str]) -> list[dict[str, Any]]:
    """List choices of the token exchange: exact sizes, or a fixed number of rows."""
    parallel, moe = config.parallelism, config.experts
    ep = parallel.expert_model_parallel_size
    if ep == 1 or "moe_token_dispatcher_type" in pinned:
        return [{}]
    choices: list[dict[str, Any]] = [{}]
    for kind in ("allgather", "symmetric"):
        fixed = replace(moe, moe_token_dispatcher_type=kind, moe_expert_rows_limit=float(ep))
        choices.append({"experts": fixed})
    return choices


def _with_graph(config: TrainConfig, pinned: Sequence[str]) -> TrainConfig | None:
    """Return the layout with one CUDA graph; None if it is impossible or not searched."""
    parallel, moe = config.parallelism, config.experts
    ep = parallel.expert_model_parallel_size
    is_possible = parallel.pipeline_model_parallel_size == 1 and not is_t5(config)
    is_possible &= not config.data_parallelism.is_fully_sharded
    is_possible &= ep == 1 or moe.moe_expert_rows_limit >= ep
    is_possible &= config.recomputation.recompute_granularity != "full"
    if not is_possible or "cuda_graph_impl" in pinned:
        return None
    return replace(config, run=replace(config.run, cuda_graph_impl="full_iteration"))


def _fitting(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    pinned: Sequence[str],
) -> tuple[list[tuple[TrainConfig, RankMemory]], float]:
    """Return variants of a layout that fit with the least recomputation and offloading.

    More offloading is kept only if it needs less recomputation.

    Returns:
        Variants that fit with their memory, and the bytes of the smallest variant.
    """
    limit = (system.memory_gib - CONTEXT_GIB) * GIB
    fitting: list[tuple[TrainConfig, RankMemory]] = []
    recomputations, offloads = _recomputing(config, family, pinned), _offloads(config, pinned)
    smallest_config = replace(config, recomputation=recomputations[-1], offloading=offloads[-1])
    smallest = predict_memory(smallest_config, family, world_size, vocab_size, system).total
    if smallest > limit:
        return [], smallest
    for offload in offloads:
        for index, recomputation in enumerate(recomputations):
            tried = replace(config, recomputation=recomputation, offloading=offload)
            memory = predict_memory(tried, family, world_size, vocab_size, system)
            if memory.total <= limit:
                fitting.append((tried, memory))
                recomputations = recomputations[:index]
                break
    return fitting, smallest


def _recomputing(
    config: TrainConfig, family: Family, pinned: Sequence[str]
) -> list[RecomputeConfig]:
    """List recomputation options, from nothing to whole layers."""
    if "recompute_granularity" in pinned:
        return [config.recomputation]
    light = ("layernorm", "moe_act" if config.experts.num_experts else "mlp_act")
    layers = family.num_layers(config.model)
    layers //= config.parallelism.pipeline_model_parallel_size * config.pipeline.num_chunks
    recomputations = [
        RecomputeConfig(),
        RecomputeConfig(recompute_granularity="selective", recompute_modules=light),
    ]
    if layers > 1:
        recomputations.append(
            RecomputeConfig(
                recompute_granularity="full",
                recompute_method="block",
                recompute_num_layers=layers // 2,
            )
        )
    return [*recomputations, RecomputeConfig(recompute_granularity="full")]


def _offloads(config: TrainConfig, pinned: Sequence[str]) -> list[OffloadConfig]:
    requested = config.offloading
    if "optimizer_cpu_offload" in pinned:
        return [requested]
    return [
        requested,
        replace(requested, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
        replace(requested, optimizer_cpu_offload=True),
    ]


def _formats(
    config: TrainConfig, pinned: Sequence[str], searches_fp8: bool
) -> list[dict[str, Any]]:
    if "fp8_format" in pinned or not searches_fp8:
        return [{}]
    return [{}, {"fp8": replace(config.fp8, fp8_format="hybrid", fp8_recipe="delayed")}]


def _crossing(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    tp: int,
    pp: int,
) -> str:
    """Describe how much slower tensor ranks over two hosts are than those of one host."""
    inside = system.gpus_per_node
    times = []
    for degree in (tp, inside):
        parallel = _with_degrees(config.parallelism, degree, pp, 1, 1, 0, ())
        if world_size % (degree * pp) or family.layout_problems(
            config.model, parallel, config.experts, config.batch.seq_length
        ):
            return f"tp{tp}"
        tried = replace(config, parallelism=parallel)
        step = predict_step(tried, family, world_size, vocab_size, system, simulates=False)
        times.append(step.total)
    return f"tp{tp}: {times[0] / times[1]:.1f}x slower than tp{inside}"


def _reject(found: Search, reason: str, example: str) -> None:
    """Count a rejected layout by reason; reasons that differ only in numbers are one."""
    words = re.sub(r"\d+", "", reason)
    known_reasons = (each for each in found.rejected if re.sub(r"\d+", "", each) == words)
    reason = next(known_reasons, reason)
    found.rejected[reason] += 1
    if reason not in found.examples or "slower" in example:
        found.examples[reason] = example


def _plain(problem: str) -> str:
    """Return a problem without its advice."""
    return problem.split(": ", maxsplit=1)[0].split(". ", maxsplit=1)[0].rstrip(".")


def _problem(config: TrainConfig, family: Family, world_size: int) -> str:
    """Return the first conflict of a config; empty: none."""
    lines = _conflicts(config, family, world_size)
    return _plain(lines[0]) if lines else ""


def _conflicts(config: TrainConfig, family: Family, world_size: int) -> list[str]:
    """Return all conflicts of a config."""
    try:
        resolve(config, world_size, family=family)
    except ConflictError as error:
        return list(error.lines)
    return []


def _step_tokens(config: TrainConfig) -> int:
    return config.batch.global_batch_size * config.batch.seq_length


def _step_flops(config: TrainConfig, family: Family, vocab_size: int) -> float:
    """Return the model's floating-point operations in a step."""
    length = config.batch.seq_length
    each = family.flops_per_token(config.model, vocab_size, length, config.experts)
    return each * _step_tokens(config)


def parameters(config: TrainConfig, family: Family, vocab_size: int) -> int:
    """Count the weights of the model."""
    return num_parameters(config.model, vocab_size, config.experts, family.tensor_shapes)


def expert_bytes(config: TrainConfig, family: Family, vocab_size: int) -> tuple[float, float]:
    """Return the bytes of a rank's expert weights in bf16, without and with expert ranks."""
    shape = model_shape(config, family.name, vocab_size)
    experts = sum(n * layer.expert_elements for layer, n in shape.layers)
    parallel = config.parallelism
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    whole = 2 * experts / parallel.pipeline_model_parallel_size / expert_tp
    return whole, whole / parallel.expert_model_parallel_size
