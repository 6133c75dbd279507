"""One transformer layer: attention, then a dense or an expert feed-forward layer."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig, activation
from mcore_models.layers.attention import Attention
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.mlp import MLP
from mcore_models.layers.norm import build_norm
from mcore_models.layers.residual import PreNorm, Residual
from mcore_moe.config import MoEConfig
from mcore_moe.layer import MoELayer
from mcore_moe.over_ranks import moe_axes
from mcore_parallel.logical_tensors import ffn_size, is_gated, moe_layers
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.rng import RngStreams, StreamDropout


class TransformerBlock(nn.Module):
    """A layer of the model; keeps the shape of its input.

    Attributes:
        attention_norm, attention: first half.
        mlp_norm: norm of the second half.
        residual: joins a half to the residual stream.
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
        gemms: LinearGemms = PLAIN_GEMMS,
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
            gemms: what multiplies in attention and the dense feed-forward layer.
            recomputing: its selective modules; full-layer recompute is handled by the model.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        sequence_parallel = ctx.config.sequence_parallel and ctx.tp.size > 1
        selective = recomputing.recompute_granularity == "selective"
        recomputed = frozenset(recomputing.recompute_modules if selective else ())
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
            recompute_core="core_attn" in recomputed,
            kernels=kernels,
            gemms=gemms,
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
                recompute_activation="moe_act" in recomputed,
                recompute_shared="shared_experts" in recomputed,
                **feed_forward,
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                ffn_size(config),
                axis=ctx.tp,
                recompute_activation="mlp_act" in recomputed,
                gemms=gemms,
                **feed_forward,
            )
        stream = "tensor_parallel" if sequence_parallel else "replicated"
        dropout = StreamDropout(config.hidden_dropout, streams, stream)
        self.residual = PreNorm(dropout, streams, recomputed)

    def forward(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Transform the residual stream; communicates as attention and feed-forward do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: see ``Attention``.

        Returns:
            The stream, to which the feed-forward layer's output is still to be added.
        """
        attention = partial(self.attention, inputs=inputs)
        stream = self.residual(self.attention_norm, attention, stream)
        if self.moe is not None:
            return self.residual(self.mlp_norm, self._experts, stream, "moe")
        assert self.mlp is not None
        return self.residual(self.mlp_norm, self.mlp, stream, "mlp")

    def _experts(self, x: Float[Tensor, "s B D"]) -> tuple[Tensor, Tensor]:
        assert self.moe is not None
        y, aux = self.moe(x.flatten(0, 1), num_sequences=x.shape[1])  # [S, B, D] -> [T, D]
        return y.view(x.shape), aux
