"""``--transformer-impl transformer_engine``: GEMMs, norms and attention by NVIDIA's library.

``use_transformer_engine`` changes the computation of a finished model. Parameters, their names,
shapes and initial values, communication, gradient slots and checkpoints are unchanged; so are
embeddings, heads, rotations, gated activations, the router and blocks of context parallelism.

This module calls the low-level functions of the library's own modules (``general_gemm``, the
norms of ``transformer_engine_torch``); the extra pins the tested versions.
"""

import logging
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import AttentionBackend
from mcore_models.kernels.attention_backends import attend
from mcore_models.layers.attention import Attention
from mcore_models.layers.mla import LatentAttention
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.transformer_engine import transformer_engine_linear
from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.optional_kernels import OptionalKernel, both_passes, try_kernel, wave
from mcore_parallel.precision.transformer_engine import by_transformer_engine
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

log = logging.getLogger(__name__)


def use_transformer_engine(model: nn.Module, backend: AttentionBackend = "auto") -> None:
    """Make a model's linears, norms, experts and attention use Transformer Engine.

    Changes the model in place, before any forward; no communication.

    Args:
        model: on a GPU, in 16 bits.
        backend: ``auto``: Transformer Engine's attention; other names: this package's.

    Raises:
        ValueError: if Transformer Engine does not support a linear's fp8 recipe, or has loaded
            another cuDNN than torch's.
        ImportError: if Transformer Engine is not installed, or cannot be loaded.
    """
    wrong_cudnn = (
        "--transformer-impl transformer_engine: Transformer Engine has loaded the system's "
        "cuDNN, not torch's. Set CUDNN_HOME to the folder nvidia/cudnn next to torch's folder, "
        "and put its lib first in LD_LIBRARY_PATH."
    )
    try:
        engine_version = import_module("transformer_engine.pytorch").get_cudnn_version()
        torch_version = torch.backends.cudnn.version() or 0
    except (OSError, RuntimeError) as error:
        if "cudnn" not in str(error).lower():
            raise
        raise ValueError(wrong_cudnn) from error
    # torch has one number, 91900 for cuDNN 9.19.0.
    if engine_version[:2] != (torch_version // 10_000, torch_version % 10_000 // 100):
        raise ValueError(wrong_cudnn)
    engine_attend = TransformerEngineAttention()
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gemm = by_transformer_engine(module.gemm)
        elif isinstance(module, RMSNorm | LayerNorm):
            module.kernel = transformer_engine_norm
        elif isinstance(module, Experts):
            module.linear = transformer_engine_linear
        elif isinstance(module, Attention | LatentAttention) and backend == "auto":
            module.attend = engine_attend


def transformer_engine_norm(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    *,
    epsilon: float,
    offset: float,
) -> Float[Tensor, "*B D"]:
    """Return the norm of the last dimension, computed by Transformer Engine.

    Args:
        x: input.
        weight: of the norm, without ``offset``.
        bias: of a LayerNorm; None: RMSNorm.
        epsilon: added to the variance or mean square.
        offset: added to the weight, 0 or 1.
    """
    return _Norm.apply(x, weight, bias, epsilon, bool(offset))


class _Norm(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, is_less: bool
    ) -> Tensor:
        kernels = import_module("transformer_engine_torch")
        constants = import_module("transformer_engine.pytorch.constants")
        flat, weight = x.flatten(0, -2).contiguous(), weight.to(x.dtype)
        options = epsilon, None, None, constants.TE_DType[x.dtype], 0, is_less
        if bias is None:
            y, _, deviation = kernels.rmsnorm_fwd(flat, weight, *options)
            statistics = (deviation,)
        else:
            y, *statistics = kernels.layernorm_fwd(flat, weight, bias.to(x.dtype), *options)
        ctx.save_for_backward(flat, weight, *statistics)
        ctx.is_less, ctx.has_bias = is_less, bias is not None
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kernels = import_module("transformer_engine_torch")
        x, weight, *statistics = ctx.saved_tensors
        dy = grad.reshape(x.shape).contiguous()
        backward = kernels.layernorm_bwd if ctx.has_bias else kernels.rmsnorm_bwd
        dx, *grads = backward(dy, x, *statistics, weight, 0, ctx.is_less)
        grad_weight, grad_bias = grads if ctx.has_bias else (*grads, None)
        return dx.view(grad.shape), grad_weight, grad_bias, None, None


class TransformerEngineAttention:
    """``attend`` by Transformer Engine's ``DotProductAttention``, which chooses the kernel.

    The first call with given heads, widths, scale, window and soft cap compares Transformer
    Engine with plain torch on 128 tokens. If results differ, a warning names the versions, and
    mcore-models' ``attend`` computes all such calls.
    """

    def __init__(self) -> None:
        """Prepare the cache of modules, one without parameters for each kind of call."""
        self._modules: dict[tuple[Any, ...], Any] = {}  # None: results were wrong, not used

    def __call__(
        self,
        q: Float[Tensor, "S B N H"],
        k: Float[Tensor, "S B G H"],
        v: Float[Tensor, "S B G J"],
        *,
        scale: float | None = None,
        window: int = -1,
        softcap: float = 0.0,
        dropout_prob: float = 0.0,
        documents: Documents | None = None,
        backend: AttentionBackend = "auto",  # noqa: ARG002
    ) -> Float[Tensor, "S B N J"]:
        """Return causal attention over complete sequences; arguments as in ``attend``."""
        q, k, v = (cast_factor(t) for t in (q, k, v))
        N, width = q.shape[2], v.shape[3]
        kind = N, k.shape[2], q.shape[3], width, scale, window, softcap, dropout_prob
        if kind not in self._modules:
            failure = try_kernel(_ATTENTION, q.device, *kind[:-1])
            self._modules[kind] = None if failure else _build(*kind)
            if failure:
                log.warning("%s: %s; %s", _ATTENTION.name, failure, _REPLACED)
        module = self._modules[kind]
        if module is None:
            return attend(
                *(q, k, v),
                scale=scale,
                window=window,
                softcap=softcap,
                dropout_prob=dropout_prob,
                documents=documents,
            )
        if documents is None:
            return module(q, k, v).unflatten(-1, (N, width))  # [S, B, N*J] -> [S, B, N, J]
        pieces = documents.flat()
        borders, longest = pieces.cu_seqlens(q.device), pieces.longest
        # Ends of rows are borders between documents: [S, B, N, H] -> [B * S, N, H].
        flat = (t.transpose(0, 1).flatten(0, 1).contiguous() for t in (q, k, v))
        out = module(
            *flat,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out.view(q.shape[1], q.shape[0], N, width).transpose(0, 1)


def _build(
    N: int,
    G: int,
    H: int,
    J: int,
    scale: float | None,
    window: int,
    softcap: float,
    dropout_prob: float,
) -> Any:
    return import_module("transformer_engine.pytorch").DotProductAttention(
        N,
        H if H == J else (H, J),
        num_gqa_groups=G,
        attention_dropout=dropout_prob,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=(window, 0) if window >= 0 else None,
        softcap=softcap,
        softmax_scale=scale,
    )


_TRIED_TOKENS = 128


def _try_attention(
    device: torch.device,
    N: int,
    G: int,
    H: int,
    J: int,
    scale: float | None,
    window: int,
    softcap: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    module = _build(N, G, H, J, scale, window, softcap, 0.0)
    inputs = [
        wave(_TRIED_TOKENS, 1, heads, width, device=device, dtype=torch.bfloat16)
        for heads, width in ((N, H), (G, H), (G, J))
    ]
    got = both_passes(lambda *qkv: module(*qkv).unflatten(-1, (N, J)), *inputs)
    formula = partial(attend, scale=scale, window=window, softcap=softcap, backend="unfused")
    return zip(got, both_passes(formula, *inputs), strict=True)


_ATTENTION = OptionalKernel(
    "attention of Transformer Engine", ("transformer-engine", "flash-attn-4"), _try_attention
)
_REPLACED = "the attention of mcore-models is used"
