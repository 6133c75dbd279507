"""One layer of a model: residual halves, each a norm and a mixer of the stream.

A transformer's layer is attention, then a dense or an expert feed-forward layer; what other
layers consist of says ``layer_mixers``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import NO_PARTS, LayerSetup, Parts
from mcore_models.layers.mixers import MIXERS
from mcore_models.layers.residual import PreNorm, Residual, stream_dropout, stream_norm
from mcore_moe.layer import MoELayer, Routed
from mcore_parallel.logical_tensors import layer_mixers, layer_norms

_NO_NORM = nn.Identity()


class TransformerBlock(nn.Module):
    """A layer of the model; keeps the shape of its input.

    Each of its ``mixers`` is a module of that name, with a norm before it: ``attention`` has
    ``attention_norm``, ``mlp`` and ``moe`` have ``mlp_norm``. Where ``--norm-placement`` says
    so, what it adds has a norm of its own: ``attention_post_norm``, ``mlp_post_norm``.

    Attributes:
        mixers: names of the halves, in order, see ``MIXERS``.
        norms: names of the norms before and after each of them; empty: none.
        residual: joins a half to the residual stream.
    """

    def __init__(
        self, setup: LayerSetup, mixers: tuple[str, ...] = (), *, parts: Parts = NO_PARTS
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them.

        Args:
            setup: what the layer is built from.
            mixers: of this layer; empty: those that the config says.
            parts: modules of one's own in place of mixers, by name, beside the setup's: a
                function of the setup builds one, which is called as the mixer that it
                replaces (``MIXERS``): attention with the normed stream and its inputs, mlp
                with the stream alone.

        Raises:
            ValueError: for a part of a name that no mixer has.
        """
        super().__init__()
        parts = {**setup.parts, **parts}
        if unknown := sorted(parts.keys() - MIXERS.keys()):
            raise ValueError(f"parts name {', '.join(unknown)}: use {', '.join(MIXERS)}.")
        config, ctx = setup.config, setup.ctx
        self.parallel_residual = config.parallel_residual
        self.mixers = mixers or layer_mixers(config, setup.moe)[setup.layer]
        self.norms = layer_norms(config, self.mixers)
        for name, around in zip(self.mixers, self.norms, strict=True):
            for norm_name in filter(None, around):
                norm = stream_norm(config, ctx, **setup.placed)
                self.add_module(norm_name, norm)
            self.add_module(name, parts.get(name, MIXERS[name].build)(setup))
        dropout = stream_dropout(config, ctx, setup.streams)
        factor = config.residual_multiplier
        self.residual = PreNorm(dropout, setup.streams, setup.recomputed, factor)

    def forward(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Transform the residual stream; communicates as the mixers do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: see ``Attention``.

        Returns:
            The stream, to which the last mixer's output is still to be added.
        """
        if self.parallel_residual != "off":
            return self._in_parallel(stream, inputs)
        return self._in_turn(stream, inputs, len(self.mixers))

    @property
    def stops_at_experts(self) -> bool:
        """Whether the last mixer is experts, so that ``to_experts`` is all that precedes."""
        return self.mixers[-1] == "moe" and self.parallel_residual == "off"

    def to_experts(self, stream: Residual, inputs: BlockInputs) -> tuple[Residual, Routed]:
        """Do what comes before tokens travel to experts; no size depends on routing.

        ``from_experts`` does the rest: together they are ``forward``, one after the other, but
        that ``--recompute-modules moe`` has no effect.
        """
        stream = self._in_turn(stream, inputs, len(self.mixers) - 1)

        def route(x: Tensor) -> Routed:
            return self._experts().route(x.flatten(0, 1), num_sequences=x.shape[1])

        return self.residual.read(stream, self._norm(self.norms[-1][0]), route)

    def from_experts(self, stream: Residual, routed: Routed) -> Residual:
        """Send tokens to experts, and join what these say to the stream; see ``to_experts``."""
        y, post_norm = self._experts().exchange(routed).view(stream.x.shape), self.norms[-1][1]
        found = y, routed.aux
        return self.residual.join(stream, found, self._norm(post_norm) if post_norm else None)

    def _experts(self) -> MoELayer:
        return cast("MoELayer", self.get_submodule("moe"))

    def _in_turn(self, stream: Residual, inputs: BlockInputs, count: int) -> Residual:
        """Run the first mixers, each on what the one before has left."""
        halves = list(zip(self.mixers, self.norms, strict=True))
        for name, (norm, post_norm) in halves[:count]:
            # stream + dropout(post_norm(mixer(norm(stream))))
            stream = self.residual(
                stream,
                self._norm(norm),
                self._mixer(name, inputs),
                MIXERS[name].recomputed_as,
                self._norm(post_norm) if post_norm else None,
            )
        return stream

    def _norm(self, name: str) -> Any:
        return getattr(self, name) if name else _NO_NORM

    def _mixer(self, name: str, inputs: BlockInputs) -> Callable[[Tensor], Any]:
        """Return a mixer as a function of the normed stream."""
        return partial(MIXERS[name].run, getattr(self, name), inputs)

    def _in_parallel(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Add all mixers to one stream, which they read through one norm or one each."""
        has_one_norm = self.parallel_residual == "one_norm"
        norm = self._norm(self.norms[0][0]) if has_one_norm else _NO_NORM
        return self.residual(stream, norm, partial(self._together, inputs))

    def _together(self, inputs: BlockInputs, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add up all mixers of one input: through one norm already, or through one each."""
        y, aux = None, None
        for name, (before, _) in zip(self.mixers, self.norms, strict=True):
            normed = x if self.parallel_residual == "one_norm" else self._norm(before)(x)
            mixer, recomputed_as = self._mixer(name, inputs), MIXERS[name].recomputed_as
            found = self.residual.call(mixer, normed, recomputed_as)
            branch, loss = found if isinstance(found, tuple) else (found, None)
            y = branch if y is None else y + branch
            aux = loss if aux is None else aux if loss is None else aux + loss
        assert y is not None
        return y, aux
