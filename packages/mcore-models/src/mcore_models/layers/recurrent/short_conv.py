"""The gated short convolution of LFM2: a few earlier tokens of each channel, gated twice.

One GEMM computes B, C and x of every channel; the layer returns C * conv(B * x), projected.
Channels are split over the tensor ranks. Context ranks exchange channels for sequence before
and after the convolution.

Reference:
    Liquid AI 2025, LFM2 technical report, arXiv:2511.23404, section 2.
"""

from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.kernels.conv import causal_conv
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.recurrent.causal_conv import CausalConv, document_starts
from mcore_models.protocol import RecurrentState
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import heads_to_sequence, sequence_to_heads
from mcore_parallel.tensor_parallel.linear import (
    LinearOutput,
)

_NO_INPUTS = BlockInputs()


class ShortConv(nn.Module):
    """Gated short convolution of one layer.

    Attributes:
        in_proj: D to this rank's channels of B, C and x, in this order.
        conv1d: over this rank's channels of B * x.
        out_proj: channels to D.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's channels; matrices are zero until the model fills them."""
        super().__init__()
        config, ctx = setup.config, setup.ctx
        self.layer, self.cp = setup.layer, ctx.cp
        D, bias = config.hidden_size, config.short_conv_bias
        inputs = [LinearOutput("B", D), LinearOutput("C", D), LinearOutput("x", D)]
        self.in_proj = setup.column_linear(D, inputs, bias=bias)
        self.conv1d = CausalConv(
            inputs[2:],
            config.short_conv_kernel_dim,
            bias=bias,
            axis=ctx.tp,
            **setup.factory_kwargs,
        )
        self.out_proj = setup.row_linear(D, D, bias=bias)

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Mix every token with the W - 1 previous tokens of its document.

        Communicates in the two linears, and over ``cp``: an all-to-all before the convolution
        and one after it.

        Args:
            x: this rank's tokens.
            inputs: documents and state of the tokens.
        """
        B, C, x = self.in_proj(x).split(self.in_proj.output_sizes, -1)
        gated = B * x
        if inputs.state is not None:
            y = self._continued(gated, inputs.state.layer(self.layer))
        elif self.cp.size == 1:
            starts = document_starts(inputs.documents, x.device)
            y = causal_conv(gated, self.conv1d.weight, self.conv1d.bias, starts=starts)
        else:
            y = self._over_context(gated, inputs.documents)
        return self.out_proj(C * y)

    def _continued(self, gated: Tensor, layer_state: object) -> Tensor:
        """Continue from the stored inputs of the convolution; store the new ones."""
        if not isinstance(layer_state, RecurrentState):
            raise TypeError(
                f"layer {self.layer} (short convolution) needs a recurrent state, but its "
                f"state is a {type(layer_state).__name__}: implement RecurrentState.run."
            )

        def mix(
            stored: tuple[Tensor, ...] | None, gated: Tensor
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            before = stored[0].transpose(0, 1) if stored else None  # [B, w, F] -> [w, B, F]
            y = causal_conv(gated, self.conv1d.weight, self.conv1d.bias, before=before)
            return y, (self.conv1d.recent(gated, before).transpose(0, 1),)

        return layer_state.run(mix, gated)

    def _over_context(self, gated: Tensor, documents: Documents | None) -> Tensor:
        """Exchange tokens for channels, convolve complete sequences, and exchange back."""
        cp = self.cp
        # [s, B, F] -> [S, B, 1, F/cp]: each block of channels is exchanged like a head.
        complete = heads_to_sequence(gated.unflatten(-1, (cp.size, -1)), cp).flatten(-2)
        weight, bias = self.conv1d.weight.chunk(cp.size)[cp.rank], self.conv1d.bias
        bias = None if bias is None else bias.chunk(cp.size)[cp.rank]
        starts = document_starts(documents, gated.device)
        y = causal_conv(complete, weight, bias, starts=starts)
        return sequence_to_heads(y.unsqueeze(2), cp).flatten(-2)
