"""Dispatch and combine by DeepEP's kernels, an optional library.

A token is sent to a rank once, even if several of its experts are there, and that rank returns
one sum. The backward of dispatch is combine, and the backward of combine is dispatch. The
interface is that of DeepEP's first version, whose class is ``Buffer``. Tests run a stand-in of
``Buffer`` and compare it with one rank; if ``deep_ep`` is installed, its kernels are compared
with an all-to-all.

Reference:
    DeepSeek-AI 2024, DeepSeek-V3, 3.2.2. arXiv:2412.19437.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import plan_rows, trimmed
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
)
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.mesh import Axis

_WIDEST = 8176
"""Largest width: half of a token's bytes and a barrier fill a warp's 8 KiB of shared memory."""
_RANKS_OF_A_NODE = 8
"""Groups of more ranks exchange over RDMA."""


class DeepEPDispatcher(Dispatcher):
    """Sends each token to the ranks of its experts and back, by DeepEP."""

    def __init__(
        self,
        config: MoEConfig,
        ep: Axis,
        make_buffer: Callable[[Axis, Tensor], Any] | None = None,
    ) -> None:
        """Check that the library supports the ranks, and store the arguments; no communication.

        Args:
            config: of the layer.
            ep: ranks that share the experts.
            make_buffer: returns DeepEP's buffer for the tokens of a call; None: layers with
                equal group and width share a buffer.

        Raises:
            ValueError: if the library cannot be imported, or has no kernels for so many ranks.
        """
        if make_buffer is None:
            try:
                _library().Buffer.get_dispatch_config(ep.size)
            except AssertionError as error:
                raise ValueError(
                    f"--moe-token-dispatcher-type deepep has no kernels for {ep.size} ranks: "
                    "use --expert-model-parallel-size 2, 4 or 8, or alltoall."
                ) from error
        self.config, self.ep = config, ep
        self.make_buffer = make_buffer or _shared_buffer

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,  # noqa: ARG002
    ) -> DispatchedTokens:
        """Send tokens with their choices and weights over ``ep``.

        The host waits for the number of received tokens.
        """
        buffer = self.make_buffer(self.ep, x)
        ids = routing.ids if routing.keep is None else routing.ids.where(routing.keep, -1)
        num_experts = self.config.num_experts
        rows, probs, local_ids, counts, handle = _Dispatch.apply(
            x, routing.probs.contiguous(), ids.contiguous(), buffer, num_experts
        )
        keep = local_ids >= 0  # -1: the choice of an expert of another rank
        plan = plan_rows(local_ids.where(keep, 0), num_experts // self.ep.size, keep)
        return DispatchedTokens(rows, probs, trimmed(plan, sum(counts)), (buffer, handle))

    def combine(self, y: Float[Tensor, "M D"], handle: tuple[Any, Any]) -> Float[Tensor, "T D"]:
        """Send the experts' sums to the tokens' ranks over ``ep``, and sum them by token."""
        return _Combine.apply(y, *handle)


class _Dispatch(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, ids: Tensor, buffer: Any, num_experts: int
    ) -> Any:
        by_rank, by_node, by_expert, is_sent, _ = buffer.get_dispatch_layout(ids, num_experts)
        rows, local_ids, weights, counts, handle, _ = buffer.dispatch(
            x.contiguous(),
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=by_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local_ids)
        return rows, weights, local_ids, counts, handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, *_: Any) -> Any:
        grad_x, grad_probs, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous()
        )
        return grad_x, grad_probs, None, None, None


class _Combine(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, y: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


@cache
def _library() -> Any:
    try:
        import deep_ep  # pyrefly: ignore
    except ImportError as error:
        raise ValueError(
            "--moe-token-dispatcher-type deepep needs the package deep_ep, built for torch "
            f"{torch.__version__}: {error}. Install it, or use alltoall or allgather."
        ) from error
    return deep_ep


def _shared_buffer(ep: Axis, x: Tensor) -> Any:
    if x.dtype != torch.bfloat16 or not x.is_cuda:
        raise TypeError(
            "--moe-token-dispatcher-type deepep requires bfloat16 tokens on a GPU, not "
            f"{x.dtype} on {x.device.type}: use --bf16, or alltoall."
        )
    width = x.shape[1]
    if width % 16 or width > _WIDEST:  # the kernels would end the process
        raise ValueError(
            "--moe-token-dispatcher-type deepep requires a width that is a multiple of 16 and "
            f"at most {_WIDEST}, not {width}: use alltoall."
        )
    return _buffer(ep.group, x.shape[1] * x.element_size())


@cache
def _buffer(group: Any, row_bytes: int) -> Any:
    kind, size = _library().Buffer, group.size()
    configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
    nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
    rdma = 0
    if size > _RANKS_OF_A_NODE:  # a library built without NVSHMEM has no hint
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
    return kind(group, nvlink, rdma)
