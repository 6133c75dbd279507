"""One transformer layer: attention, then a dense or an expert feed-forward layer.

Each half norms its input, transforms it and adds the result to the residual stream
("pre-norm"). Xiong et al. 2020, arXiv:2002.04745.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig, activation
from mcore_models.layers.attention import Attention
from mcore_models.layers.mlp import MLP
from mcore_models.layers.norm import LayerNorm, RMSNorm, build_norm
from mcore_models.layers.rope import RotaryTables
from mcore_models.protocol import KVCache
from mcore_moe.config import MoEConfig
from mcore_moe.layer import MoELayer
from mcore_moe.over_ranks import moe_axes
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.logical_tensors import ffn_size, is_gated, moe_layers
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.recomputing import recompute, recompute_between
from mcore_parallel.rng import RngStreams, StreamDropout


class TransformerBlock(nn.Module):
    """A layer of the model; keeps the shape of its input.

    Attributes:
        attention_norm, attention: first half.
        mlp_norm: norm of the second half.
        mlp: dense feed-forward layer; absent in a layer with experts.
        moe: ``MoELayer``; absent in a dense layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ctx: ParallelContext,
        layer: int,
        *,
        streams: RngStreams,
        moe: MoEConfig,
        recomputing: RecomputeConfig,
        kernels: KernelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them.

        Args:
            config: of the model.
            ctx: the layout.
            layer: global number.
            streams: for dropout.
            moe: says whether this layer has experts, and which.
            kernels: which compute attention.
            recomputing: its selective modules; whole layers are the model's affair.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        sequence_parallel = ctx.config.sequence_parallel and ctx.tp.size > 1
        selective = recomputing.recompute_granularity == "selective"
        self.recomputed = frozenset(recomputing.recompute_modules if selective else ())
        self.streams = streams
        # Norms under sequence parallelism see this rank's tokens only.
        norms: dict[str, Any] = {
            "replicas": ctx.tp,
            "partial": ctx.tp if sequence_parallel else SINGLE,
        }
        self.attention_norm = build_norm(config, config.hidden_size, **norms, **placed)
        self.attention = Attention(
            config,
            ctx,
            layer,
            streams=streams,
            recompute_core="core_attn" in self.recomputed,
            kernels=kernels,
            **placed,
        )
        self.mlp_norm = build_norm(config, config.hidden_size, **norms, **placed)
        feed_forward: dict[str, Any] = {
            "gated": is_gated(config),
            "activation": activation(config),
            "bias": config.add_bias_linear,
            "sequence_parallel": sequence_parallel,
            "init_std": 0.0,
            **placed,
        }
        self.mlp: MLP | None = None
        self.moe: MoELayer | None = None
        if moe_layers(moe, config.num_layers)[layer]:
            self.moe = MoELayer(
                config.hidden_size,
                ffn_size(config),
                moe,
                **moe_axes(ctx),
                streams=streams,
                recompute_activation="moe_act" in self.recomputed,
                recompute_shared="shared_experts" in self.recomputed,
                **feed_forward,
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                ffn_size(config),
                axis=ctx.tp,
                recompute_activation="mlp_act" in self.recomputed,
                **feed_forward,
            )
        stream = "tensor_parallel" if sequence_parallel else "replicated"
        self.dropout = StreamDropout(config.hidden_dropout, streams, stream)

    def forward(
        self,
        x: Float[Tensor, "s B D"],
        branch: Float[Tensor, "s B D"] | None,
        aux: Float[Tensor, ""],
        rotary: RotaryTables | None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "s B D"], Float[Tensor, "s B D"], Float[Tensor, ""]]:
        """Transform the residual stream; communicates as attention and feed-forward do.

        The last branch is handed on beside the stream instead of being added: the norm that
        comes next, in the block or model after, does it on its way.

        Args:
            x: residual stream, ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            branch: what is still to be added to it; None: nothing.
            aux: auxiliary losses of earlier layers.
            rotary: see ``Attention``.
            cache: see ``Attention``.
            documents: see ``Attention``.

        Returns:
            The new stream, what is still to be added to it, and ``aux`` with this layer's
            share.
        """
        attend = partial(self.attention, rotary=rotary, cache=cache, documents=documents)
        attended, x = self._normed(self.attention_norm, attend, x, branch)
        attended = self.dropout(attended)
        if self.mlp is not None:
            y, x = self._normed(self.mlp_norm, self.mlp, x, attended, "mlp")
            return x, self.dropout(y), aux
        (y, own_aux), x = self._normed(self.mlp_norm, self._experts, x, attended, "moe")
        return x, self.dropout(y), aux + own_aux

    def _normed(
        self,
        norm: RMSNorm | LayerNorm,
        part: Callable[[Tensor], Any],
        x: Tensor,
        branch: Tensor | None,
        name: str = "",
    ) -> tuple[Any, Tensor]:
        """Add what is still to be added to x, norm the sum and call a part on it.

        Keeps for backward what the flags say.

        Returns:
            What the part returns, and the sum.
        """
        forgets_norm = "layernorm" in self.recomputed and self.training
        if forgets_norm or branch is None:
            x = x if branch is None else x + branch  # kept, whatever is made again
            normed = None if forgets_norm else norm(x)
        else:
            normed, x = norm.add_and_norm(x, branch)
        if name in self.recomputed and self.training:
            if normed is None:
                return recompute(lambda x: part(norm(x)), x, streams=self.streams), x
            return recompute(part, normed, streams=self.streams), x
        return recompute_between(norm, part, x) if normed is None else part(normed), x

    def _experts(self, x: Float[Tensor, "s B D"]) -> tuple[Tensor, Tensor]:
        assert self.moe is not None
        y, aux = self.moe(x.flatten(0, 1), num_sequences=x.shape[1])  # [S, B, D] -> [T, D]
        return y.view(x.shape), aux
