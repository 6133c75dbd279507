"""A layer of an encoder or decoder: attention, attention to an encoder if any, feed-forward.

Norms come before each half (Megatron's BERT, T5) or after it (BERT as published).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mcore_models.encoder_config import T5Config, feed_forward
from mcore_models.layers.encoder_decoder_attention import MaskedAttention
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.mixers import MIXERS
from mcore_models.layers.mlp import MLP
from mcore_models.layers.residual import (
    PostNorm,
    PreNorm,
    Residual,
    stream_dropout,
    stream_norm,
)
from mcore_models.protocol import ModelState
from mcore_parallel.logical_tensors import ffn_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedInputs:
    """What all blocks of a stack are given beside the residual stream."""

    mask: Tensor | None = None
    """Of attention among the stack's own tokens, see ``MaskedAttention``."""
    memory: Tensor | None = None
    """What the encoder returned; None in an encoder."""
    memory_mask: Tensor | None = None
    """Of attention to it."""
    state: ModelState | None = None
    """What a decoder remembers of earlier tokens and of the encoder; None: nothing."""


class MaskedBlock(nn.Module):
    """A layer of the model; keeps the shape of its input.

    Attributes:
        attention, cross_attention, mlp: the halves, in order; each has a norm of its name
            and ``_norm``, or ``_post_norm`` if norms come after.
        residual: joins a half to the residual stream.
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
            setup: what the halves are built from.
            is_decoder: attend causally, and to an encoder as well.
            post_norm: norms after each half.
            scale: of attention scores; None: 1/sqrt(head dim).

        Raises:
            ValueError: for parts in place of its own.
        """
        super().__init__()
        if setup.parts:
            raise ValueError("parts are taken by GPT alone: leave them out.")
        config, ctx = setup.config, setup.ctx
        self.attention = MaskedAttention(setup, causal=is_decoder, scale=scale)
        if is_decoder:
            self.cross_attention = MaskedAttention(setup, is_cross=True, scale=scale)
        self.mlp = _build_mlp(setup)
        self.is_decoder, self.layer = is_decoder, setup.layer
        self.norm_name = "post_norm" if post_norm else "norm"
        for name in self._halves():
            norm = stream_norm(config, ctx, **setup.placed)
            self.add_module(f"{name}_{self.norm_name}", norm)
        dropout = stream_dropout(config, ctx, setup.streams)
        kind = PostNorm if post_norm else PreNorm
        self.residual = kind(dropout, setup.streams, setup.recomputed)

    def forward(self, stream: Residual, inputs: MaskedInputs) -> Residual:
        """Transform the residual stream; communicates as attention and feed-forward do.

        Args:
            stream: ``[S, B, D]``, or this rank's ``[S/tp, B, D]``.
            inputs: masks, and what the encoder returned.
        """
        for name, layer in self._halves(inputs).items():
            norm = getattr(self, f"{name}_{self.norm_name}")
            stream = self.residual(stream, norm, layer, "mlp" if name == "mlp" else "")
        return stream

    def _halves(self, inputs: MaskedInputs | None = None) -> Mapping[str, Any]:
        """Return the halves by name, in order, as functions of the normed stream."""
        given = inputs or MaskedInputs()
        own, other = (
            given.state and given.state.layer(2 * self.layer + place) for place in (0, 1)
        )
        halves: dict[str, Any] = {
            "attention": partial(self.attention, mask=given.mask, state=own)
        }
        if self.is_decoder:
            halves["cross_attention"] = partial(
                self.cross_attention, mask=given.memory_mask, memory=given.memory, state=other
            )
        return halves | {"mlp": self.mlp}


def _build_mlp(setup: LayerSetup) -> Any:
    """Build the feed-forward layer: of a T5 as ``--feed-forward-proj`` says."""
    config = setup.config
    if not isinstance(config, T5Config):
        return MIXERS["mlp"].build(setup)
    is_gated, activation = feed_forward(config)
    return MLP(
        config.hidden_size,
        ffn_size(config),
        gated=is_gated,
        activation=activation,
        bias=config.add_bias_linear,
        recompute_activation="mlp_act" in setup.recomputed,
        gemms=setup.gemms,
        **setup.split,
    )
