"""A transformer block that several layers of a hybrid share, and what each has of its own.

The block reads the residual stream and the embeddings side by side, 2D channels wide. Each
layer that uses it changes its projections by low-rank matrices and has a linear behind it;
keys and values are remembered for every use. What a layer gets is not added to the stream:
its next mixer reads the sum of both. Weights of a block get the sum of the gradients of all
uses, as any that is used twice.

Reference:
    Glorioso et al. 2024, Zamba2, arXiv:2411.15242, section II.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.layers.attention import Attention
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.mlp import MLP
from mcore_models.layers.norm import build_norm
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.layers.residual import stream_cuts, stream_norm
from mcore_parallel.logical_tensors import (
    ffn_size,
    head_dim,
    is_gated,
    num_kv_heads,
    shared_layers,
)
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, Output


class Adapter(nn.Module):
    """``x A^T B^T``: what a use adds to a column-parallel linear of its block.

    Attributes:
        down: A, to few channels; whole on every tensor rank.
        up: B, to this rank's outputs of the linear.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        outputs: tuple[Output, ...],
        ctx: ParallelContext,
        **placed: Any,
    ) -> None:
        super().__init__()
        is_cut = ctx.config.sequence_parallel
        split: dict[str, Any] = {"axis": ctx.tp, "sequence_parallel": is_cut, **placed}
        self.down = ReplicatedLinear(in_features, rank, **split)
        self.up = ColumnParallelLinear(rank, outputs, init_std=0.0, **split)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "S B F"]:
        """Multiply; communicates as a column-parallel linear does, a few channels."""
        return self.up(self.down(x))


class SharedUse(nn.Module):
    """One layer's use of a shared block.

    Attributes:
        block: the block itself in the first layer that uses it, else None.
        q_adapter, k_adapter, v_adapter: changes of its attention, or None.
        fc1_adapter: change of its feed-forward layer.
        linear: of what the block says; whole on every tensor rank.
    """

    def __init__(self, setup: LayerSetup, block: "SharedBlock | None" = None) -> None:
        """Allocate what this layer has of its own, for the linears of ``block``.

        Args:
            setup: what it is built from.
            block: that this layer owns; None: an earlier one does.
        """
        super().__init__()
        config, ctx, placed = setup.config, setup.ctx, setup.placed
        self.layer, self.block = setup.layer, block
        self.block_index = shared_layers(config).index(setup.layer) % config.num_shared_blocks
        D, rank = config.hidden_size, config.shared_adapter_rank
        F, H = ffn_size(config), head_dim(config)
        N, G = config.num_attention_heads, num_kv_heads(config)
        holders = ctx.tp_block(max(1, ctx.tp.size // G))
        rows = (Output("", N * H), Output("", G * H, holders), Output("", G * H, holders))
        self.q_adapter, self.k_adapter, self.v_adapter = (
            Adapter(2 * D, rank, (each,), ctx, **placed)
            if config.shared_attention_adapters
            else None
            for each in rows
        )
        gated = (Output("gate", F), Output("up", F))
        first = gated if is_gated(config) else (Output("", F),)
        self.fc1_adapter = Adapter(D, rank, first, ctx, **placed)
        cut = {"axis": ctx.tp, "sequence_parallel": setup.sequence_parallel}
        self.linear = ReplicatedLinear(D, D, **cut, **placed)

    def forward(self, x: Float[Tensor, "s B D"], inputs: BlockInputs) -> Float[Tensor, "s B D"]:
        """Return what the next mixer reads beside the stream; communicates as the block."""
        return self.linear(inputs.shared_blocks[self.block_index](x, self, inputs))

    def qkv_change(self, x: Float[Tensor, "s B E"]) -> Float[Tensor, "S B X"] | None:
        """Return what is added to the block's queries, keys and values."""
        q, k, v = self.q_adapter, self.k_adapter, self.v_adapter
        if q is None or k is None or v is None:
            return None
        return torch.cat([q(x), k(x), v(x)], -1)


class SharedBlock(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and without a residual.

    Attributes:
        attention_norm, attention: of stream and embeddings side by side, back to D channels.
        mlp_norm, mlp: of what attention says.
    """

    def __init__(self, setup: LayerSetup, attention: Attention, mlp: MLP) -> None:
        super().__init__()
        config, ctx, placed = setup.config, setup.ctx, setup.placed
        self.attention_norm = build_norm(
            config, 2 * config.hidden_size, replicas=ctx.tp, partial=stream_cuts(ctx), **placed
        )
        self.attention = attention
        self.mlp_norm = stream_norm(config, ctx, **placed)
        self.mlp = mlp

    def forward(
        self, x: Float[Tensor, "s B D"], use: SharedUse, inputs: BlockInputs
    ) -> Float[Tensor, "s B D"]:
        """Compute what one layer's use of the block says; communicates as the linears do.

        Args:
            x: the residual stream.
            use: of this layer.
            inputs: see ``Attention``; ``embedded`` stands beside the stream.
        """
        assert inputs.embedded is not None
        wide = self.attention_norm(torch.cat([x, inputs.embedded], -1))
        y = self.attention(wide, inputs, use.qkv_change(wide), use.layer)
        y = self.mlp_norm(y)
        return self.mlp(y, use.fc1_adapter(y))
