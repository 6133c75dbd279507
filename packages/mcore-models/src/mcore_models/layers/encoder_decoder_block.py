"""A layer of an encoder or decoder: self-attention, cross-attention in a decoder, MLP.

Norms come before each half (Megatron's BERT, T5) or after it (BERT as published).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mcore_models.encoder_config import T5Config, feed_forward
from mcore_models.kernels.rope import RotaryTables
from mcore_models.layer_patterns import is_local
from mcore_models.layers.encoder_decoder_attention import MaskedAttention
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.mixers import build_mlp, feed_forward_network
from mcore_models.layers.mlp import MLP
from mcore_models.layers.residual import (
    Residual,
    ResidualBlock,
    stream_dropout,
    stream_norm,
)
from mcore_models.protocol import ModelState
from mcore_parallel.autograd.recomputing import recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedInputs:
    """Inputs of all blocks of a stack other than the residual stream."""

    mask: Tensor | None = None
    """Mask of attention among the stack's own tokens, see ``MaskedAttention``."""
    rotary: RotaryTables | None = None
    """Rotary tables of the stack's own tokens; None: no rotation."""
    local_mask: Tensor | None = None
    """Replaces ``mask`` in layers with a window."""
    local_rotary: RotaryTables | None = None
    """Replaces ``rotary`` in layers with a window; None: these use ``rotary``."""
    memory: Tensor | None = None
    """Output of the encoder; None in an encoder."""
    memory_mask: Tensor | None = None
    """Mask of attention to ``memory``."""
    state: ModelState | None = None
    """State of earlier tokens, and in a decoder of the encoder's output; None: no state."""


class MaskedBlock(ResidualBlock):
    """Self-attention, cross-attention in a decoder, MLP: ``x = x + mlp(mlp_norm(x))``.

    With ``post_norm``, as in the first transformers: ``x = mlp_post_norm(x + mlp(x))``.

    Attributes:
        attention, cross_attention, mlp: the mixers, in order. The norm of ``mlp`` is
            ``mlp_norm``, or ``mlp_post_norm`` if norms follow the sums.
    """

    def __init__(
        self,
        setup: LayerSetup,
        *,
        is_decoder: bool = False,
        post_norm: bool = False,
        scale: float | None = None,
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them.

        Args:
            setup: config, context and options of the layer.
            is_decoder: attend causally, and add attention to an encoder.
            post_norm: norms after each sum.
            scale: of attention scores; None: 1/sqrt(head dim).

        Raises:
            ValueError: if the setup has parts, which only GPT uses.
        """
        config, ctx = setup.config, setup.ctx
        dropout = stream_dropout(config, ctx, setup.streams)
        super().__init__(dropout, setup.streams, setup.recomputed)
        if setup.parts:
            raise ValueError("parts: only GPT supports replaced mixers. Leave parts out.")
        self.attention = MaskedAttention(setup, causal=is_decoder, scale=scale)
        if is_decoder:
            self.cross_attention = MaskedAttention(setup, is_cross=True, scale=scale)
        self.mlp = _build_mlp(setup)
        self.is_decoder, self.layer = is_decoder, setup.layer
        self.norms_sums = post_norm
        self.is_local = is_local(config, setup.layer)
        for name in self._mixers(MaskedInputs()):
            if name == "attention" and config.embedding_layernorm and setup.layer == 0:
                self.attention_norm = nn.Identity()  # the stream is normed already
                continue
            norm = stream_norm(config, ctx, **setup.factory_kwargs)
            self.add_module(f"{name}_post_norm" if post_norm else f"{name}_norm", norm)

    def forward(self, stream: Residual, inputs: MaskedInputs) -> Residual:
        """Transform the residual stream; communicates as attention and feed-forward do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: masks, and the encoder's output.
        """
        for name, mixer in self._mixers(inputs).items():
            recomputed_as = "mlp" if name == "mlp" else ""
            if self.norms_sums:
                norm = getattr(self, f"{name}_post_norm")
                stream = self._add_and_norm(stream, mixer, norm, recomputed_as)
                continue
            y, stream = self.mix(stream, getattr(self, f"{name}_norm"), mixer, recomputed_as)
            stream = self.add(stream, y)
        return stream

    def _add_and_norm(
        self, stream: Residual, mixer: Callable[[Tensor], Tensor], norm: Any, recomputed_as: str
    ) -> Residual:
        """Return ``norm(x + dropout(mixer(x)))``."""
        x = stream.total()
        y = self.dropout(self.recomputing(mixer, recomputed_as)(x))
        if "layernorm" in self.recomputed and self.training:
            return Residual(recompute(norm, x + y), None, stream.aux)
        return Residual(norm.add_and_norm(x, y)[0], None, stream.aux)

    def _mixers(self, inputs: MaskedInputs) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return the mixers by name, in order, as functions of the stream."""
        # A decoder's layer has two states: of its own tokens, and of the encoder's.
        self_state, cross_state = (
            inputs.state and inputs.state.layer(2 * self.layer + offset) for offset in (0, 1)
        )
        mask, rotary = inputs.mask, inputs.rotary
        if self.is_local:
            mask, rotary = inputs.local_mask, inputs.local_rotary or rotary
        mixers: dict[str, Any] = {
            "attention": partial(self.attention, mask=mask, state=self_state, rotary=rotary)
        }
        if self.is_decoder:
            mixers["cross_attention"] = partial(
                self.cross_attention,
                mask=inputs.memory_mask,
                memory=inputs.memory,
                state=cross_state,
            )
        return mixers | {"mlp": self.mlp}


def _build_mlp(setup: LayerSetup) -> MLP:
    """Build the feed-forward layer; in a T5 ``--feed-forward-proj`` chooses its activation."""
    network = feed_forward_network(setup, recomputed_as="mlp_act")
    if isinstance(setup.config, T5Config):
        is_gated, activation = feed_forward(setup.config)
        network = replace(network, gated=is_gated, activation=activation)
    return build_mlp(setup, network)
