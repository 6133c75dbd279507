"""Lightning attention: linear attention whose state decays by a fixed factor for each head.

One GEMM computes queries, keys and values, which pass through SiLU, and a gate z. A head adds
the outer product of key and value to its state, and reads the state by the query:
    state_t = exp(-slope) state_{t-1} + v_t k_t^T        y_t = state_t q_t
This is the recurrence of Mamba-2 (``kernels.ssd``) with a step size of 1 and a decay that is
not learned. All heads' outputs are normed together and gated by sigmoid(z). Heads are split
over the tensor ranks. Context ranks exchange heads for sequence before and after the state.

Reference:
    Qin et al. 2024, Lightning Attention-2, arXiv:2401.04658; the layer as in MiniMax-01,
    arXiv:2501.08313, section 2.2.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.kernels.ssd import ssd
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import SplitRMSNorm
from mcore_models.layers.recurrent.causal_conv import document_starts
from mcore_models.logical_tensors import head_dim
from mcore_models.protocol import RecurrentState
from mcore_parallel.context_parallel.zigzag import heads_to_sequence, sequence_to_heads
from mcore_parallel.tensor_parallel.linear import LinearOutput

_NO_INPUTS = BlockInputs()
_EPSILON = 1e-6
"""Epsilon of the norm of the outputs, which does not depend on ``--norm-epsilon``."""
_LEAST_SHARE = 1e-5
"""Decay rates of the last layer, divided by those of the first layer."""


class LightningAttention(nn.Module):
    """Lightning attention of one layer.

    Attributes:
        in_proj: D to this rank's q, k, v and z, in this order.
        norm: of the outputs of all heads on all tensor ranks together.
        out_proj: channels to D.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; matrices are zero until the model fills them."""
        super().__init__()
        config, ctx = setup.config, setup.ctx
        self.config, self.layer, self.tp, self.cp = config, setup.layer, ctx.tp, ctx.cp
        width = config.num_attention_heads * head_dim(config)
        outputs = [LinearOutput(name, width) for name in "qkvz"]
        self.in_proj = setup.column_linear(config.hidden_size, outputs)
        self.norm = SplitRMSNorm(
            width,
            epsilon=_EPSILON,
            zero_centered=config.apply_layernorm_1p,
            axis=ctx.tp,
            **setup.factory_kwargs,
        )
        self.out_proj = setup.row_linear(width, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Mix every token with all earlier tokens of its document.

        Communicates over ``tp`` in the two linears and the norm, and over ``cp`` by an
        all-to-all for each of q, k and v, and one for the output.

        Args:
            x: this rank's tokens.
            inputs: documents and state of the tokens.
        """
        *qkv, z = self.in_proj(x).split(self.in_proj.output_sizes, -1)
        width = head_dim(self.config)
        q, k, v = (F.silu(part).unflatten(-1, (-1, width)) for part in qkv)
        if inputs.state is not None:
            y = self._continued(q, k, v, inputs.state.layer(self.layer))
        else:
            starts = document_starts(inputs.documents, x.device)
            q, k, v = (heads_to_sequence(part, self.cp) for part in (q, k, v))
            y = sequence_to_heads(self._scan(q, k, v, starts=starts)[0], self.cp)
        return self.out_proj(self.norm(y.flatten(-2)) * z.sigmoid())

    def _scan(
        self,
        q: Float[Tensor, "S B N H"],
        k: Float[Tensor, "S B N H"],
        v: Float[Tensor, "S B N H"],
        *,
        starts: Bool[Tensor, "S B"] | None = None,
        state: Float[Tensor, "B N H H"] | None = None,
    ) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N H H"]]:
        """Run the state over complete sequences; return outputs and last state."""
        wide = torch.promote_types(v.dtype, torch.float32)
        slopes = lightning_slopes(self.config, self.layer, v.device).to(wide)
        # Tensor ranks split the heads, and context ranks the heads of a tensor rank.
        slopes = slopes.chunk(self.tp.size)[self.tp.rank].chunk(self.cp.size)[self.cp.rank]
        steps, skip = v.new_ones(v.shape[:3], dtype=wide), v.new_zeros(v.shape[2])
        return ssd(v, steps, -slopes, k, q, skip, starts=starts, state=state)

    def _continued(
        self, q: Tensor, k: Tensor, v: Tensor, layer_state: object
    ) -> Float[Tensor, "S B N H"]:
        """Continue from the stored state; store the new one."""
        if not isinstance(layer_state, RecurrentState):
            raise TypeError(
                f"layer {self.layer} (lightning attention) needs a recurrent state, but its "
                f"state is a {type(layer_state).__name__}: implement RecurrentState.run."
            )

        def mix(
            stored: tuple[Tensor, ...] | None, q: Tensor, k: Tensor, v: Tensor
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            y, state = self._scan(q, k, v, state=stored[0] if stored else None)
            return y, (state,)

        return layer_state.run(mix, q, k, v)


def lightning_slopes(
    config: TransformerConfig, layer: int, device: torch.device | None = None
) -> Float[Tensor, " N"]:
    """Return the decay rate of each head in a layer (counted from 0), float64.

    Head n of N in the first layer has the rate 2^(-8 n / N), as slopes of ALiBi; rates fall
    linearly over the layers.
    """
    number = torch.arange(1, config.num_attention_heads + 1, dtype=torch.float64, device=device)
    # 0 at the last layer, and in layers of multi-token prediction after it.
    share = max(0.0, 1 - layer / (config.num_layers - 1 + _LEAST_SHARE))
    return torch.exp2(-8 / config.num_attention_heads * number) * (share + _LEAST_SHARE)
