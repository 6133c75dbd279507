"""Effects of fp8, expert exchanges and optimizers on the memory of a rank, from configs.

In fp8 a step stores each weight's cast and the cast's transpose in addition to the weight, and
each linear stores the cast of its input instead of the input, unless another operation needs
the input. Under sequence parallelism the input of a column-parallel linear is stored split and
in the model's dtype. Exchanges between experts may store rows for the worst routing. The
optimizer's state may have a narrow dtype, or be in host memory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mcore_models.config import TransformerConfig
from mcore_models.logical_tensors import ROW_PARALLEL, expert_size, is_gated, layer_mixers
from mcore_models.parameter_kinds import tensor_kind
from mcore_moe.config import WIDEST_GATHERED, MoEConfig
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.offloading.config import (
    NUM_PIECES_ON_GPU,
    PIECE_BYTES,
    OffloadConfig,
)
from mcore_parallel.optimizers.config import (
    MATRIX_OPTIMIZERS,
    NUM_MOMENTS,
    AdafactorConfig,
    AdamConfig,
    MainWeightsConfig,
    MuonConfig,
    SGDConfig,
    SoapConfig,
)
from mcore_parallel.precision.config import Fp8Config

CODE_BYTES = {"blockwise": 1 + 4 / 128}
"""Bytes of an fp8 element with its share of a scale, by recipe; 1 for other recipes."""
_LINEAR = re.compile(
    r"(?P<linear>.+\.(?P<mixer>(?:cross_)?attention|mla|mlp|mamba|delta_net|short_conv|lightning|kda)"
    rf"\.(?P<name>qkv|q|kv|q_up|kv_up|fc1|in_proj|decay_up|gate_up|{'|'.join(ROW_PARALLEL)}))(\.\w+)?\.weight"
)


def fp8_bytes(
    fp8: Fp8Config,
    config: TransformerConfig,
    shapes: Mapping[str, tuple[int, ...]],
    parallel: ParallelConfig,
    moe: MoEConfig,
    weight_bytes: int,
) -> tuple[int, float]:
    """Estimate the additional memory of fp8 on one of the ranks that share a layer.

    Args:
        fp8: format and recipe.
        config: of the model.
        shapes: of all logical tensors.
        parallel: the parallel sizes.
        moe: experts of the model.
        weight_bytes: bytes of a parameter or activation outside fp8.

    Returns:
        Bytes of the casts of all weights, and the change of the bytes stored for a token in all
        layers, which is below 0 because casts replace inputs.
    """
    if not fp8.fp8_format:
        return 0, 0.0
    tp, code = parallel.tensor_model_parallel_size, CODE_BYTES.get(fp8.fp8_recipe, 1.0)
    expert_tp = parallel.expert_tensor_parallel_size or tp
    is_cut = parallel.sequence_parallel and tp > 1
    weights, token, seen_linears = 0.0, 0.0, set[str]()
    for name, (rows, *columns) in shapes.items():
        if ".experts." in name and columns and moe.moe_experts_dtype:
            weights += rows * columns[0] / expert_tp / parallel.expert_model_parallel_size
        if not (match := _LINEAR.fullmatch(name)):
            continue
        weights += rows * columns[0] / tp
        if match["linear"] in seen_linears:  # parts of one linear have one input
            continue
        seen_linears.add(match["linear"])
        is_row = match["name"] in ROW_PARALLEL
        if is_row or not is_cut:
            # Whether the 16-bit input is stored as well: attention's backward needs its output,
            # and the down-projections of latent attention need their input.
            stays = match["mixer"] in ("attention", "cross_attention", "mla") and is_row
            stays &= not config.attention_output_gate
            stays |= match["mixer"] == "mla" and match["name"] == "q"
            token += columns[0] / (tp if is_row else 1) * (code - weight_bytes * (not stays))
    ends = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
    num_layers = len(layer_mixers(config, moe))
    share = max(0.0, 1 - fp8.first_last_layers_bf16 * ends / num_layers)
    return int(2 * code * weights * share), token * share


def waiting_elements(
    config: TransformerConfig,
    parallel: ParallelConfig,
    moe: MoEConfig,
    tokens: int,
    num_microbatches: int,
) -> tuple[int, int]:
    """Count the elements stored until the last of ``moe_wgrad_micro_batches`` on a rank.

    These are the inputs of the experts' GEMMs and the gradients of their outputs, with as many
    rows as the GEMMs have (``expert_rows``). GEMMs of several micro-batches read copies for one
    weight at a time, at most the first linear's gradients and inputs.

    Args:
        config: of the model.
        parallel: the parallel sizes.
        moe: experts of the model.
        tokens: tokens of a micro-batch.
        num_microbatches: micro-batches of a step.

    Returns:
        Waiting elements, and elements of the copies.
    """
    num_together = min(moe.num_wgrads_together, num_microbatches)
    if num_together < 2:
        return 0, 0
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    rows, inputs = expert_rows(config, parallel, moe)
    inner, hidden = rows * expert_size(config, moe), moe.moe_latent_size or config.hidden_size
    widest = (1 + is_gated(config)) * inner
    # Expert tensor ranks split an expert's width, and each has the tokens of all of them.
    hidden *= inputs * (parallel.expert_tensor_parallel_size or tp)
    layers = -(-sum("moe" in names for names in layer_mixers(config, moe)) // pp)
    waiting = layers * (widest + inner + 2 * hidden) // tp
    copied = (widest + hidden) // tp
    return (num_together - 1) * tokens * waiting, num_together * tokens * copied


def expert_rows(
    config: TransformerConfig, parallel: ParallelConfig, moe: MoEConfig
) -> tuple[int, int]:
    """Return rows of the experts' GEMMs, and stored rows of their inputs, per token of a rank.

    With a fixed number of rows (symmetric dispatch, or allgather with
    ``moe_expert_rows_limit``) there are rows for the worst routing. Otherwise there are top-k
    rows a token. GEMMs that gather store each token once (allgather: the tokens of all ranks);
    other GEMMs store a copy of the token for each row.
    """
    ep, kind = parallel.expert_model_parallel_size, moe.moe_token_dispatcher_type
    rows = moe.moe_router_topk
    if ep > 1 and (kind == "symmetric" or (kind == "allgather" and moe.moe_expert_rows_limit)):
        rows = ep * min(rows, moe.num_experts // ep)
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    fc1_rows = (1 + is_gated(config)) * expert_size(config, moe) // expert_tp
    gathers = fc1_rows <= WIDEST_GATHERED and (ep == 1 or kind == "allgather")
    return rows, ep if gathers else rows


def fuller(
    head: tuple[int, int], layer: tuple[int, int], gradient_bytes: int
) -> tuple[int, int]:
    """Return the larger of two memory peaks of backward in a fully sharded model.

    Complete weight gradients are freed after they are reduced. The head's gradient is in memory
    together with the logits, and freed before the layers run. A layer's gradients are in memory
    together with the widest activation gradient of the layer.

    Args:
        head: bytes of the logits, and elements of the head's gradient.
        layer: bytes of the widest gradient in a layer, and elements of the gradients of the
            layer's weights.
        gradient_bytes: bytes of an element.
    """
    return max(head, layer, key=lambda moment: moment[0] + gradient_bytes * moment[1])


def exchange_elements(
    config: TransformerConfig, parallel: ParallelConfig, moe: MoEConfig
) -> int:
    """Count the additional elements that an exchange between experts stores for a token.

    An all-gather stores the tokens of all ranks, and symmetric reads a row for each choice. If
    the host does not wait for counts, experts have as many rows as the worst routing needs, and
    all tensors within the experts have that length. Further parts of the rows are not counted,
    since backward recomputes them.

    Args:
        config: of the model.
        parallel: the parallel sizes.
        moe: experts of the model.

    Returns:
        Elements, over all tensor ranks.
    """
    ep, kind = parallel.expert_model_parallel_size, moe.moe_token_dispatcher_type
    limit, topk = moe.moe_expert_rows_limit, moe.moe_router_topk
    if ep == 1 or kind not in ("allgather", "symmetric") or 0 < limit < ep:
        return 0
    rows = ep * min(topk, moe.num_experts // ep)
    inner = (3 if is_gated(config) else 2) * expert_size(config, moe)
    if kind == "symmetric":
        return rows * config.hidden_size + (rows - topk) * inner
    return (ep - 1) * config.hidden_size + (rows - topk) * inner * (limit > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChoice:
    """An optimizer, with the options that determine the bytes of its state."""

    name: str = "adam"
    """Choice of --optimizer."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    sgd: SGDConfig = field(default_factory=SGDConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    soap: SoapConfig = field(default_factory=SoapConfig)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)

    def matrices(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a matrix optimizer updates; AdamW updates all others."""
        if self.name not in MATRIX_OPTIMIZERS:
            return {}
        return {n: shape for n, shape in shapes.items() if tensor_kind(n, shape) == "matrix"}

    def element_bytes(self, *, in_matrix: bool) -> int:
        """Return the bytes of the moments of one weight, apart from its main weight."""
        if self.name == "adam" or (self.name in MATRIX_OPTIMIZERS and not in_matrix):
            kinds = self.adam.exp_avg_dtype, self.adam.exp_avg_sq_dtype
            return sum(4 - 2 * (kind == "bf16") for kind in kinds)
        if self.name == "sgd" and not self.sgd.sgd_momentum:
            return 0
        return 4 * NUM_MOMENTS[self.name]

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a complete matrix's state on the rank that updates the matrix."""
        options = {"muon": self.muon, "soap": self.soap, "adafactor": self.adafactor}[self.name]
        return 4 * sum(prod(state) for state in options.state_shapes(shape).values())


def optimizer_bytes(
    own: int,
    own_in_matrices: int,
    optimizer: OptimizerChoice,
    main_weights: MainWeightsConfig,
    data_parallel: DataParallelConfig,
    offload: OffloadConfig,
    weight_bytes: int,
) -> tuple[int, int]:
    """Count the state of each weight: moments, main weights and float32 rows.

    Args:
        own: weights that the rank updates.
        own_in_matrices: the part of ``own`` that a matrix optimizer updates.
        optimizer: determines the moments.
        main_weights: whether 16-bit weights have float32 main weights.
        data_parallel: whether weights are rows of float32, which stay on the device.
        offload: share of the state in host memory; a few pieces of it are on the device.
        weight_bytes: bytes of a weight.

    Returns:
        Bytes on the device, and bytes elsewhere.
    """
    moments = optimizer.element_bytes(in_matrix=False) * (own - own_in_matrices)
    moments += optimizer.element_bytes(in_matrix=True) * own_in_matrices
    has_rows = data_parallel.is_fully_sharded and data_parallel.main_grads_dtype == "fp32"
    has_main = weight_bytes == 2 and main_weights.main_params_dtype == "fp32"
    moments += 4 * (main_weights.ema_decay > 0) * own
    state = moments + 4 * (has_main or has_rows) * own
    movable = state - 4 * has_rows * own
    host = int(offload.optimizer_offload_fraction * offload.optimizer_cpu_offload * movable)
    pieces = min(host, NUM_PIECES_ON_GPU * PIECE_BYTES)
    return state - host + pieces, host
