"""The residual stream, and how a layer joins it.

What a layer adds is not added at once: the norm that comes next does it on its way, on a GPU
in one kernel. ``Residual`` carries the stream and that addition; ``PreNorm`` reads the one
and leaves the other, and recomputes in backward what ``--recompute-modules`` names.
``PostNorm`` norms the sum itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.norm import LayerNorm, RMSNorm, build_norm
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.recomputing import recompute, recompute_between
from mcore_parallel.rng import RngStreams, StreamDropout

Norm = RMSNorm | LayerNorm | nn.Identity
"""What a half of a layer reads the stream through; some families norm only what it adds."""


class Residual(NamedTuple):
    """The stream between two layers: the sum of ``x`` and ``branch``."""

    x: Float[Tensor, "s B D"]
    branch: Float[Tensor, "s B D"] | None
    """Still to be added; None: nothing."""
    aux: Float[Tensor, ""]
    """Auxiliary losses of the layers so far, float32 or wider."""

    @classmethod
    def begin(cls, x: Float[Tensor, "s B D"]) -> "Residual":
        """Start a stream, without auxiliary losses."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return cls(x, None, torch.zeros((), device=x.device, dtype=wide))

    def total(self) -> Float[Tensor, "s B D"]:
        """Return the stream as one tensor."""
        return self.x if self.branch is None else self.x + self.branch

    def plus(
        self, branch: Float[Tensor, "s B D"], aux: Float[Tensor, ""] | None = None
    ) -> "Residual":
        """Return the stream with the output of a layer, and its auxiliary loss, joined."""
        return Residual(self.total(), branch, self.aux if aux is None else self.aux + aux)

    def normed(self, norm: Norm) -> tuple[Float[Tensor, "s B D"], "Residual"]:
        """Return the norm of the stream, and the stream with nothing left to add."""
        if not isinstance(norm, RMSNorm | LayerNorm):
            x = self.total()
            return norm(x), Residual(x, None, self.aux)
        if self.branch is None:
            return norm(self.x), self
        normed, x = norm.add_and_norm(self.x, self.branch)
        return normed, Residual(x, None, self.aux)


def stream_cuts(ctx: ParallelContext) -> Axis:
    """Ranks that cut the stream's tokens: ``tp`` under sequence parallelism, else one."""
    return ctx.tp if ctx.config.sequence_parallel else SINGLE


def stream_norm(
    config: TransformerConfig, ctx: ParallelContext, **placed: Any
) -> RMSNorm | LayerNorm:
    """Build a norm of the stream; ``placed`` is its device and dtype."""
    cuts = stream_cuts(ctx)  # each of these ranks norms its own tokens only
    return build_norm(config, config.hidden_size, replicas=ctx.tp, partial=cuts, **placed)


def stream_dropout(
    config: TransformerConfig, ctx: ParallelContext, streams: RngStreams
) -> StreamDropout:
    """Build dropout of the stream, from the random stream of the tokens that a rank holds."""
    stream = "tensor_parallel" if stream_cuts(ctx).size > 1 else "replicated"
    return StreamDropout(config.hidden_dropout, streams, stream)


class PreNorm(nn.Module):
    """``x + multiplier * dropout(post_norm(layer(norm(x))))``: one half of a block.

    Reference:
        Xiong et al. 2020, arXiv:2002.04745. Norms of what is added: Ding et al. 2021, CogView,
        arXiv:2105.13290.
    """

    def __init__(
        self,
        dropout: nn.Module,
        streams: RngStreams,
        recomputed: frozenset[str],
        multiplier: float = 1.0,
    ) -> None:
        """Keep what all halves of a block share.

        Args:
            dropout: of what a layer adds.
            streams: that the layers draw from.
            recomputed: ``--recompute-modules``: layernorm forgets what a norm returns; a
                layer's name, all that lies inside it.
            multiplier: factor on what a layer adds.
        """
        super().__init__()
        self.multiplier = multiplier
        self.dropout, self.streams, self.recomputed = dropout, streams, recomputed

    def forward(
        self,
        stream: Residual,
        norm: Norm,
        layer: Callable[[Tensor], Any],
        name: str = "",
        post_norm: Norm | None = None,
    ) -> Residual:
        """Join a layer to the stream; communicates as the layer does.

        Args:
            stream: before the layer.
            norm: of what the layer reads.
            layer: returns what is added, or that and an auxiliary loss.
            name: of the layer among ``--recompute-modules``.
            post_norm: of what the layer adds; None: none.
        """
        stream, found = self.read(stream, norm, layer, name)
        return self.join(stream, found, post_norm)

    def read(
        self,
        stream: Residual,
        norm: Norm,
        layer: Callable[[Tensor], Any],
        name: str = "",
    ) -> tuple[Residual, Any]:
        """Return the stream with nothing left to add, and what the layer says of its norm.

        The first half of ``forward``, which has the arguments; ``join`` is the other.
        """
        has_norm = not isinstance(norm, nn.Identity)
        if "layernorm" in self.recomputed and self.training and has_norm:
            stream = Residual(stream.total(), None, stream.aux)  # the norm is made from it
            return stream, self._forgetting_norm(norm, layer, stream.x, name)
        normed, stream = stream.normed(norm)
        return stream, self.call(layer, normed, name)

    def join(self, stream: Residual, found: Any, post_norm: Norm | None = None) -> Residual:
        """Join what a layer said to the stream; see ``read``."""
        y, aux = found if isinstance(found, tuple) else (found, None)
        y = self.dropout(y if post_norm is None else post_norm(y))
        return stream.plus(y if self.multiplier == 1.0 else y * self.multiplier, aux)

    def _forgetting_norm(
        self, norm: Norm, layer: Callable[[Tensor], Any], x: Tensor, name: str
    ) -> Any:
        if name in self.recomputed:
            return self.call(lambda x: layer(norm(x)), x, name)
        return recompute_between(norm, layer, x)

    def call(self, layer: Callable[[Tensor], Any], x: Tensor, name: str) -> Any:
        """Call a layer, which backward does again if ``recomputed`` has its name."""
        if name in self.recomputed and self.training:
            return recompute(layer, x, streams=self.streams)
        return layer(x)


class PostNorm(PreNorm):
    """``norm(x + dropout(layer(x)))``: one half of a block of the first transformers.

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762.
    """

    def forward(
        self,
        stream: Residual,
        norm: RMSNorm | LayerNorm,
        layer: Callable[[Tensor], Any],
        name: str = "",
    ) -> Residual:
        """Join a layer to the stream and norm the sum; see ``PreNorm``."""
        x = stream.total()
        y = self.dropout(self.call(layer, x, name))
        if "layernorm" in self.recomputed and self.training:
            return Residual(recompute(norm, x + y), None, stream.aux)
        return Residual(norm.add_and_norm(x, y)[0], None, stream.aux)
