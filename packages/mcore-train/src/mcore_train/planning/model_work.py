"""Estimates the seconds of a micro-batch in each layer: GEMMs, attention, bytes, messages.

Layers and their matrices come from the shape table (``Family.tensor_shapes``); equal layers are
counted once. Costs are split as pipeline schedules split them, into forward, gradient of the
input and gradient of the weights, and by part (``PARTS``).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mcore_models.config import chunk, window
from mcore_models.encoder_config import T5Config
from mcore_models.families import FAMILIES
from mcore_models.logical_tensors import (
    ROW_PARALLEL,
    delta_sizes,
    expert_size,
    head_dim,
    is_gated,
    mamba_sizes,
    num_kv_heads,
    value_dim,
)
from mcore_models.memory_changes import expert_rows
from mcore_models.parameter_kinds import tensor_kind
from mcore_models.peft.config import BLOCK, PeftConfig, adapter_shapes, linears
from mcore_parallel.pipeline_parallel.actions import Kind
from mcore_train.composition import TrainConfig
from mcore_train.pipeline_choice import without_exchange
from mcore_train.planning.system import System

PARTS = (
    "gemm",
    "experts",
    "attention",
    "other kernels",
    "tp",
    "cp",
    "ep",
    "fsdp",
    "host waits",
    "host",
)
"""Parts of a layer's time: three kinds of arithmetic, moved bytes, messages by axis, host."""
FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Parts = defaultdict[str, float]
"""Seconds by part."""
Work = dict[Kind, Parts]
"""Seconds of a layer, by kind of action and part."""


def no_work() -> Work:
    """Return empty work, to which parts are added."""
    return {kind: defaultdict(float) for kind in (FORWARD, INPUT, WEIGHT)}


_BLOCK = re.compile(r"(?:(encoder|decoder)\.)?blocks\.(\d+)\.|mtp\.(\d+)\.(?:block\.)?")
_TABLES = ("embedding.", "position_embedding.", "per_layer_embedding.", "altup_")
_REPLICATED = ("layer_input", "altup", "laurel")
"""Parts of layers that every tensor rank computes completely, without communication."""
_RECOMPUTED = {"mlp": "mlp", "moe": "moe", "core_attn": "attention"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear of a layer; fused parts (q, k, v; gate, up) are one matrix."""

    mixer: str
    name: str
    outputs: int
    inputs: int

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor ranks split the inputs, and sum the outputs."""
        return self.name in ROW_PARALLEL


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer by its shapes."""

    stack: str
    """``encoder`` or ``decoder`` of a T5, or ``mtp``; empty: the only stack."""
    mixers: tuple[str, ...]
    matrices: tuple[Matrix, ...]
    expert: tuple[tuple[int, int], ...]
    """Outputs and inputs of one expert's matrices."""
    dense_elements: int
    expert_elements: int
    """Elements of all experts."""
    span: tuple[int, int] = (-1, 0)
    """Window and chunk of attention; -1 and 0: none."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's layers, each with its count, and the tensors outside of layers."""

    layers: tuple[tuple[Layer, int], ...]
    further: tuple[tuple[Layer, int], ...]
    """Layers of multi-token prediction."""
    embedding_elements: int
    head_elements: int
    """Elements of the head; 0: tied to the embedding."""
    adapters: "Adapters | None" = None
    """Adapters that are trained instead of the model; None: the model is trained."""

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline."""
        return sum(count for _, count in self.layers)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Sums over the linears of all layers that have adapters."""

    elements: int
    """Elements of the adapters."""
    inputs: int
    outputs: int
    """Outputs of the linears other than experts; ``inputs`` likewise."""
    base_elements: int
    """Elements of the linears and experts that ``--peft-base-bits`` rounds."""


def model_shape(config: TrainConfig, family: str, vocab_size: int) -> ModelShape:
    """Group the logical tensors of a model by layer."""
    experts = without_exchange(config.experts)
    return _model_shape(family, config.model, experts, vocab_size, config.peft)


@lru_cache(maxsize=8)
def _model_shape(
    family: str, model: object, moe: object, vocab_size: int, peft: PeftConfig
) -> ModelShape:
    shapes = FAMILIES[family].tensor_shapes(model, vocab_size, moe)
    blocks: dict[tuple[str, int], dict[str, tuple[int, ...]]] = defaultdict(dict)
    embedding = head = 0
    for name, shape in shapes.items():
        if match := _BLOCK.match(name):
            stack = match[1] or ("mtp" if match[3] else "")
            key = stack, int(match[2] or match[3] or 0)
            blocks[key][name[match.end() :]] = shape
        elif name.startswith(_TABLES):
            embedding += prod(shape)
        elif name.startswith(("head.", "lm_head.")):
            head += prod(shape)
    counted: Counter[Layer] = Counter()
    further: Counter[Layer] = Counter()
    for (stack, number), tensors in blocks.items():
        kinds = further if stack == "mtp" else counted
        last = min(number, model.num_layers - 1)  # pyrefly: ignore
        span = (window(model, last), chunk(model, last))  # pyrefly: ignore
        kinds[_layer(stack, tensors, span)] += 1
    adapters = _adapters(shapes, peft) if peft.peft != "none" else None
    return ModelShape(tuple(counted.items()), tuple(further.items()), embedding, head, adapters)


def _adapters(shapes: Mapping[str, tuple[int, ...]], peft: PeftConfig) -> Adapters:
    rounded = {
        name: shapes[f"{name}.weight"]
        for name in linears(shapes)
        if peft.is_target(name) or ".experts." in name
    }
    dense = [shape for name, shape in rounded.items() if ".experts." not in name]
    return Adapters(
        elements=sum(map(prod, adapter_shapes(peft, shapes).values())),
        inputs=sum(inputs for _, inputs in dense),
        outputs=sum(outputs for outputs, _ in dense),
        base_elements=sum(map(prod, rounded.values())),
    )


def _layer(stack: str, tensors: Mapping[str, tuple[int, ...]], span: tuple[int, int]) -> Layer:
    matrices: dict[tuple[str, str], list[int]] = {}
    mixers: dict[str, None] = {}
    expert: dict[str, list[int]] = {}
    dense = experts = 0
    for name, shape in tensors.items():
        mixer, _, rest = name.partition(".")
        if ".experts." in name:
            mixers[mixer] = None
            experts += prod(shape)
            if ".experts.0." in name and len(shape) == 2:
                linear = rest.split(".")[2]
                outputs = expert.setdefault(linear, [0, shape[1]])
                outputs[0] += shape[0]
            continue
        dense += prod(shape)
        if tensor_kind(name, shape) != "matrix":
            continue
        if mixer != "eh_proj":
            mixers[mixer] = None
        parts = rest.split(".")
        linear = ".".join(parts[:2]) if parts[0] == "shared" else parts[0]
        sizes = matrices.setdefault((mixer, linear.rpartition(".")[2]), [0, shape[1]])
        sizes[0] += shape[0]
    return Layer(
        stack,
        tuple(mixers),
        tuple(Matrix(m, n, out, inputs) for (m, n), (out, inputs) in matrices.items()),
        tuple((out, inputs) for out, inputs in expert.values()),
        dense,
        experts,
        span,
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one micro-batch on a rank."""

    sequences: int
    length: int
    """Tokens of a sequence, over all context ranks."""
    own: int
    """Tokens of this context rank."""


def layer_work(
    layer: Layer, config: TrainConfig, tokens: Tokens, system: System, num_microbatches: int
) -> Work:
    """Estimate the seconds of a layer on a rank for one micro-batch.

    Args:
        layer: by its shapes.
        config: all options.
        tokens: of the micro-batch in this layer's stack.
        system: constants of the cluster.
        num_microbatches: of a step.
    """
    work = no_work()
    _add_linears(work, layer, config, tokens.own, system)
    if layer.expert:
        _add_experts(work, layer, config, tokens.own, system, num_microbatches)
    for mixer in layer.mixers:
        if mixer in ("attention", "cross_attention", "mla"):
            _add_attention(work, layer, config, tokens, system)
    _add_moved_bytes(work, layer, config, tokens.own, system)
    if config.parallelism.tensor_model_parallel_size > 1:
        _add_tensor_messages(work, layer, config, tokens.own, system)
    _recompute(work, config)
    if config.run.cuda_graph_impl == "none":
        share = 0.5 + len(layer.mixers) / 4 + 0.85 * bool(layer.expert)
        extra = config.recomputation.recompute_granularity != ""
        host = 1e-3 * system.host_layer_ms * share
        work[FORWARD]["host"] += host / 3
        work[INPUT]["host"] += host * (1 + 0.5 * extra) / 3
        work[WEIGHT]["host"] += host / 3
    return work


def train_adapters(
    layer: Work, head: Work, embedding: Work, shape: ModelShape, config: TrainConfig, rows: int,
    system: System,
) -> None:  # fmt: skip
    """Change the work of a model, in place, to that of its adapters, if it has any.

    The model's weights are frozen. An adapter's GEMMs are as narrow as its rank, so their time
    is that of the bytes they move for each token, 2 bytes per element: forward reads the input
    and adds to the output; backward reads the output's gradient twice and the input, and adds
    to the input's gradient.

    Args:
        layer: work of a mean layer, changed in place.
        head: with the loss, changed in place.
        embedding: changed in place.
        shape: of the model.
        config: all options.
        rows: tokens of a micro-batch on this rank.
        system: constants of the cluster.
    """
    if (adapters := shape.adapters) is None:
        return
    embedding[WEIGHT].clear()
    for work in (layer, head):
        work[WEIGHT]["gemm"] = work[WEIGHT]["experts"] = 0.0
    inputs, outputs = adapters.inputs, adapters.outputs
    moved = {FORWARD: 2 * inputs + 4 * outputs, INPUT: 6 * inputs + 4 * outputs}
    scale = 1 / shape.num_layers / config.parallelism.tensor_model_parallel_size
    bits = config.peft.peft_base_bits
    # Each pass of a micro-batch casts the rounded weights to 2 bytes, once.
    cast_bytes = (bits / 8 + 4 / BLOCK + 2) * adapters.base_elements * bool(bits)
    for kind, per_token in moved.items():
        layer[kind]["other kernels"] += system.move_s(scale * (rows * per_token + cast_bytes))


def _add_linears(
    work: Work, layer: Layer, config: TrainConfig, rows: int, system: System
) -> None:
    tp = config.parallelism.tensor_model_parallel_size
    dtype = "fp8" if config.fp8.fp8_format else "bf16"
    slow = FP8_SLOWDOWN.get(config.fp8.fp8_recipe, 1.0) if dtype == "fp8" else 1.0
    moved = 0.0
    for matrix in layer.matrices:
        is_fp8 = dtype == "fp8" and (matrix.mixer, matrix.name) != ("mla", "kv_down")
        kind = dtype if is_fp8 else "bf16"
        outputs, inputs = matrix.outputs, matrix.inputs
        if matrix.is_row_parallel:
            inputs = max(1, inputs // tp)
        elif matrix.name not in ("q_down", "kv_down"):
            outputs = max(1, outputs // tp)
        scale = slow if is_fp8 else 1.0
        work[FORWARD]["gemm"] += scale * system.gemm_s(rows, outputs, inputs, kind)
        work[INPUT]["gemm"] += scale * system.gemm_s(rows, inputs, outputs, kind)
        # The GEMM also reads and writes the float32 main gradient; both overlap partly.
        compute = scale * system.gemm_s(outputs, inputs, rows, kind)
        gradient = system.move_s(8 * outputs * inputs)
        work[WEIGHT]["gemm"] += (compute**2 + gradient**2) ** 0.5
        if is_fp8:
            moved += inputs + outputs
    if dtype == "fp8":
        cast = CAST_BYTES.get(config.fp8.fp8_recipe, 6.0)
        work[FORWARD]["other kernels"] += system.move_s(cast * moved * rows / 2)
        work[INPUT]["other kernels"] += system.move_s(cast * moved * rows / 2)


FP8_SLOWDOWN = {"blockwise": 1.2}
"""Time of fp8 GEMMs with block scales over those with one scale (1 150 and 1 330 TFLOP/s
alone)."""
CAST_BYTES = {"delayed": 3.5, "tensorwise": 5.5, "rowwise": 16.0, "blockwise": 12.0}
"""Bytes moved for each element that a linear reads or writes, to cast and transpose it: rowwise
and blockwise cast rows and columns separately. Measured as the difference to bf16."""


def _add_experts(
    work: Work,
    layer: Layer,
    config: TrainConfig,
    rows: int,
    system: System,
    num_microbatches: int,
) -> None:
    """Add grouped GEMMs and the exchange of tokens over expert ranks."""
    moe, parallel = config.experts, config.parallelism
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    stream = tp if parallel.sequence_parallel else 1
    # Balanced routing: each rank computes as many rows as it sends.
    routed = rows / stream * moe.moe_router_topk * expert_tp
    local = moe.num_experts // ep
    is_fp8 = bool(moe.moe_experts_dtype)
    kind = "fp8" if is_fp8 else "bf16"
    # Mean micro-batches of a weight-gradient GEMM: the last of a step may have fewer.
    together = num_microbatches / -(-num_microbatches // moe.num_wgrads_together)
    for outputs, inputs in layer.expert:
        # All experts fill the waves together; an eighth of a tile of each is padding.
        filled = routed / (routed + 16 * local)
        flops_s = system.gemm_s(routed, outputs / expert_tp, inputs, kind) / 0.94 / filled
        elements = local * outputs * inputs / expert_tp
        weights = system.move_s(2 * elements)
        each = (flops_s**2 + weights**2) ** 0.5
        work[FORWARD]["experts"] += each
        work[INPUT]["experts"] += each
        # Adding to main gradients in float32 is not hidden: each expert has few rows.
        filled = routed * together / (routed * together + 16 * local)
        wgrad = system.gemm_s(routed, outputs / expert_tp, inputs) / 0.94 / filled
        work[WEIGHT]["experts"] += wgrad + system.move_s(8 * elements) / together
    if together > 1:
        # The rows of all micro-batches are copied, sorted by expert: one read and one write of
        # 2 bytes for gradients, activations and (twice) inputs.
        width = (2 + is_gated(config.model)) * expert_size(config.model, moe) / expert_tp
        _, inputs = expert_rows(config.model, parallel, moe)
        read = routed / moe.moe_router_topk * min(inputs, moe.moe_router_topk)
        hidden = moe.moe_latent_size or config.model.hidden_size
        work[WEIGHT]["experts"] += system.move_s(4 * (routed * width + 2 * read * hidden))
    if is_fp8:
        wide = sum(outputs + inputs for outputs, inputs in layer.expert)
        work[FORWARD]["other kernels"] += system.move_s(3 * routed * wide / 2)
        work[INPUT]["other kernels"] += system.move_s(3 * routed * wide / 2)
    if config.run.cuda_graph_impl == "none":
        # The host waits for the rows of each expert, and for the sizes of the exchange.
        exchanges = ep > 1 and moe.moe_token_dispatcher_type != "symmetric"
        exchanges &= not moe.moe_expert_rows_limit
        work[FORWARD]["host waits"] += 1e-3 * system.expert_sync_ms * (1 + exchanges)
    if ep > 1:
        seconds = _exchange_s(config, rows // stream, system)
        hidden = 0.0
        if config.pipeline.overlap_moe_expert_parallel_comm:
            hidden = 1 - system.contention
        elif moe.moe_split_batch_overlap:
            hidden = 0.5 * (1 - system.contention)
        for action in (FORWARD, INPUT):
            work[action]["ep"] += seconds * (1 - hidden)


def _exchange_s(config: TrainConfig, tokens: int, system: System) -> float:
    """Return the seconds of dispatch and combine of one layer."""
    moe, parallel = config.experts, config.parallelism
    ep = parallel.expert_model_parallel_size
    stride = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    row = 2 * (moe.moe_latent_size or config.model.hidden_size)
    kind = moe.moe_token_dispatcher_type
    dispatch_share = 0.5 if moe.moe_dispatch_dtype else 1.0
    if kind == "allgather":
        size = tokens * ep * row
        seconds = system.collective_s("all_gather", size, ep, stride)
        seconds += system.collective_s("reduce_scatter", size, ep, stride)
        return seconds * system.collective_skew
    inside = max(1, min(ep, system.gpus_per_node // stride))
    copies = float(moe.moe_router_topk)
    if kind == "deepep" or parallel.hierarchical_expert_parallel_size:
        hosts = ep // inside
        copies = min(copies, hosts + (copies - 1) * 0.3)
    exchange_s = system.collective_s("all_to_all", tokens * copies * row, ep, stride)
    if kind == "symmetric":  # GEMMs read remote rows themselves; waiting remains
        return 0.2 * exchange_s * (1 + dispatch_share)
    return exchange_s * (1 + dispatch_share) * system.collective_skew


def _add_attention(
    work: Work, layer: Layer, config: TrainConfig, tokens: Tokens, system: System
) -> None:
    """Add the attention core and the exchanges of context ranks for it."""
    model, parallel = config.model, config.parallelism
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    channels = head_dim(model) + value_dim(model)
    span, piece = layer.span
    length = seen = tokens.length
    if piece:
        seen = min(length, piece)
    elif span >= 0:
        seen = min(length, 2 * (span + 1))
    is_causal = layer.stack != "encoder" and not _is_bidirectional(config)
    pairs = tokens.sequences * length * seen * (0.5 if is_causal else 1.0) / cp
    heads = model.num_attention_heads / tp
    recomputes = config.recomputation.recompute_granularity == "selective"
    recomputes &= "core_attn" in config.recomputation.recompute_modules
    scores = pairs * heads
    forward = system.attention_s(scores, seen, channels, 2 / 7)
    work[FORWARD]["attention"] += forward
    work[INPUT]["attention"] += forward * (2.5 + recomputes)
    if cp == 1:
        return
    keys = num_kv_heads(model) * channels / tp * 2 * tokens.own * cp
    queries = model.num_attention_heads * channels / tp * 2 * tokens.own
    kind, stride = parallel.cp_comm_type or "p2p", tp
    if kind == "all_gather":
        exchange_s = system.collective_s("all_gather", keys, cp, stride)
        work[FORWARD]["cp"] += exchange_s
        work[INPUT]["cp"] += exchange_s + 2 * exchange_s  # gathered again; gradients in float32
    elif kind == "a2a":
        exchange_s = system.collective_s("all_to_all", queries + keys / cp, cp, stride)
        work[FORWARD]["cp"] += exchange_s
        work[INPUT]["cp"] += exchange_s
        work[FORWARD]["other kernels"] += system.move_s(2 * queries)
    else:
        inner = parallel.hierarchical_context_parallel_sizes[0] if kind == "a2a+p2p" else 1
        ring = cp // inner
        send = (ring - 1) * system.collective_s("send", keys / cp * inner, 2, stride * inner)
        for action, share, factor in ((FORWARD, 1.0, 1.0), (INPUT, 2.5, 2.0)):
            hidden = min(factor * send, share * forward)
            work[action]["cp"] += factor * send - hidden + system.contention * hidden
            # Partial results of each block are merged in float32.
            merged = 8 * queries / 2 * (ring - 1)
            work[action]["other kernels"] += system.move_s(merged)
        if inner > 1:
            exchange_s = system.collective_s("all_to_all", queries + keys / cp, inner, stride)
            work[FORWARD]["cp"] += exchange_s
            work[INPUT]["cp"] += exchange_s


def _is_bidirectional(config: TrainConfig) -> bool:
    return hasattr(config.model, "bert_heads")


def _add_moved_bytes(
    work: Work, layer: Layer, config: TrainConfig, rows: int, system: System
) -> None:
    """Add norms, residuals, rotation, activations and permutations, by the bytes they move."""
    model, parallel, moe = config.model, config.parallelism, config.experts
    tp = parallel.tensor_model_parallel_size
    stream = tp if parallel.sequence_parallel else 1
    D = model.hidden_size
    forward_bytes = backward_bytes = 0.0
    act = (6, 10) if is_gated(model) else (4, 6)
    for mixer in layer.mixers:
        # Reads x and residual, writes sum and norm. AltUp predicts and corrects all streams.
        width = 8.5 * D * (1 + (mixer == "altup") * model.altup_num_inputs)
        forward_bytes += width / stream
        backward_bytes += width / stream
        if mixer in ("attention", "cross_attention", "mla"):
            width = model.num_attention_heads + 2 * num_kv_heads(model)
            width *= head_dim(model) / tp
            factor = 4 * (1 + model.qk_layernorm)
            forward_bytes += factor * width
            backward_bytes += factor * width
    for matrix in layer.matrices:
        if matrix.name == "fc2" or matrix.name.endswith("fc2"):
            forward_bytes += act[0] * matrix.inputs / tp
            backward_bytes += act[1] * matrix.inputs / tp
    if layer.expert:
        expert_tp = parallel.expert_tensor_parallel_size or tp
        width = layer.expert[-1][1] * moe.moe_router_topk / expert_tp
        hidden = (moe.moe_latent_size or D) * moe.moe_router_topk / stream
        forward_bytes += act[0] * width + 6 * hidden
        backward_bytes += act[1] * width + 6 * hidden
    if "mamba" in layer.mixers:
        inner = mamba_sizes(model).inner / tp
        forward_bytes += 94 * inner
        backward_bytes += 187 * inner
    if "delta_net" in layer.mixers:
        inner = delta_sizes(model).values / tp
        forward_bytes += 120 * inner
        backward_bytes += 240 * inner
    if "kda" in layer.mixers:
        # Decayed products in plain torch: for each of the 32 tokens of a chunk, float32 keys
        # of all later tokens of the chunk are read and written.
        inner = delta_sizes(model).values / tp
        forward_bytes += 120 * inner + 16 * 32 * inner
        backward_bytes += 240 * inner + 24 * 32 * inner
    if "short_conv" in layer.mixers:
        forward_bytes += 20 * D / tp
        backward_bytes += 40 * D / tp
    if "lightning" in layer.mixers:
        inner = model.num_attention_heads * head_dim(model) / tp
        forward_bytes += 60 * inner
        backward_bytes += 120 * inner
    if model.hidden_dropout:
        forward_bytes += 4 * D * len(layer.mixers) / stream
        backward_bytes += 4 * D * len(layer.mixers) / stream
    if model.add_bias_linear:
        backward_bytes += 2 * sum(m.outputs for m in layer.matrices) / tp  # gradients of biases
    if not is_gated(model) or model.normalization == "LayerNorm":
        forward_bytes, backward_bytes = (
            PLAIN_KERNELS * forward_bytes,
            PLAIN_KERNELS * backward_bytes,
        )
    gaps = 1e-6 * system.kernel_us * (6 * len(layer.mixers) + 14 * bool(layer.expert))
    work[FORWARD]["other kernels"] += system.move_s(forward_bytes * rows) + gaps
    work[INPUT]["other kernels"] += system.move_s(backward_bytes * rows) + gaps


PLAIN_KERNELS = 2.2
"""Factor on moved bytes if norms, biases and activations are kernels of torch, since the fused
kernels are for RMSNorm with a gated activation. Measured on BERT, T5 and GPT-2."""


def _add_tensor_messages(
    work: Work, layer: Layer, config: TrainConfig, rows: int, system: System
) -> None:
    """Add messages of tensor ranks: each mixer gathers its input and sums its output.

    With sequence parallelism backward gathers the input once more for the weight gradients,
    under the GEMM of the input's gradient.
    """
    parallel = config.parallelism
    tp = parallel.tensor_model_parallel_size
    size = 2 * rows * config.model.hidden_size
    for mixer in layer.mixers:
        if mixer in _REPLICATED:
            continue
        if mixer == "moe" and not any(m.mixer == "moe" for m in layer.matrices):
            continue  # the exchange of experts moves the tokens
        if parallel.sequence_parallel:
            gather = system.collective_s("all_gather", size, tp)
            scatter = system.collective_s("reduce_scatter", size, tp)
            work[FORWARD]["tp"] += (gather + scatter) * system.collective_skew
            again = gather * system.contention
            work[INPUT]["tp"] += (gather + scatter) * system.collective_skew + again
        else:
            both = system.collective_s("all_reduce", size, tp) * system.collective_skew
            work[FORWARD]["tp"] += both
            work[INPUT]["tp"] += both * 0.7  # under the GEMM of the weight gradient


def _recompute(work: Work, config: TrainConfig) -> None:
    """Add the recomputed parts of forward to backward."""
    options = config.recomputation
    if options.recompute_granularity == "full":
        share = 1.0
        if options.recompute_method == "block":
            parallel, pipeline = config.parallelism, config.pipeline
            layers = config.model.num_layers / parallel.pipeline_model_parallel_size
            share = min(1.0, options.recompute_num_layers * pipeline.num_chunks / layers)
        for part, seconds in work[FORWARD].items():
            if part != "host":
                work[INPUT][part] += share * seconds
    elif options.recompute_granularity == "selective":
        moved = work[FORWARD]["other kernels"]
        light = {"layernorm", "mlp_act", "moe_act"} & set(options.recompute_modules)
        work[INPUT]["other kernels"] += moved * 0.4 * len(light)
        if {"mlp", "moe"} & set(options.recompute_modules):
            work[INPUT]["gemm"] += 0.6 * work[FORWARD]["gemm"]
            work[INPUT]["experts"] += work[FORWARD]["experts"]


def head_work(
    config: TrainConfig, tokens: int, vocab_size: int, system: System
) -> tuple[Work, Work]:
    """Estimate embedding and head with loss; the head computes all its gradients in forward."""
    tp = config.parallelism.tensor_model_parallel_size
    stream = tp if config.parallelism.sequence_parallel else 1
    D, columns = config.model.hidden_size, vocab_size / tp
    times = 1 + config.model.mtp_num_layers
    embedding = no_work()
    head = no_work()
    embedding[FORWARD]["other kernels"] = system.move_s(4 * D * tokens / stream)
    embedding[WEIGHT]["other kernels"] = system.move_s(10 * D * tokens)
    rows = min(tokens, 4096)
    chunks = tokens / rows
    forward = system.gemm_s(rows, columns, D, count=chunks)
    forward += system.gemm_s(rows, D, columns, count=chunks)
    if config.peft.peft == "none":
        weight = system.gemm_s(columns, D, rows)
        gradient = system.move_s(8 * columns * D)
        forward += chunks * (weight**2 + gradient**2) ** 0.5
    head[FORWARD]["gemm"] = times * forward
    head[FORWARD]["other kernels"] = times * system.move_s(7 * columns * tokens)
    if tp > 1:
        size = 2 * tokens * D
        exchange_s = system.collective_s("all_gather", size, tp)
        exchange_s += system.collective_s("reduce_scatter", size, tp)
        head[FORWARD]["tp"] = times * exchange_s * system.collective_skew
        embedding[FORWARD]["tp"] = exchange_s / 2
        embedding[INPUT]["tp"] = exchange_s / 2
    return embedding, head


def is_t5(config: TrainConfig) -> bool:
    """Whether the model is a T5, whose decoder has its own sequence length."""
    return isinstance(config.model, T5Config)
