"""One layer of a model: residual halves, each a norm and a mixer of the stream.

A transformer's layer is attention, then a dense or an expert feed-forward layer; what other
layers consist of says ``layer_mixers``.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.mixers import MIXERS, LayerSetup
from mcore_models.layers.norm import build_norm
from mcore_models.layers.residual import PreNorm, Residual
from mcore_moe.config import MoEConfig
from mcore_parallel.logical_tensors import MIXER_NORMS, layer_mixers
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.rng import RngStreams, StreamDropout


class TransformerBlock(nn.Module):
    """A layer of the model; keeps the shape of its input.

    Each of its ``mixers`` is a module of that name, with a norm before it: ``attention`` has
    ``attention_norm``, ``mlp`` and ``moe`` have ``mlp_norm``.

    Attributes:
        mixers: names of the halves, in order, see ``MIXERS``.
        residual: joins a half to the residual stream.
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
        selective = recomputing.recompute_granularity == "selective"
        recomputed = frozenset(recomputing.recompute_modules if selective else ())
        setup = LayerSetup(
            config=config,
            ctx=ctx,
            layer=layer,
            streams=streams,
            moe=moe,
            recomputed=recomputed,
            kernels=kernels,
            gemms=gemms,
            placed=placed,
        )
        self.mixers = layer_mixers(config, moe)[layer]
        for name in self.mixers:
            norm = build_norm(
                config,
                config.hidden_size,
                replicas=ctx.tp,
                # Norms under sequence parallelism see this rank's tokens only.
                partial=ctx.tp if setup.sequence_parallel else SINGLE,
                **placed,
            )
            self.add_module(MIXER_NORMS[name], norm)
            self.add_module(name, MIXERS[name].build(setup))
        stream = "tensor_parallel" if setup.sequence_parallel else "replicated"
        dropout = StreamDropout(config.hidden_dropout, streams, stream)
        self.residual = PreNorm(dropout, streams, recomputed)

    def forward(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Transform the residual stream; communicates as the mixers do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: see ``Attention``.

        Returns:
            The stream, to which the last mixer's output is still to be added.
        """
        for name in self.mixers:
            mixer = MIXERS[name]
            layer = partial(mixer.run, getattr(self, name), inputs)
            norm = getattr(self, MIXER_NORMS[name])
            stream = self.residual(norm, layer, stream, mixer.recomputed_as)
        return stream
