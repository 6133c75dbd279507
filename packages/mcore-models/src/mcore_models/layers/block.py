"""A layer of a decoder-only model.

Reference:
    Vaswani et al. 2017, arXiv:1706.03762; norms before attention and MLP: Xiong et al. 2020,
    arXiv:2002.04745; norms of their outputs too: Ding et al. 2021, arXiv:2105.13290; attention
    and MLP of one input: Wang and Komatsuzaki 2021, GPT-J.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.altup import AltUp, Laurel
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import NO_PARTS, LayerSetup, Parts
from mcore_models.layers.mixers import MIXERS
from mcore_models.layers.residual import (
    MixerOutput,
    Output,
    OutputScale,
    Residual,
    ResidualBlock,
    stream_dropout,
    stream_norm,
)
from mcore_models.logical_tensors import layer_mixers, layer_norms
from mcore_moe.layer import MoELayer, RoutedTokens

_NO_NORM = nn.Identity()
_FACTOR_INDEX = {"attention": 0, "mla": 0, "mlp": 2, "moe": 2}
"""Index of a mixer's number in ``--residual-stream-factors``; 1 for recurrent layers."""


class TransformerBlock(ResidualBlock):
    """Transformer layer: attention, then a dense MLP or experts.

    ``x = x + dropout(attention(attention_norm(x)))``, and the same with ``mlp`` or ``moe``
    after ``mlp_norm``. Layers of hybrid stacks have other mixers, or another number of them.
    With ``--norm-placement`` sandwich or output, the outputs have norms of their own:
    ``attention_post_norm``, ``mlp_post_norm``.

    Attributes:
        mixers: names of this layer's mixers (modules of the block), in order; see ``MIXERS``.
        norms: for each mixer, the names of the norm of its input and of the norm of its output;
            an empty name: no norm.
    """

    def __init__(
        self, setup: LayerSetup, mixers: tuple[str, ...] = (), *, parts: Parts = NO_PARTS
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them.

        Args:
            setup: config, context and options of the layer.
            mixers: names of the layer's mixers; empty: those of the config for this layer.
            parts: builders of replacements for mixers, by the mixer's name; they override
                ``setup.parts``. A replacement has the mixer's signature: attention gets the
                normed stream and the keyword ``inputs``, mlp the normed stream alone.

        Raises:
            ValueError: if ``parts`` names an unknown mixer, or if ``--parallel-residual``,
                ``--norm-placement`` or ``--altup-num-inputs`` requires another class of block.
        """
        config, ctx = setup.config, setup.ctx
        dropout = stream_dropout(config, ctx, setup.streams)
        super().__init__(dropout, setup.streams, setup.recomputed, config.residual_multiplier)
        kinds = AltUpBlock, ParallelBlock, PostNormBlock, TransformerBlock
        built, needed = next(k for k in kinds if isinstance(self, k)), _block_type(config)
        if built is not needed:
            raise ValueError(
                f"--parallel-residual {config.parallel_residual}, --norm-placement "
                f"{config.norm_placement} and --altup-num-inputs {config.altup_num_inputs} "
                f"need a {needed.__name__}: build the layer with build_block."
            )
        parts = {**setup.parts, **parts}
        if unknown := sorted(parts.keys() - MIXERS.keys()):
            raise ValueError(f"parts name {', '.join(unknown)}: use {', '.join(MIXERS)}.")
        self.config = config
        self.mixers = mixers or layer_mixers(config, setup.moe)[setup.layer]
        self.norms = layer_norms(config, self.mixers)
        for name, norm_names in zip(self.mixers, self.norms, strict=True):
            for norm_name in filter(None, norm_names):
                self.add_module(norm_name, stream_norm(config, ctx, **setup.factory_kwargs))
            self.add_module(name, parts.get(name, MIXERS[name].build)(setup))
        self.output_scale = None
        if config.layer_output_scale:
            self.output_scale = OutputScale(ctx.tp, **setup.factory_kwargs)

    def forward(
        self, stream: Residual, inputs: BlockInputs, rows: Int[Tensor, " R"] | None = None
    ) -> Residual:
        """Transform the residual stream; communicates as the mixers do.

        Args:
            stream: ``[S, B, D]``; under sequence parallelism this rank's ``[S/tp, B, D]``.
            inputs: rotary tables, documents and state, equal for all layers.
            rows: tokens that the last mixer computes, if ``ends_with_mlp``; None: all.

        Returns:
            The stream of all tokens, or of ``rows``. The output of the last mixer is in
            ``branch``, not yet added to ``x``: the norm that reads the stream next adds it, in
            one kernel.
        """
        if rows is not None:
            stream = self._run_mixers(stream, inputs, slice(-1)).select_rows(rows)
            return self._scale_output(self._run_mixers(stream, inputs, slice(-1, None)))
        return self._scale_output(self._run_mixers(stream, inputs))

    @property
    def ends_with_mlp(self) -> bool:
        """Whether the last mixer is a dense MLP, which transforms each token by itself."""
        return self.mixers[-1] == "mlp"

    def _scale_output(self, stream: Residual) -> Residual:
        """Multiply the stream by the layer's ``--layer-output-scale``, if it has one."""
        if self.output_scale is None:
            return stream
        return Residual(self.output_scale(stream.total()), None, stream.aux)

    def _run_mixers(
        self, stream: Residual, inputs: BlockInputs, which: slice = slice(None)
    ) -> Residual:
        """Run the residual halves of the layer, or a part of them."""
        for index in range(len(self.mixers))[which]:
            name = self.mixers[index]
            mixer, recomputed_as = self._mixer(name, inputs), MIXERS[name].recomputed_as
            # x = x + dropout(post_norm(mixer(norm(x)))), in two calls: the first returns the
            # mixer's output y and the stream that it has read; the second applies post_norm and
            # dropout to y.
            y, stream = self._mix_at(index, stream, mixer, recomputed_as)
            stream = self._add_at(index, stream, y)
        return stream

    def _mix_at(
        self,
        index: int,
        stream: Residual,
        mixer: Callable[[Tensor], Output],
        recomputed_as: str = "",
    ) -> tuple[Output, Residual]:
        """Run the mixer at ``index`` of the layer; return its output and its input stream."""
        return self.mix(stream, self._norm(self.norms[index][0]), mixer, recomputed_as)

    def _add_at(self, index: int, stream: Residual, output: MixerOutput) -> Residual:
        """Add the output of the mixer at ``index`` of the layer to the stream."""
        return self.add(stream, output, self._norm(self.norms[index][1]))

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
        """Run the layer up to the dispatch of tokens; return the stream and the routed tokens.

        No tensor's size depends on the routing, so this half can be a CUDA graph.
        ``from_experts`` runs the other half. Together they equal ``forward``, except that
        ``--recompute-modules moe`` has no effect on either half.
        """
        stream = self._run_mixers(stream, inputs, slice(-1))

        def route(x: Tensor) -> RoutedTokens:
            return self._experts().route(x.flatten(0, 1), num_sequences=x.shape[1])

        routed, stream = self._mix_at(-1, stream, route)
        return stream, routed

    def from_experts(self, stream: Residual, routed: RoutedTokens) -> Residual:
        """Dispatch tokens, run the experts and add their output to the stream."""
        y = self._experts().run_experts(routed).view(stream.x.shape)
        stream = self._add_at(-1, stream, (y, routed.aux_loss))
        return self._scale_output(stream)

    def _experts(self) -> MoELayer:
        return cast("MoELayer", self.get_submodule("moe"))


class ParallelBlock(TransformerBlock):
    """Transformer layer whose mixers read one input: ``x = x + attention(n(x)) + mlp(m(x))``.

    n and m are one norm (``--parallel-residual one_norm``) or two (``two_norms``).
    """

    def forward(
        self, stream: Residual, inputs: BlockInputs, rows: Int[Tensor, " R"] | None = None
    ) -> Residual:
        """Transform the residual stream; communicates as the mixers do."""
        assert rows is None  # ends_with_mlp is False
        # --parallel-residual one_norm: only the first mixer has a norm. It becomes the norm of
        # the stream, and all mixers read its output. two_norms: each mixer applies its own.
        first_norm, *other_norms = (self._norm(norm) for norm, _ in self.norms)
        has_one_norm = all(norm is _NO_NORM for norm in other_norms)
        stream_norm = first_norm if has_one_norm else _NO_NORM
        mixer_norms = [_NO_NORM if has_one_norm else first_norm, *other_norms]

        def sum_of_mixers(x: Tensor) -> MixerOutput:
            total, aux_losses = None, []
            for name, norm in zip(self.mixers, mixer_norms, strict=True):
                mixer, recomputed_as = self._mixer(name, inputs), MIXERS[name].recomputed_as
                output = self.recomputing(mixer, recomputed_as)(norm(x))
                if isinstance(output, tuple):
                    output, aux = output
                    aux_losses.append(aux)
                total = output if total is None else total + output
            assert total is not None
            return (total, sum(aux_losses[1:], aux_losses[0])) if aux_losses else total

        y, stream = self.mix(stream, stream_norm, sum_of_mixers)
        return self.add(stream, y)

    @property
    def ends_with_mlp(self) -> bool:
        """False: attention and MLP read one input."""
        return False

    @property
    def stops_at_experts(self) -> bool:
        """False: attention and experts read one input, so no half ends before experts."""
        return False


class AltUpBlock(TransformerBlock):
    """Transformer layer that runs on the first of several streams, and corrects all streams.

    x is the first predicted stream (``AltUp.predict``), n and m are norms:
        ``x = (x + attention(n(x)) + laurel(n(x))) / sqrt(2)``
        ``x = x + mlp(m(x))``
    ``AltUp.correct`` then corrects all streams by x. The corrected first stream gates the
    layer's per-layer embedding, which is added to the other streams.

    Reference:
        Gemma team 2025, Gemma 3n release; see ``layers.altup``.
    """

    def __init__(self, setup: LayerSetup, mixers: tuple[str, ...] = ()) -> None:
        """Allocate this rank's share of the layer, as ``TransformerBlock``."""
        super().__init__(setup, mixers)
        self.altup = AltUp(setup)
        self.laurel = Laurel(setup) if setup.config.laurel_rank else None

    def forward(
        self, stream: Residual, inputs: BlockInputs, rows: Int[Tensor, " R"] | None = None
    ) -> Residual:
        """Return the layer's output streams ``[s, B, n * D]``; communicates as its mixers."""
        assert rows is None  # ends_with_mlp is False
        n = self.altup.num_streams
        predicted = self.altup.predict(stream.total().unflatten(-1, (n, -1)))
        active = self._attend(Residual(predicted[..., 0, :], None, stream.aux), inputs)
        active = self._run_mixers(active, inputs, slice(1, -1))
        corrected = self.altup.correct(predicted, active.total())
        first, others = corrected.split((1, n - 1), -2)
        layer_input, (_, post_norm) = self._mixer(self.mixers[-1], inputs), self.norms[-1]
        vector = layer_input(first.squeeze(-2) * self.altup.gating_scale)
        vector = self.dropout(self._norm(post_norm)(vector)) * self.multiplier
        streams = torch.cat([first, others + vector.unsqueeze(-2)], -2)
        streams = streams.flatten(-2)  # [s, B, n, D] -> [s, B, n * D]
        return self._scale_output(Residual(streams, None, active.aux))

    def _attend(self, stream: Residual, inputs: BlockInputs) -> Residual:
        """Add attention and LAuReL, both of one norm of the stream, to the stream."""
        if self.laurel is None:
            return self._run_mixers(stream, inputs, slice(1))
        laurel, attention = self.laurel, self._mixer(self.mixers[0], inputs)
        norm, post_norm = map(self._norm, self.norms[0])
        y, stream = self.mix(stream, norm, lambda x: post_norm(attention(x)) + laurel(x))
        return Residual(self.add(stream, y).total() * 2**-0.5, None, stream.aux)


class PostNormBlock(TransformerBlock):
    """Transformer layer that norms the stream itself: ``x = a h + b mixer(h)``, h = norm(x).

    a and b are the mixer's numbers of ``--residual-stream-factors`` and
    ``--residual-output-factors``.

    Reference:
        Wang et al. 2022, DeepNet, arXiv:2203.00555, section 3, where the norm follows the sum;
        here a layer begins with it, as in MiniMax-01, arXiv:2501.08313.
    """

    def _mix_at(
        self,
        index: int,
        stream: Residual,
        mixer: Callable[[Tensor], Output],
        recomputed_as: str = "",
    ) -> tuple[Output, Residual]:
        normed, stream = stream.normed(self._norm(self.norms[index][0]))
        output = self.recomputing(mixer, recomputed_as)(normed)
        factor = self._factors(index)[0]
        return output, Residual(normed if factor == 1 else normed * factor, None, stream.aux)

    def _add_at(self, index: int, stream: Residual, output: MixerOutput) -> Residual:
        y, aux = output if isinstance(output, tuple) else (output, None)
        factor = self._factors(index)[1] * self.multiplier
        y = self.dropout(y)
        return stream.plus(y if factor == 1 else y * factor, aux)

    def _factors(self, index: int) -> tuple[float, float]:
        """Return the factors on the stream and on the output of the mixer at ``index``."""
        config, kind = self.config, _FACTOR_INDEX.get(self.mixers[index], 1)
        return config.residual_stream_factors[kind], config.residual_output_factors[kind]


def build_block(setup: LayerSetup, mixers: tuple[str, ...] = ()) -> TransformerBlock:
    """Build the class of block that the options of the residual stream need."""
    return _block_type(setup.config)(setup, mixers)


def _block_type(config: TransformerConfig) -> type[TransformerBlock]:
    if config.altup_num_inputs:
        return AltUpBlock
    if config.parallel_residual != "off":
        return ParallelBlock
    return PostNormBlock if config.norm_placement == "post" else TransformerBlock
