"""Attention of encoders and decoders: bidirectional, causal or to an encoder's output.

One mask, computed once a forward pass and passed to every layer, determines the keys of each
query, or adds biases to scores. Without a mask a query attends to all keys, or with ``causal``
to the earlier keys. Heads are split over the tensor ranks. Under context parallelism keys and
values are gathered in sequence order, so masks have all keys and this rank's queries.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from mcore_models.kernels.attention_backends import GPU_BACKENDS, attend, check_backend
from mcore_models.kernels.rope import RotaryTables, rotate
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.logical_tensors import has_qkv_bias, head_dim, num_kv_heads
from mcore_models.protocol import RecurrentState
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.context_parallel.zigzag import zigzag_join
from mcore_parallel.tensor_parallel.linear import (
    LinearOutput,
)


class MaskedAttention(nn.Module):
    """Attention of one layer to its own tokens, or to those of an encoder.

    Attributes:
        qkv: D to queries, keys and values; ``q`` and ``kv`` in attention to an encoder.
        proj: heads to D.
    """

    def __init__(
        self,
        setup: LayerSetup,
        *,
        is_cross: bool = False,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Allocate this rank's heads; weights are zero until the model fills them.

        Args:
            setup: config, context and options of the layer.
            is_cross: keys and values come from an encoder.
            causal: without a mask, whether a query attends only to keys up to its position.
            scale: of the scores; None: 1/sqrt(head dim).
        """
        super().__init__()
        config, ctx = setup.config, setup.ctx
        self.config, self.cp, self.streams = config, ctx.cp, setup.streams
        self.causal, self.scale = causal, scale
        self.recompute_core = "core_attn" in setup.recomputed
        self.backend = setup.kernels.attention_backend
        check_backend(self.backend)
        N, G, H = config.num_attention_heads, num_kv_heads(config), head_dim(config)
        holders = ctx.tp_block(max(1, ctx.tp.size // G))
        D, bias = config.hidden_size, has_qkv_bias(config)
        query = LinearOutput("" if is_cross else "q", N * H)
        keys_values = [LinearOutput("k", G * H, holders), LinearOutput("v", G * H, holders)]
        self.is_cross = is_cross
        if is_cross:
            self.q = setup.column_linear(D, [query], bias=bias)
            self.kv = setup.column_linear(D, keys_values, bias=bias)
        else:
            self.qkv = setup.column_linear(D, [query, *keys_values], bias=bias)
        self.proj = setup.row_linear(N * H, D, bias=config.add_bias_linear)

    def forward(
        self,
        x: Float[Tensor, "s B D"],
        mask: Shaped[Tensor, "b n q Z"] | None = None,
        memory: Float[Tensor, "m B D"] | None = None,
        state: RecurrentState | None = None,
        rotary: RotaryTables | None = None,
    ) -> Float[Tensor, "s B D"]:
        """Attend from every token to the keys that the mask allows.

        Communicates as the linears do, and all-gathers keys and values over ``cp``.

        Args:
            x: this rank's tokens.
            mask: True where a query attends to a key, or a number to add to the score; for this
                rank's queries and heads and all keys; b, n and q may be 1. None: all keys, or
                with ``causal`` the earlier keys.
            memory: output of the encoder, this rank's tokens; only with ``is_cross``.
            state: keys and values of earlier tokens; with ``is_cross`` those of the memory,
                stored by the first call.
            rotary: tables of this context rank's positions, without a state; None: no rotation.
        """
        if state is not None:
            return self.proj(state.run(partial(self._extended, mask=mask, memory=memory), x))
        q, k, v = self._heads(x, memory)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.recompute_core and self.training:
            mixed = recompute(self._core, q, k, v, mask, streams=self.streams)
        else:
            mixed = self._core(q, k, v, mask)
        return self.proj(mixed)

    def _heads(self, x: Tensor, memory: Tensor | None) -> list[Tensor]:
        """Return queries, keys and values; with ``is_cross`` and no memory, queries alone."""
        if not self.is_cross:
            parts = self.qkv(x).split(self.qkv.output_sizes, dim=-1)
        elif memory is None:
            parts = [self.q(x)]
        else:
            parts = [self.q(x), *self.kv(memory).split(self.kv.output_sizes, dim=-1)]
        H = head_dim(self.config)
        return [part.unflatten(-1, (-1, H)) for part in parts]  # [S, B, N*H] -> [S, B, N, H]

    def _extended(
        self,
        stored: tuple[Tensor, ...] | None,
        x: Tensor,
        *,
        mask: Tensor | None,
        memory: Tensor | None,
    ) -> tuple[Float[Tensor, "S B X"], tuple[Tensor, ...]]:
        """Attend to stored and new keys; return the output, then keys and values to store."""
        q, *keys_values = self._heads(x, None if stored else memory)
        if stored is not None and self.is_cross:
            keys_values = list(stored)  # the memory does not grow
        elif stored is not None:
            keys_values = [torch.cat(pair) for pair in zip(stored, keys_values, strict=True)]
        k, v = keys_values
        return self._core(q, k, v, mask), (k, v)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "S B X"]:
        k, v = zigzag_join(k, self.cp), zigzag_join(v, self.cp)
        prob = self.config.attention_dropout if self.training else 0.0
        # Tensor ranks have different heads: each rank draws its own dropout mask.
        with self.streams.fork("tensor_parallel") if prob else nullcontext():
            if mask is None:
                mixed = attend(
                    q,
                    k,
                    v,
                    causal=self.causal,
                    scale=self.scale,
                    dropout_prob=prob,
                    backend=self.backend,
                )
            else:
                mixed = attend_masked(q, k, v, mask, scale=self.scale, dropout_prob=prob)
        return mixed.flatten(-2)  # [S, B, N, H] -> [S, B, N*H]


def attend_masked(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G H"],
    mask: Shaped[Tensor, "b n q Z"],
    *,
    scale: float | None = None,
    dropout_prob: float = 0.0,
) -> Float[Tensor, "S B N H"]:
    """Return values weighted by softmax(scale * q·k) under a mask; no communication.

    Args:
        q: queries.
        k: keys, G dividing N.
        v: values.
        mask: True where a query attends to a key, or a number to add to the score.
        scale: of the scores; None: 1/sqrt(H).
        dropout_prob: of dropping an attention weight, drawn from the default generator.
    """
    arguments: dict[str, Any] = {"dropout_p": dropout_prob, "scale": scale, "attn_mask": mask}
    arguments["enable_gqa"] = q.shape[2] != k.shape[2]
    batch_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]  # [S, B, N, H] -> [B, N, S, H]
    if q.is_cuda:
        with sdpa_kernel(GPU_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(*batch_first, **arguments)
    else:
        out = F.scaled_dot_product_attention(*batch_first, **arguments)
    return out.permute(2, 0, 1, 3)
