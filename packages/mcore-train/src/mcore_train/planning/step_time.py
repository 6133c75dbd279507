"""Predicts the seconds of a training step of one layout.

Forwards and backwards follow the pipeline schedule (``pipeline_parallel.simulator``). Data
ranks reduce gradients under the last backward and gather weights under the first forward, with
``--overlap-grad-reduce`` and ``--overlap-param-gather``. Exposed communication is added, and so
is a share of the hidden communication, by which it slows the kernels that hide it. Then the
optimizer updates its shard.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

from mcore_models.config import TransformerConfig
from mcore_models.families import Family
from mcore_models.flops import kept_widths, stack_mixers
from mcore_models.logical_tensors import payload_width
from mcore_models.memory_changes import OptimizerChoice
from mcore_moe.config import MoEConfig
from mcore_parallel.pipeline_parallel.search import Costs, step_times
from mcore_train.composition import TrainConfig
from mcore_train.pipeline_choice import optimizer_choice, without_exchange
from mcore_train.planning.model_work import (
    FORWARD,
    INPUT,
    WEIGHT,
    ModelShape,
    Parts,
    Tokens,
    Work,
    head_work,
    is_t5,
    layer_work,
    model_shape,
    no_work,
    train_adapters,
)
from mcore_train.planning.system import System


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part, with the sum ``total``: gemm, experts, attention, other kernels, exposed
    messages by axis, bubble, optimizer, offload, host."""
    bubble_fraction: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())


def predict_step(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    *,
    simulates: bool = True,
) -> StepTime:
    """Return the predicted time of one step, by part.

    Args:
        config: all options; its layout must be possible.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: constants of the cluster.
        simulates: time the pipeline schedule by simulation; otherwise by its formula for the
            bubble, which is faster and enough to prune a search.
    """
    parallel, batch = config.parallelism, config.batch
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    dp = world_size // (tp * pp * cp)
    micro = batch.micro_batch_size
    num_microbatches = max(1, (batch.global_batch_size or micro * dp) // (micro * dp))
    shape = model_shape(config, family.name, vocab_size)
    # Layers on the fullest rank. ``layers`` is the work of a mean layer.
    per_rank = -(-shape.num_layers // pp)
    layers = no_work()
    for layer, count in shape.layers:
        tokens = _tokens(config, layer.stack)
        estimated = layer_work(layer, config, tokens, system, num_microbatches)
        for kind, parts in estimated.items():
            for part, seconds in parts.items():
                layers[kind][part] += seconds * count / shape.num_layers
    main = _tokens(config, "decoder" if is_t5(config) else "")
    embedding, head = head_work(config, main.own, vocab_size, system)
    # If a layout places layers of multi-token prediction (m) on a stage, ``step_times`` counts
    # them as layers of mean time; otherwise the last stage computes them with the loss.
    layout = config.pipeline.pipeline_model_parallel_layout
    num_placed_mtp = config.model.mtp_num_layers if pp > 1 and "m" in layout else 0
    for layer, count in () if num_placed_mtp else shape.further:
        for kind, parts in layer_work(layer, config, main, system, num_microbatches).items():
            for part, seconds in parts.items():
                head[kind][part] += seconds * count
    train_adapters(layers, head, embedding, shape, config, main.own, system)
    if config.data_parallelism.is_fully_sharded:
        _add_gathers(layers, shape, config, world_size, system)
    _recover_power(
        layers,
        head,
        per_rank if pp == 1 else per_rank + 1,
        pp,
        num_microbatches,
        config,
        system,
    )
    costs = Costs(
        layer={kind: _seconds(parts) for kind, parts in layers.items()},
        loss={kind: _seconds(parts) for kind, parts in head.items()},
        message=_message_s(config, main.own, system) if pp > 1 else 0.0,
    )
    ends = sum(map(_seconds, embedding.values()))
    if pp == 1:
        micro_batch_s = _micro_batch_s(layers, embedding, head, per_rank)
        schedule_s, bubble = num_microbatches * micro_batch_s, 0.0
    elif simulates:
        schedule_s, bubble = step_times(
            config.pipeline, family.num_layers(config.model), pp, num_microbatches, costs
        )
        schedule_s += num_microbatches * ends
    else:
        micro_batch_s = per_rank * sum(costs.layer.values()) + sum(costs.loss.values()) / pp
        bubble = bubble_formula(config, pp, num_microbatches)
        schedule_s = num_microbatches * micro_batch_s * (1 + bubble) + num_microbatches * ends
    mean_layers = (shape.num_layers + num_placed_mtp) / pp
    parts = _mean_parts(layers, embedding, head, mean_layers, pp, num_microbatches)
    idle = max(0.0, schedule_s - sum(parts.values()))
    parts["bubble" if pp > 1 else "host"] = idle
    num_offloaded = config.offloading.cpu_offloading_num_layers
    if num_offloaded:
        bytes_away = kept_bytes(config, main.own) * num_offloaded
        one_way = bytes_away / system.host_gb_s / 1e9
        forward, backward = costs.layer[FORWARD], costs.layer[INPUT] + costs.layer[WEIGHT]
        exposed_s = max(0.0, one_way - per_rank * forward)
        exposed_s += max(0.0, one_way - per_rank * backward)
        parts["offload"] = num_microbatches * exposed_s
    backward = schedule_s / num_microbatches * 0.66
    for name, seconds in _data_parallel_s(config, shape, world_size, system, backward).items():
        parts[name] = parts.get(name, 0.0) + seconds
    if config.optimizer.optimizer == "muon":
        parts["optimizer"] += _newton_schulz_s(config, family, vocab_size, world_size, system)
    parts["host"] = parts.get("host", 0.0) + 1e-3 * system.step_overhead_ms
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        bubble_fraction=bubble,
    )


def kept_bytes(config: TrainConfig, tokens: int) -> float:
    """Return the bytes of activations that a layer keeps for backward, on a rank."""
    widths = kept_widths(config.model, config.experts)
    mixers = stack_mixers(config.model, config.experts)
    wide = sum(
        widths[name] + 2 * config.model.hidden_size for names in mixers for name in names
    )
    return 2 * tokens * wide / len(mixers) / config.parallelism.tensor_model_parallel_size


def bubble_formula(config: TrainConfig, pp: int, num_microbatches: int) -> float:
    """Return the idle time of a schedule as a share of its work, by published formulas.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473 (interleaved); Qi et al. 2023,
        arXiv:2401.10241 (zb-h1); Qi et al. 2024, arXiv:2405.15362 (zb-v).
    """
    name = config.pipeline.pipeline_schedule
    waves = (pp - 1) / num_microbatches
    if name == "zb-h1":
        return waves / 3
    if name in ("zb-v", "dualpipev"):
        return waves / 6
    return waves / config.pipeline.num_chunks


def _tokens(config: TrainConfig, stack: str) -> Tokens:
    batch = config.batch
    length = batch.seq_length
    if stack == "decoder" and is_t5(config):
        length = batch.decoder_seq_length  # pyrefly: ignore
    num_tokens = batch.micro_batch_size * length // config.parallelism.context_parallel_size
    return Tokens(batch.micro_batch_size, length, num_tokens)


def _seconds(parts: Parts) -> float:
    """Return the seconds of parts: the slower of the device and the host, which overlap."""
    device = sum(seconds for part, seconds in parts.items() if part != "host")
    return max(device, parts["host"])


def _recover_power(
    layers: Work,
    head: Work,
    per_rank: int,
    pp: int,
    num_microbatches: int,
    config: TrainConfig,
    system: System,
) -> None:
    """Speed GEMMs up, in place, by the higher clock that pauses between GEMMs allow.

    Under the power limit, the clock grows with the share of a step in which neither GEMMs nor
    attention run.
    """
    total = busy = 0.0
    for work, times in ((layers, per_rank), (head, 1 / pp)):
        for parts in work.values():
            total += times * _seconds(parts)
            busy += times * (parts["gemm"] + parts["experts"] + parts["attention"])
    if not total:
        return
    share = busy / total / (1 + (pp > 1) * bubble_formula(config, pp, num_microbatches))
    faster = min(1 + system.power_slope * (1 - share), system.burst_tflops / system.gemm_tflops)
    for work in (layers, head):
        for parts in work.values():
            parts["gemm"] /= faster
            parts["experts"] /= faster


def _message_s(config: TrainConfig, tokens: int, system: System) -> float:
    parallel = config.parallelism
    tp = parallel.tensor_model_parallel_size
    width = 2 * payload_width(config.model) / (tp if parallel.sequence_parallel else 1)
    stride = tp * parallel.context_parallel_size
    return system.collective_s(
        "send", tokens * width, 2, max(stride, system.gpus_per_node // 2)
    )


def _mean_parts(
    layers: Work, embedding: Work, head: Work, per_rank: float, pp: int, num_microbatches: int
) -> dict[str, float]:
    """Return the parts of a mean rank's step, without the host, which runs ahead."""
    parts: Parts = defaultdict(float)
    for work, times in ((layers, per_rank), (head, 1 / pp), (embedding, 1.0)):
        for one in work.values():
            for part, seconds in one.items():
                if part != "host":
                    parts[part] += times * seconds * num_microbatches
    return dict(parts)


def _micro_batch_s(layers: Work, embedding: Work, head: Work, per_rank: int) -> float:
    """Return the seconds of a micro-batch on one stage, where the host may run ahead."""
    device = host = 0.0
    for work, times in ((layers, per_rank), (head, 1), (embedding, 1)):
        for one in work.values():
            host += times * one["host"]
            device += times * sum(s for part, s in one.items() if part != "host")
    return max(device, host)


FSDP_BYTES = {"optim_grads": 35, "optim_grads_params": 66}
"""Bytes that ``fully_shard`` moves for each weight of a rank and micro-batch: copies in and out
of its buffers and casts to and from float32. Measured on the 8B on 2 GPUs."""


def _add_gathers(
    layers: Work, shape: ModelShape, config: TrainConfig, world_size: int, system: System
) -> None:
    """Add the exposed gathers and scatters of a fully sharded layer."""
    parallel, data = config.parallelism, config.data_parallelism
    tp = parallel.tensor_model_parallel_size
    ranks = world_size // tp // parallel.pipeline_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    elements = sum(n * layer.dense_elements for layer, n in shape.layers) / tp
    elements += sum(n * layer.expert_elements for layer, n in shape.layers) / expert_tp
    elements /= shape.num_layers
    gathers = data.sharding == "optim_grads_params"
    gather = system.collective_s("all_gather", 2 * elements, ranks, tp)
    trained = elements
    if shape.adapters is not None:
        trained = shape.adapters.elements / shape.num_layers / tp
    scatter = system.collective_s("reduce_scatter", 4 * trained, ranks, tp)
    copies = system.move_s(FSDP_BYTES[data.sharding] * elements)
    for kind, wire, share in (
        (FORWARD, gather * gathers, 0.3),
        (INPUT, gather * gathers + scatter, 0.7),
    ):
        layers[kind]["other kernels"] += share * copies
        device = sum(s for part, s in layers[kind].items() if part != "host")
        device += kind is INPUT and sum(
            s for part, s in layers[WEIGHT].items() if part != "host"
        )
        hidden = min(wire, device)
        layers[kind]["fsdp"] += wire - hidden + 0.5 * system.contention * hidden


def _data_parallel_s(
    config: TrainConfig, shape: ModelShape, world_size: int, system: System, backward_s: float
) -> dict[str, float]:
    """Return the seconds after the schedule: gradient sums, update, gather of weights."""
    parallel, data = config.parallelism, config.data_parallelism
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    ends = (shape.embedding_elements + shape.head_elements) / tp
    if pp > 1 and not config.pipeline.v_shaped:
        ends = max(shape.embedding_elements, shape.head_elements) / tp
    dense = ends + sum(n * layer.dense_elements for layer, n in shape.layers) / tp / pp
    experts = sum(n * layer.expert_elements for layer, n in shape.layers)
    experts /= expert_tp * ep * pp
    if shape.adapters is not None:
        ends, dense, experts = 0.0, shape.adapters.elements / tp / pp, 0.0
    ranks, expert_ranks = world_size // (tp * pp), world_size // (expert_tp * ep * pp)
    wide = 2 if data.has_narrow_grads else 4
    parts: Parts = defaultdict(float)
    shards = data.sharding != "no_shard"
    if not data.is_fully_sharded:
        kind = "reduce_scatter" if shards else "all_reduce"
        last = min(dense, ends + max(40e6, 1e6 * ranks))
        stride = tp
        for elements, group, tail in (
            (dense, ranks, last),
            (experts, expert_ranks, 40e6 if experts else 0),
        ):
            if group < 2:
                continue
            reach = stride if elements is dense else expert_tp * ep
            reduce = system.collective_s(kind, wide * elements, group, reach)
            gather = shards * system.collective_s("all_gather", 2 * elements, group, reach)
            for wire, overlaps, room in (
                (reduce, data.overlap_grad_reduce, backward_s),
                (gather, data.overlap_param_gather, backward_s / 2),
            ):
                exposed_s = wire * min(1.0, tail / max(1.0, elements)) if overlaps else wire
                hidden = min(wire - exposed_s, room)
                parts["dp"] += wire - hidden + system.contention * hidden
    num_updated = dense / (ranks if shards else 1) + experts / (expert_ranks if shards else 1)
    parts["optimizer"] = system.move_s(_update_bytes(config) * num_updated)
    if not data.is_fully_sharded:
        parts["optimizer"] += system.move_s(wide * (dense + experts))  # zeroed
    offload = config.offloading
    if offload.optimizer_cpu_offload:
        state = _moment_bytes(config)
        rows = data.is_fully_sharded and data.main_grads_dtype == "fp32"
        state += 4 * (config.main_weights.main_params_dtype == "fp32" and not rows)
        parts["offload"] = (
            offload.optimizer_offload_fraction * num_updated * state / (system.host_gb_s * 1e9)
        )
    return dict(parts)


def _moment_bytes(config: TrainConfig) -> int:
    """Return the bytes of optimizer moments per weight of a layer."""
    return optimizer_choice(config).element_bytes(
        in_matrix=config.optimizer.optimizer == "muon"
    )


def _update_bytes(config: TrainConfig) -> float:
    """Return the bytes that an elementwise update moves per weight.

    The update reads the gradient twice (norm and update), and reads and writes moments and
    weights.
    """
    grad = 2 if config.data_parallelism.has_narrow_grads else 4
    has_main = config.main_weights.main_params_dtype == "fp32"
    return 2 * grad + 2 * _moment_bytes(config) + 8 * has_main + 2 * (1 if has_main else 2)


def _newton_schulz_s(
    config: TrainConfig, family: Family, vocab_size: int, world_size: int, system: System
) -> float:
    """Return the seconds in which Muon orthogonalizes the matrices of the fullest rank.

    All ranks of a pipeline stage share the stage's matrices by their cost, and no matrix is
    split; under ``--muon-tp-mode duplicated`` all tensor ranks compute the same matrices. For
    8 layers of Llama-3-8B on an H200 the update of all weights was estimated with 272 ms and
    took 270 ms with quack's kernel, 322 ms without (``optimizers-muon-symmetric-h200``). Two
    errors cancel with the kernel: the estimate counts complete products, of which the kernel
    computes half, and it takes the rate of long GEMMs, which these products do not reach.
    """
    experts = without_exchange(config.experts)
    shapes = _matrices(family, config.model, vocab_size, experts, optimizer_choice(config))
    seconds = [count * _iteration_s(shape, system) for shape, count in shapes]
    longest = max((_iteration_s(shape, system) for shape, _ in shapes), default=0.0)
    is_duplicated = config.muon.muon_tp_mode == "duplicated"
    copies = config.parallelism.tensor_model_parallel_size if is_duplicated else 1
    share = max(sum(seconds) * copies / world_size, longest)
    return config.muon.muon_num_ns_steps * share


@lru_cache(maxsize=8)
def _matrices(
    family: Family,
    model: TransformerConfig,
    vocab_size: int,
    experts: MoEConfig,
    optimizer: OptimizerChoice,
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Count the matrices of each shape that a matrix optimizer updates."""
    shapes = family.tensor_shapes(model, vocab_size, experts)
    return tuple(Counter(optimizer.matrices(shapes).values()).items())


def _iteration_s(shape: tuple[int, ...], system: System) -> float:
    """Return the seconds of one Newton-Schulz step X <- a X + (b A + c A A) X, A = X X^T.

    X has as many rows as its shorter side m, and n columns: 4 m^2 n + 2 m^3 operations (Jordan
    et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    m, n = min(shape), max(shape)
    return system.gemm_s(m, m, n) + system.gemm_s(m, m, m) + system.gemm_s(m, n, m)
