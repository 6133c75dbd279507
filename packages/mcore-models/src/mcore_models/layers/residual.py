"""The residual stream, and the base class of layers that add to it.

The output of a mixer is not added to the stream at once: the norm that reads the stream next
adds and norms in one kernel. ``Residual`` carries the stream and the output still to be added.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.norm import LayerNorm, RMSNorm, build_norm
from mcore_parallel.autograd.recomputing import recompute, recompute_between
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.sharding import ParamLayout, whole_layout

Norm = RMSNorm | LayerNorm | nn.Identity
"""Norm before a mixer; the identity in families that norm only outputs of mixers."""
Output = TypeVar("Output")
MixerOutput = Tensor | tuple[Tensor, Tensor]
"""A mixer's output ``[s, B, D]``, or the output and a scalar auxiliary loss."""


class Residual(NamedTuple):
    """The residual stream between two layers, as a sum that is not computed yet.

    The stream is ``x + branch``: the norm that reads it next adds and norms in one kernel.
    """

    x: Float[Tensor, "s B D"]
    branch: Float[Tensor, "s B D"] | None
    """A mixer's output that is not yet added to ``x``; None: nothing to add."""
    aux: Float[Tensor, ""]
    """Auxiliary losses of the layers so far, float32 or wider."""

    @classmethod
    def begin(cls, x: Float[Tensor, "s B D"]) -> "Residual":
        """Return a stream that starts with ``x``, with auxiliary losses of 0."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return cls(x, None, torch.zeros((), device=x.device, dtype=wide))

    def total(self) -> Float[Tensor, "s B D"]:
        """Return the stream as one tensor."""
        return self.x if self.branch is None else self.x + self.branch

    def with_branch_added(self) -> "Residual":
        """Return the stream with the pending output added."""
        return Residual(self.total(), None, self.aux)

    def select_rows(self, rows: Int[Tensor, " R"]) -> "Residual":
        """Return the stream of some tokens, by their indices along S."""
        branch = None if self.branch is None else self.branch[rows]
        return Residual(self.x[rows], branch, self.aux)

    def plus(
        self, branch: Float[Tensor, "s B D"], aux: Float[Tensor, ""] | None = None
    ) -> "Residual":
        """Return the stream with ``branch`` as pending output, and ``aux`` added to its losses.

        A previous pending output is added to ``x``.
        """
        return Residual(self.total(), branch, self.aux if aux is None else self.aux + aux)

    def normed(self, norm: Norm) -> tuple[Float[Tensor, "s B D"], "Residual"]:
        """Return the norm of the stream, and the stream with the pending output added."""
        if isinstance(norm, nn.Identity) or self.branch is None:
            summed = self.with_branch_added()
            return norm(summed.x), summed
        normed, total = norm.add_and_norm(self.x, self.branch)
        return normed, Residual(total, None, self.aux)


class OutputScale(nn.Module):
    """Multiplies a tensor by one number that is not trained (``--layer-output-scale``).

    Attributes:
        weight: ``[1]``, 1 until it is loaded; a parameter, so that checkpoints store it.
    """

    def __init__(self, replicas: Axis, **factory_kwargs: Any) -> None:
        """Allocate the number; ``replicas`` are the ranks that hold it."""
        super().__init__()
        self.replicas = replicas
        self.weight = nn.Parameter(torch.ones(1, **factory_kwargs), requires_grad=False)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Return ``x * weight``."""
        return x * self.weight

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the number."""
        return {"weight": whole_layout("", (1,), self.replicas)}


def stream_cuts(ctx: ParallelContext) -> Axis:
    """Return the ranks that split the stream's tokens: ``tp`` under sequence parallelism."""
    return ctx.tp if ctx.config.sequence_parallel else SINGLE


def stream_norm(
    config: TransformerConfig, ctx: ParallelContext, **factory_kwargs: Any
) -> RMSNorm | LayerNorm:
    """Build a norm of the stream; ``factory_kwargs`` are its device and dtype."""
    cuts = stream_cuts(ctx)  # each of these ranks norms different tokens
    size = config.hidden_size
    return build_norm(config, size, replicas=ctx.tp, partial=cuts, **factory_kwargs)


def stream_dropout(
    config: TransformerConfig, ctx: ParallelContext, streams: RngStreams
) -> StreamDropout:
    """Build the dropout of mixers' outputs and of the embedding.

    Under sequence parallelism each tensor rank has different tokens, and draws its own mask
    from ``tensor_parallel``. Otherwise all tensor ranks have the same tokens, and draw one mask
    from ``replicated``: with unequal masks their copies of the stream would differ.
    """
    stream = "tensor_parallel" if stream_cuts(ctx).size > 1 else "replicated"
    return StreamDropout(config.hidden_dropout, streams, stream)


class ResidualBlock(nn.Module):
    """A layer that adds the outputs of its mixers to the residual stream.

    A residual half is ``y, stream = mix(stream, norm, mixer)``, then
    ``stream = add(stream, y)``. Selective recomputation wraps mixers here, from outside.

    Attributes:
        dropout: applied to every mixer's output before it is added.
        streams: random streams that the mixers draw from.
        recomputed: ``--recompute-modules``.
        multiplier: factor on every mixer's output.
    """

    def __init__(
        self,
        dropout: nn.Module,
        streams: RngStreams,
        recomputed: frozenset[str],
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.dropout, self.streams = dropout, streams
        self.recomputed, self.multiplier = recomputed, multiplier

    def mix(
        self,
        stream: Residual,
        norm: Norm,
        mixer: Callable[[Tensor], Output],
        recomputed_as: str = "",
    ) -> tuple[Output, Residual]:
        """Return ``mixer(norm(x))``, and the stream with the pending output added.

        Args:
            stream: x, and an output that the norm adds to it.
            norm: applied to the stream before the mixer.
            mixer: the mixer, as a function of the normed stream.
            recomputed_as: the mixer's name among ``--recompute-modules``; empty: no name.
        """
        has_norm = not isinstance(norm, nn.Identity)
        if "layernorm" in self.recomputed and self.training and has_norm:
            # Backward needs x itself, from which the norm is recomputed.
            stream = stream.with_branch_added()
            if recomputed_as in self.recomputed:
                run = self.recomputing(lambda x: mixer(norm(x)), recomputed_as)
                return run(stream.x), stream
            return recompute_between(norm, mixer, stream.x), stream
        normed, stream = stream.normed(norm)
        mixer = self.recomputing(mixer, recomputed_as)
        return mixer(normed), stream

    def recomputing(
        self, mixer: Callable[[Tensor], Output], name: str
    ) -> Callable[[Tensor], Output]:
        """Return a mixer that backward runs again if ``--recompute-modules`` has its name."""
        if name in self.recomputed and self.training:
            return partial(recompute, mixer, streams=self.streams)
        return mixer

    def add(
        self, stream: Residual, output: MixerOutput, post_norm: Norm | None = None
    ) -> Residual:
        """Return ``x + multiplier * dropout(post_norm(output))``; the next norm adds them."""
        y, aux = output if isinstance(output, tuple) else (output, None)
        y = self.dropout(y if post_norm is None else post_norm(y))
        return stream.plus(y if self.multiplier == 1.0 else y * self.multiplier, aux)
