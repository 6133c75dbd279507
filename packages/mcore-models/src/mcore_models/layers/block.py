"""A layer of a decoder-only model.

Reference:
    Vaswani et al. 2017, arXiv:1706.03762; norms before attention and MLP: Xiong et al. 2020,
    arXiv:2002.04745; norms of their outputs too: Ding et al. 2021, arXiv:2105.13290; attention
    and MLP of one input: Wang and Komatsuzaki 2021, GPT-J.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import NO_PARTS, LayerSetup, Parts
from mcore_models.layers.mixers import MIXERS
from mcore_models.layers.residual import (
    MixerOutput,
    OutputScale,
    Residual,
    ResidualBlock,
    stream_dropout,
    stream_norm,
)
from mcore_models.logical_tensors import layer_mixers, layer_norms
from mcore_moe.layer import MoELayer, RoutedTokens

_NO_NORM = nn.Identity()


class TransformerBlock(ResidualBlock):
    """Transformer layer: attention, then a dense MLP or experts.

    ``x = x + dropout(attention(attention_norm(x)))``, and the same with ``mlp`` or ``moe``
    after ``mlp_norm``. Layers of hybrid stacks have other mixers, or another number of them.
    With ``--norm-placement`` sandwich or output, the outputs have norms of their own:
    ``attention_post_norm``, ``mlp_post_norm``.

    Attributes:
        mixers: names of the modules that mix, in order; see ``MIXERS``.
        norms: of each mixer, the names of the norms before and after it; empty: no norm.
    """

    def __init__(
        self, setup: LayerSetup, mixers: tuple[str, ...] = (), *, parts: Parts = NO_PARTS
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them.

        Args:
            setup: config, context and options of the layer.
            mixers: of this layer; empty: those of the config.
            parts: functions of the setup that build modules in place of mixers, by the
                mixer's name; added to the setup's own. A module is called as the mixer that
                it replaces: attention with the normed stream and the keyword ``inputs``, mlp
                with the stream alone.

        Raises:
            ValueError: for a part of a name that no mixer has; for ``--parallel-residual``.
        """
        config, ctx = setup.config, setup.ctx
        dropout = stream_dropout(config, ctx, setup.streams)
        super().__init__(dropout, setup.streams, setup.recomputed, config.residual_multiplier)
        if (config.parallel_residual != "off") != isinstance(self, ParallelBlock):
            raise ValueError(
                f"--parallel-residual {config.parallel_residual} is another kind of layer: "
                "build it with build_block."
            )
        parts = {**setup.parts, **parts}
        if unknown := sorted(parts.keys() - MIXERS.keys()):
            raise ValueError(f"parts name {', '.join(unknown)}: use {', '.join(MIXERS)}.")
        self.mixers = mixers or layer_mixers(config, setup.moe)[setup.layer]
        self.norms = layer_norms(config, self.mixers)
        for name, around in zip(self.mixers, self.norms, strict=True):
            for norm_name in filter(None, around):
                self.add_module(norm_name, stream_norm(config, ctx, **setup.factory_kwargs))
            self.add_module(name, parts.get(name, MIXERS[name].build)(setup))
        self.output_scale = None
        if config.layer_output_scale:
            self.output_scale = OutputScale(ctx.tp, **setup.factory_kwargs)

    def forward(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Transform the residual stream; communicates as the mixers do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: see ``Attention``.

        Returns:
            The stream; the next norm adds the last mixer's output to it.
        """
        return self._scaled(self._through(stream, inputs, len(self.mixers)))

    def _scaled(self, stream: Residual) -> Residual:
        """Multiply the stream by the layer's ``--layer-output-scale``, if it has one."""
        if self.output_scale is None:
            return stream
        return Residual(self.output_scale(stream.total()), None, stream.aux)

    def _through(self, stream: Residual, inputs: BlockInputs, num_mixers: int) -> Residual:
        for name, (norm, post_norm) in zip(self.mixers[:num_mixers], self.norms, strict=False):
            mixer, recomputed_as = self._mixer(name, inputs), MIXERS[name].recomputed_as
            # x = x + dropout(post_norm(mixer(norm(x))))
            y, stream = self.mix(stream, self._norm(norm), mixer, recomputed_as)
            stream = self.add(stream, y, self._norm(post_norm))
        return stream

    def _norm(self, name: str) -> Any:
        return getattr(self, name) if name else _NO_NORM

    def _mixer(self, name: str, inputs: BlockInputs) -> Callable[[Tensor], MixerOutput]:
        """Return a mixer as a function of the normed stream."""
        module, run = getattr(self, name), MIXERS[name].run
        return partial(module, inputs=inputs) if run is None else partial(run, module, inputs)

    @property
    def stops_at_experts(self) -> bool:
        """Whether the last mixer is experts, so that ``to_experts`` covers all other mixers."""
        return self.mixers[-1] == "moe"

    def to_experts(
        self, stream: Residual, inputs: BlockInputs
    ) -> tuple[Residual, RoutedTokens]:
        """Run the layer up to the dispatch of tokens; sizes do not depend on the routing.

        ``from_experts`` runs the rest. Together they are ``forward``, except that
        ``--recompute-modules moe`` has no effect.
        """
        stream = self._through(stream, inputs, len(self.mixers) - 1)

        def route(x: Tensor) -> RoutedTokens:
            return self._experts().route(x.flatten(0, 1), num_sequences=x.shape[1])

        routed, stream = self.mix(stream, self._norm(self.norms[-1][0]), route)
        return stream, routed

    def from_experts(self, stream: Residual, routed: RoutedTokens) -> Residual:
        """Dispatch tokens, run the experts and add their output to the stream."""
        y = self._experts().run_experts(routed).view(stream.x.shape)
        stream = self.add(stream, (y, routed.aux_loss), self._norm(self.norms[-1][1]))
        return self._scaled(stream)

    def _experts(self) -> MoELayer:
        return cast("MoELayer", self.get_submodule("moe"))


class ParallelBlock(TransformerBlock):
    """Transformer layer whose mixers read one input: ``x = x + attention(n(x)) + mlp(m(x))``.

    n and m are one norm (``--parallel-residual one_norm``) or two (``two_norms``).
    """

    def forward(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Transform the residual stream; communicates as the mixers do."""
        # With one norm, the other mixers have none: all read the output of the first one's.
        shared, *others = (self._norm(before) for before, _ in self.norms)
        has_one_norm = all(norm is _NO_NORM for norm in others)
        stream_norm = shared if has_one_norm else _NO_NORM
        own_norms = [_NO_NORM if has_one_norm else shared, *others]

        def add_up(x: Tensor) -> MixerOutput:
            total, aux_losses = None, []
            for name, norm in zip(self.mixers, own_norms, strict=True):
                mixer, recomputed_as = self._mixer(name, inputs), MIXERS[name].recomputed_as
                output = self.recomputing(mixer, recomputed_as)(norm(x))
                if isinstance(output, tuple):
                    output, aux = output
                    aux_losses.append(aux)
                total = output if total is None else total + output
            assert total is not None
            return (total, sum(aux_losses[1:], aux_losses[0])) if aux_losses else total

        y, stream = self.mix(stream, stream_norm, add_up)
        return self.add(stream, y)

    @property
    def stops_at_experts(self) -> bool:
        """False: experts and attention read one input."""
        return False


def build_block(setup: LayerSetup, mixers: tuple[str, ...] = ()) -> TransformerBlock:
    """Build a ``ParallelBlock`` or a ``TransformerBlock``, by ``--parallel-residual``."""
    is_parallel = setup.config.parallel_residual != "off"
    return (ParallelBlock if is_parallel else TransformerBlock)(setup, mixers)
