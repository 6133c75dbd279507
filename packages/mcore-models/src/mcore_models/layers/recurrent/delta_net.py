"""The gated delta net: a short convolution, then a recurrent state updated by the delta rule.

One GEMM computes queries, keys, values and an output gate z, and two numbers for each value
head: b, the share of a key's stored value that is replaced, and a, the decay of the state. Key
heads and their value heads are split over the tensor ranks. Context ranks exchange
heads for sequence before and after convolution and state.

Reference:
    Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464; the layer as in Qwen3-Next.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mcore_models.kernels.conv import conv_silu
from mcore_models.kernels.delta import CHUNK, gated_delta_rule
from mcore_models.kernels.gated_norm import gated_norm
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import RMSNorm
from mcore_models.layers.recurrent.causal_conv import CausalConv, document_starts
from mcore_models.logical_tensors import delta_sizes
from mcore_models.protocol import RecurrentState
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import heads_to_sequence, sequence_to_heads
from mcore_parallel.sharding import ParamLayout, sliced_layout
from mcore_parallel.tensor_parallel.linear import (
    LinearOutput,
)

_NO_INPUTS = BlockInputs()
_EPSILON = 1e-6
"""Added to the squared norm of queries and keys."""


class DeltaNet(nn.Module):
    """Gated delta net of one layer.

    Attributes:
        chunk_size: tokens of a chunk of the state in plain torch.
        kind: the layer's name in errors.
        in_proj: D to this rank's q, k, v, z, b and a, in this order.
        conv1d: over this rank's q, k and v.
        dt_bias, A_log: of each value head on this rank.
        norm: of each head's output, with one weight for all heads.
        out_proj: channels to D.
    """

    chunk_size = CHUNK
    kind = "gated delta net"

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; matrices are zero until the model fills them."""
        super().__init__()
        config, ctx, factory_kwargs = setup.config, setup.ctx, setup.factory_kwargs
        self.config, self.layer, self.tp, self.cp = config, setup.layer, ctx.tp, ctx.cp
        self.sizes = sizes = delta_sizes(config)
        mixed = [
            LinearOutput("q", sizes.keys),
            LinearOutput("k", sizes.keys),
            LinearOutput("v", sizes.values),
        ]
        rates = [LinearOutput("b", sizes.value_heads), LinearOutput("a", sizes.value_heads)]
        outputs = [*mixed, LinearOutput("z", sizes.values), *rates]
        self.in_proj = setup.column_linear(config.hidden_size, outputs)
        width = config.linear_conv_kernel_dim
        self.conv1d = CausalConv(mixed, width, bias=False, axis=ctx.tp, **factory_kwargs)
        heads = sizes.value_heads // ctx.tp.size
        self.dt_bias = nn.Parameter(torch.ones(heads, **factory_kwargs))
        self.A_log = nn.Parameter(torch.zeros(heads, **factory_kwargs))
        # Each rank norms its own heads, so its gradient of the weight is a part of a sum.
        self.norm = RMSNorm(
            config.linear_value_head_dim,
            epsilon=config.norm_epsilon,
            replicas=ctx.tp,
            partial=ctx.tp,
            **factory_kwargs,
        )
        self.out_proj = setup.row_linear(sizes.values, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Mix every token with all earlier tokens of its document.

        Communicates in the two linears, and over ``cp``: an all-to-all for each of q, k, v, b
        and a, and one for the output.

        Args:
            x: this rank's tokens.
            inputs: documents and state of the tokens.
        """
        mixed, z, b, a = self._project(x)
        sizes = self.conv1d.sizes
        if inputs.state is not None:
            y = self._continued(mixed, b, a, inputs.state.layer(self.layer))
        elif self.cp.size == 1:
            starts = document_starts(inputs.documents, x.device)
            y = self._mix(mixed, b, a, starts=starts)[0]
        else:
            y = self._over_context(mixed.split(sizes, -1), b, a, inputs.documents)
        return self.out_proj(self._gated_norm(y, z.view_as(y)).flatten(-2))

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the vectors with one number per head."""
        heads = (self.sizes.value_heads,)
        return {name: sliced_layout("", heads, 0, self.tp) for name in ("dt_bias", "A_log")}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v in one tensor, the gate z, and b and a of each value head."""
        sizes = self.in_proj.output_sizes
        mixed, z, b, a = self.in_proj(x).split((sum(sizes[:3]), *sizes[3:]), -1)
        return mixed, z, b, a

    def _log_decay(self, a: Tensor, local_block: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logarithms of decay for projections ``a`` of one block of heads.

        ``local_block`` returns the entries of a parameter that belong to these heads.
        """
        rate = F.softplus(a + local_block(self.dt_bias).to(a.dtype))
        return -local_block(self.A_log).to(a.dtype).exp() * rate

    def _gated_norm(
        self, y: Float[Tensor, "S B N H"], z: Float[Tensor, "S B N H"]
    ) -> Float[Tensor, "S B N H"]:
        """Norm each head's output, then gate it; in float32 or wider."""
        assert self.norm.weight is not None
        args = y.flatten(-2), z.flatten(-2), self.norm.weight.repeat(y.shape[2])
        constants = {"group_size": y.shape[-1], "epsilon": self.norm.epsilon}
        if gated_norm.takes(*args, **constants):
            return gated_norm.launch(*args, **constants, gates_first=False).view_as(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        return (self.norm(y).to(wide) * F.silu(z.to(wide))).to(y.dtype)

    def _mix(
        self,
        mixed: Float[Tensor, "S B F"],
        b: Float[Tensor, "S B N"],
        a: Float[Tensor, "S B R"],
        *,
        starts: Bool[Tensor, "S B"] | None = None,
        before: Tensor | None = None,
        state: Tensor | None = None,
        block: int = 0,
        blocks: int = 1,
    ) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
        """Run convolution and state over complete sequences; return outputs and last state.

        ``mixed``, ``b`` and ``a`` hold the ``block``-th of ``blocks`` equal blocks of heads. R,
        the numbers of ``a``, is N, or a multiple of N in a subclass with several decays a head.
        """

        def local_block(x: Tensor) -> Tensor:
            return x.chunk(blocks)[block] if blocks > 1 else x

        parts = self.conv1d.weight.split(self.conv1d.sizes)
        weight = (
            torch.cat([local_block(part) for part in parts])
            if blocks > 1
            else self.conv1d.weight
        )
        convolved = conv_silu(mixed, weight, starts=starts, before=before)
        q, k, v = convolved.split([size // blocks for size in self.conv1d.sizes], -1)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        width = self.config.linear_key_head_dim
        q, k = (_unit(x.unflatten(-1, (-1, width)).to(wide)) for x in (q, k))
        return gated_delta_rule(
            q * width**-0.5,
            k,
            v.unflatten(-1, (-1, self.config.linear_value_head_dim)),
            self._log_decay(a.to(wide), local_block),
            b.to(wide).sigmoid(),
            chunk_size=self.chunk_size,
            starts=starts,
            state=state,
        )

    def _continued(self, mixed: Tensor, b: Tensor, a: Tensor, layer_state: object) -> Tensor:
        """Continue from the stored inputs of the convolution and state; store the new ones."""
        if not isinstance(layer_state, RecurrentState):
            raise TypeError(
                f"layer {self.layer} ({self.kind}) needs a recurrent state, but its state "
                f"is a {type(layer_state).__name__}: implement RecurrentState.run."
            )

        def mix(
            stored: tuple[Tensor, Tensor] | None, mixed: Tensor, b: Tensor, a: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            before, state = (stored[0].transpose(0, 1), stored[1]) if stored else (None, None)
            y, state = self._mix(mixed, b, a, before=before, state=state)
            return y, (self.conv1d.recent(mixed, before).transpose(0, 1), state)

        return layer_state.run(mix, mixed, b, a)

    def _over_context(
        self, parts: Sequence[Tensor], b: Tensor, a: Tensor, documents: Documents | None
    ) -> Float[Tensor, "s B N H"]:
        """Exchange tokens for heads, run over complete sequences, and exchange back."""
        cp, config = self.cp, self.config
        widths = (*(config.linear_key_head_dim,) * 2, config.linear_value_head_dim)
        exchanged = [
            heads_to_sequence(part.unflatten(-1, (-1, width)), cp).flatten(-2)
            for part, width in zip(parts, widths, strict=True)
        ]
        heads = b.shape[-1]  # a has one number for each head, or several
        b, a = (
            heads_to_sequence(rate.unflatten(-1, (heads, -1)), cp).flatten(-2)
            for rate in (b, a)
        )
        starts = document_starts(documents, b.device)
        mixed = torch.cat(exchanged, -1)
        y, _ = self._mix(mixed, b, a, starts=starts, block=cp.rank, blocks=cp.size)
        return sequence_to_heads(y, cp)


def _unit(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
