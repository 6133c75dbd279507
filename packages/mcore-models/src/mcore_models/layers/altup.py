"""Several residual streams, of which each layer transforms one (AltUp), and LAuReL.

A token has n streams of D channels, stored as ``n * D`` channels. A layer predicts all streams
as mixtures of its input streams, runs its mixers on the first prediction, and adds the
difference between their output and that prediction, times a factor, to each prediction. A small
router computes the coefficients of mixtures and the factors. LAuReL is a low-rank branch
parallel to attention.

Reference:
    Baykal et al. 2023, Alternating Updates, arXiv:2301.13310; Menghani et al. 2024, LAuReL,
    arXiv:2411.07501; the router, and vectors of layers that join the other streams: Gemma team
    2025, Gemma 3n release.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.layers.residual import stream_cuts, stream_norm
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import ParamLayout, whole_layout

_LEAST_SQUARE = 1e-5
"""Smallest mean square of a projected stream, by whose root the stream is divided."""


class AltUp(nn.Module):
    """Predicts a layer's output streams from its input streams, and corrects the prediction.

    Attributes:
        router_norm, router: a stream to n numbers, then passed through tanh.
        prediction_coefs: these numbers to the n x n matrix that mixes the streams.
        correction_coefs: these numbers to n factors on the correction, minus 1.
        gating_scale: ``[D]``, factor on the stream that gates per-layer embeddings.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the matrices, zero until the model fills them; the scale is 1."""
        super().__init__()
        config, ctx = setup.config, setup.ctx
        D, n = config.hidden_size, config.altup_num_inputs
        options: dict[str, Any] = {"axis": ctx.tp, **setup.factory_kwargs}
        options["sequence_parallel"] = setup.sequence_parallel
        self.num_streams, self.replicas, self.cuts = n, ctx.tp, stream_cuts(ctx)
        self.router_norm = stream_norm(config, ctx, **setup.factory_kwargs)
        self.router = ReplicatedLinear(D, n, **options)
        self.prediction_coefs = ReplicatedLinear(n, n * n, **options)
        self.correction_coefs = ReplicatedLinear(n, n, **options)
        self.gating_scale = nn.Parameter(torch.ones(D, **setup.factory_kwargs))

    def predict(self, streams: Float[Tensor, "s B n D"]) -> Float[Tensor, "s B n D"]:
        """Return each stream plus a mixture of all streams, by the first stream's router."""
        mixing = self.prediction_coefs(self._route(streams[..., 0, :]))
        return streams + mixing.unflatten(-1, (self.num_streams, -1)) @ streams

    def correct(
        self, predicted: Float[Tensor, "s B n D"], outcome: Float[Tensor, "s B D"]
    ) -> Float[Tensor, "s B n D"]:
        """Add the error of the first prediction to all predictions, times n factors.

        Args:
            predicted: output of ``predict``.
            outcome: output of the mixers for the first prediction.
        """
        factors = self.correction_coefs(self._route(outcome)) + 1
        error = outcome - predicted[..., 0, :]
        return predicted + factors.unsqueeze(-1) * error.unsqueeze(-2)

    def _route(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B n"]:
        routed = self.router(self.router_norm(x) / x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.tanh(routed.to(wide)).to(x.dtype)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the scale."""
        shape = tuple(self.gating_scale.shape)
        return {"gating_scale": whole_layout("", shape, self.replicas, self.cuts)}


class Laurel(nn.Module):
    """Maps x to ``x + norm(right(left(x)))``, where ``left`` has few outputs.

    Attributes:
        left: D to the rank.
        right: the rank to D.
        norm: of the output of ``right``.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the matrices, zero until the model fills them."""
        super().__init__()
        D, rank = setup.config.hidden_size, setup.config.laurel_rank
        options: dict[str, Any] = {"axis": setup.ctx.tp, **setup.factory_kwargs}
        options["sequence_parallel"] = setup.sequence_parallel
        self.left = ReplicatedLinear(D, rank, **options)
        self.right = ReplicatedLinear(rank, D, **options)
        self.norm = stream_norm(setup.config, setup.ctx, **setup.factory_kwargs)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Add the branch to x; no communication."""
        return x + self.norm(self.right(self.left(x)))


class StreamProjections(nn.ModuleList):
    """One matrix ``[D, D]`` for each stream but the first: from the first, or to the first.

    Every projected token is scaled to the root mean square of the token in the first stream.
    """

    def __init__(self, config: TransformerConfig, ctx: ParallelContext, **options: Any) -> None:
        """Allocate the matrices, zero until the model fills them; a copy on all tensor ranks.

        Args:
            config: of the model.
            ctx: the layout.
            options: device and dtype.
        """
        D, has_cuts = config.hidden_size, stream_cuts(ctx).size > 1
        super().__init__(
            ReplicatedLinear(D, D, axis=ctx.tp, sequence_parallel=has_cuts, **options)
            for _ in range(config.altup_num_inputs - 1)
        )

    def split(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B C"]:
        """Return x and its projections as the streams of the first layer, C = n * D."""
        return torch.cat([x, *(_rescaled(projection(x), x) for projection in self)], -1)

    def merge(self, streams: Float[Tensor, "s B C"]) -> Float[Tensor, "s B D"]:
        """Return the mean of the first stream and the projections of the others."""
        first, *others = streams.chunk(len(self) + 1, -1)
        projected = (_rescaled(p(x), first) for p, x in zip(self, others, strict=True))
        return torch.stack([first, *projected]).mean(0)


def _rescaled(
    x: Float[Tensor, "s B D"], like: Float[Tensor, "s B D"]
) -> Float[Tensor, "s B D"]:
    """Scale every token of x to the root mean square of ``like``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    square = x.to(wide).square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE)
    # At norm 0 the gradient of vector_norm is 0, that of sqrt would be infinite.
    norm = torch.linalg.vector_norm(like, dim=-1, keepdim=True, dtype=wide)
    return (x * (norm * like.shape[-1] ** -0.5 * square.rsqrt())).to(x.dtype)
