"""``--batch-invariant-mode``: a model whose outputs have the same bits in any batch.

``use_batch_invariant_kernels`` changes the computation of a complete model, in training or in
an engine. Parameters, checkpoints and gradients are unchanged; see ``batch_invariant``.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_models.config import TransformerConfig, activation, has_plain_scores
from mcore_models.gpt import GPT
from mcore_models.kernels.batch_invariant import (
    BLOCK_ROWS,
    BatchInvariantGemm,
    fixed_order_product,
    invariant_attention,
    invariant_linear,
)
from mcore_models.layers.attention import Attention
from mcore_models.layers.norm import HeadNorm, LayerNorm, RMSNorm
from mcore_models.layers.position_embedding import PositionEmbedding
from mcore_models.peft.config import is_adapter
from mcore_moe.activations import activation_function
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.grouped_gemm import accumulating_linear
from mcore_moe.experts.weight_gradient import rows_by_expert
from mcore_moe.layer import MoELayer
from mcore_moe.routing.router import Router
from mcore_parallel.autograd.grad_slot import slot_of
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.precision.gemm import PlainGemm
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

FLAG = "--batch-invariant-mode"

_ROWWISE = (
    *(Experts, Router, RMSNorm, LayerNorm, HeadNorm),
    *(VocabParallelEmbedding, VocabParallelHead, PositionEmbedding),
)
"""Modules with parameters that have kernels here, or compute row by row."""
_VECTOR = 64  # a multiple of the elements that a CPU's vectors hold


def use_batch_invariant_kernels(model: nn.Module) -> None:
    """Make a model's linears, experts, router, attention and head sum in a fixed order.

    Changes the model in place, before any forward; no communication. An engine of the model
    then computes attention in the same order.

    Args:
        model: a GPT or a stage of one, in training or in eval mode.

    Raises:
        ValueError: for parts or options of the model without such kernels; names all of them.
    """
    if problems := _problems(model):
        raise ValueError(
            f"{FLAG} does not support "
            + ", ".join(problems)
            + ". Leave these out, or the mode."
        )
    assert isinstance(model, GPT)
    gemm = BatchInvariantGemm()
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gemm = gemm
        elif isinstance(module, Experts):
            module.linear = _experts_linear
        elif isinstance(module, Router):
            module.linear = invariant_linear
        elif isinstance(module, Attention):
            module.attend = _attend
    model.head_gemm = gemm


def is_batch_invariant(model: nn.Module) -> bool:
    """Return whether ``use_batch_invariant_kernels`` has changed a model."""
    return isinstance(model, GPT) and isinstance(model.head_gemm, BatchInvariantGemm)


def _problems(model: nn.Module) -> list[str]:
    """Return the parts and options of a model that the mode does not support."""
    if not isinstance(model, GPT):
        return [f"a {type(model).__name__} (only GPT)"]
    config = model.config
    problems = [
        f"--{axis.name}-size {axis.size} (split sums)"
        for axis in (model.tp, model.cp)
        if axis.size > 1
    ]
    problems += _problems_of_layers(config)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            if not isinstance(module.gemm, PlainGemm):
                problems.append("linears in fp8 or with quantized weights")
        elif isinstance(module, MoELayer):
            problems += _problems_of_experts(module)
        elif any(True for _ in module.parameters(False)) and not isinstance(module, _ROWWISE):
            problems.append(f"a layer of kind {type(module).__name__}")
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        problems.append("--peft adapters")
    problems = list(dict.fromkeys(problems))
    return problems or _problems_of_gemms(model) + _problems_of_activation(model)


def _problems_of_layers(config: TransformerConfig) -> list[str]:
    uncovered = {
        "--multi-latent-attention": config.multi_latent_attention,
        "--hybrid-override-pattern": bool(config.hybrid_override_pattern),
        "--mtp-num-layers": bool(config.mtp_num_layers),
        "attention windows or chunks": config.window_size[0] >= 0
        or bool(config.attention_chunk_size),
        "soft caps, sinks or ALiBi": not has_plain_scores(config)
        or config.position_embedding_type == "alibi",
        "--attention-output-gate": config.attention_output_gate,
        "attention temperatures": bool(config.attention_temperature_span),
        "--final-logit-softcapping": bool(config.final_logit_softcapping),
        "--attention-dropout": config.attention_dropout > 0,
        "--hidden-dropout": config.hidden_dropout > 0,
        f"--rope-type {config.rope_type}": config.rope_type in ("dynamic", "longrope"),
    }
    return [name for name, is_used in uncovered.items() if is_used]


def _problems_of_experts(layer: MoELayer) -> list[str]:
    config, experts = layer.router.config, layer.experts
    uncovered = {
        "--expert-model-parallel-size above 1": experts.ep.size > 1,
        "--expert-tensor-parallel-size above 1": experts.expert_tp.size > 1,
        "--moe-expert-capacity-factor": bool(config.moe_expert_capacity_factor),
        "--moe-router-load-balancing-type sinkhorn": (
            config.moe_router_load_balancing_type == "sinkhorn"
        ),
        f"--moe-router-score-function {config.moe_router_score_function}": (
            config.moe_router_score_function in ("sigmoid", "sparsemixer")
        ),
        "--moe-input-jitter-eps": bool(config.moe_input_jitter_eps),
        "--moe-experts-dtype": bool(config.moe_experts_dtype),
        "--moe-latent-size": bool(config.moe_latent_size),
        "--moe-shared-expert-gate": bool(config.moe_shared_expert_gate),
    }
    return [name for name, is_used in uncovered.items() if is_used]


def _problems_of_gemms(model: GPT) -> list[str]:
    """Return shapes of GEMMs, found by trial, in which a row's bits depend on its position."""
    problems = []
    device = _device(model)
    like: dict[str, Any] = {"dtype": model.dtype, "device": device}
    for shape in {tuple(p.shape[-2:]) for p in model.parameters() if p.dim() > 1}:
        weight = torch.linspace(-1, 1, shape[0] * shape[1], **like).view(shape)
        rows = torch.linspace(-2, 1, shape[1], **like).sin().repeat(BLOCK_ROWS, 1)
        y = fixed_order_product(rows, weight)
        if not torch.equal(y, y[:1].expand_as(y)):
            problems.append(
                f"this device's product of {shape[1]} by {shape[0]}, which rounds rows by "
                "position: set OMP_NUM_THREADS=1"
            )
    return problems


def _problems_of_activation(model: GPT) -> list[str]:
    """Return the activation, if by trial it rounds the last elements of a tensor differently.

    On a CPU torch computes complete vectors by one function, and the rest of a thread's share
    by another.
    """
    name = activation(model.config)
    device = _device(model)
    x = torch.linspace(-3, 3, 1024, dtype=model.dtype, device=device)
    function = activation_function(name)
    if all(torch.equal(function(x[:n]), function(x)[:n]) for n in range(1, 2 * _VECTOR)):
        return []
    widths = {
        module.in_features
        for block_name, module in model.named_modules()
        if isinstance(module, RowParallelLinear) and block_name.endswith("fc2")
    } | {m.ffn_hidden_size for m in model.modules() if isinstance(m, Experts)}
    if torch.get_num_threads() == 1 and not any(width % _VECTOR for width in widths):
        return []
    where = f"{name} on this device in widths {sorted(widths)}"
    mend = f"use multiples of {_VECTOR} and set OMP_NUM_THREADS=1"
    return [f"{where}, which rounds elements by their place: {mend}"]


def _device(model: GPT) -> torch.device:
    """Return the device of the weights that an engine does not shard later."""
    devices = (p.device for p in model.parameters() if not p.is_meta)
    return next(devices, torch.device("cpu"))


def _experts_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows in a fixed order; the host waits for ``offsets``."""
    if slot_of(weight) is not None:
        return accumulating_linear(x, weight, offsets, linear=_by_expert)
    return _by_expert(x, weight, offsets)


def _by_expert(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    *parts, rest = rows_by_expert(x, offsets)
    linear = partial(invariant_linear, bias=None)
    results = [linear(rows, matrix) for rows, matrix in zip(parts, weight, strict=True)]
    return torch.cat([*results, x.new_zeros(rest.shape[0], weight.shape[1])])


def _attend(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G H"],
    *,
    scale: float | None = None,
    documents: Documents | None = None,
    **_without_effect: Any,
) -> Float[Tensor, "S B N H"]:
    """Return causal attention with plain scores; arguments as in ``attend``."""
    if documents is not None:
        raise ValueError(
            f"{FLAG} does not support packed documents: use a separate row for each document."
        )
    return invariant_attention(q, k, v, scale)
