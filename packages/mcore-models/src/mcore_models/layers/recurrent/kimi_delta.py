"""Kimi Delta Attention: a gated delta net with a decay for each channel of a head's keys.

Decays, and the gate of the output, are computed from a token by two pairs of linears, D to a
low rank (replicated over the tensor ranks) and the low rank to this rank's heads. One GEMM
computes queries, keys, values, and b, the share of a key's stored value that is replaced.
Convolution, state and exchange between context ranks are those of ``delta_net``.

Reference:
    Kimi team 2025, Kimi Linear, arXiv:2510.26692, sections 3 and 4.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import RMSNorm
from mcore_models.layers.recurrent.causal_conv import CausalConv
from mcore_models.layers.recurrent.delta_net import DeltaNet
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.logical_tensors import delta_sizes
from mcore_parallel.sharding import ParamLayout, sliced_layout
from mcore_parallel.tensor_parallel.linear import LinearOutput


class KimiDelta(DeltaNet):
    """Kimi Delta Attention of one layer.

    Attributes:
        in_proj: D to this rank's q, k, v and b, in this order.
        conv1d: over this rank's q, k and v.
        decay_down, decay_up: D to the low rank, and to this rank's decays of channels.
        gate_down, gate_up: D to the low rank, and to this rank's output gates.
        dt_bias: of each decay on this rank, [N K].
        A_log: of each head on this rank, [1, 1, N, 1] as in checkpoints.
        norm: of each head's output, with one weight for all heads.
        out_proj: channels to D.
    """

    # The work of decayed products grows with the chunk, that of the state falls with it.
    chunk_size = 32
    kind = "Kimi Delta Attention"

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; matrices are zero until the model fills them."""
        nn.Module.__init__(self)
        config, ctx, factory_kwargs = setup.config, setup.ctx, setup.factory_kwargs
        self.config, self.layer, self.tp, self.cp = config, setup.layer, ctx.tp, ctx.cp
        self.sizes = sizes = delta_sizes(config)
        D, key_width = config.hidden_size, config.linear_key_head_dim
        value_width = config.linear_value_head_dim
        mixed = [
            LinearOutput("q", sizes.keys),
            LinearOutput("k", sizes.keys),
            LinearOutput("v", sizes.values),
        ]
        self.in_proj = setup.column_linear(D, [*mixed, LinearOutput("b", sizes.value_heads)])
        width = config.linear_conv_kernel_dim
        self.conv1d = CausalConv(mixed, width, bias=False, axis=ctx.tp, **factory_kwargs)
        replicated: dict[str, Any] = {
            "axis": ctx.tp,
            "sequence_parallel": setup.sequence_parallel,
            **factory_kwargs,
        }
        self.decay_down = ReplicatedLinear(D, key_width, **replicated)
        self.decay_up = setup.column_linear(key_width, sizes.value_heads * key_width)
        self.gate_down = ReplicatedLinear(D, value_width, **replicated)
        self.gate_up = setup.column_linear(value_width, sizes.values)
        heads = sizes.value_heads // ctx.tp.size
        self.dt_bias = nn.Parameter(torch.ones(heads * key_width, **factory_kwargs))
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1, **factory_kwargs))
        # Each rank norms its own heads, so its gradient of the weight is a part of a sum.
        self.norm = RMSNorm(
            value_width,
            epsilon=config.norm_epsilon,
            replicas=ctx.tp,
            partial=ctx.tp,
            **factory_kwargs,
        )
        self.out_proj = setup.row_linear(sizes.values, D)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the vectors with numbers for each head."""
        heads = self.sizes.value_heads
        decays = (heads * self.config.linear_key_head_dim,)
        return {
            "dt_bias": sliced_layout("", decays, 0, self.tp),
            "A_log": sliced_layout("", (1, 1, heads, 1), 2, self.tp),
        }

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = self.in_proj.output_sizes
        mixed, b = self.in_proj(x).split((sum(sizes[:3]), sizes[3]), -1)
        z, a = self.gate_up(self.gate_down(x)), self.decay_up(self.decay_down(x))
        return mixed, z, b, a

    def _log_decay(
        self, a: Float[Tensor, "S B R"], local_block: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "S B N K"]:
        rate = F.softplus(a + local_block(self.dt_bias).to(a.dtype))
        A_log = local_block(self.A_log.flatten()).to(a.dtype)
        return -A_log.exp()[:, None] * rate.unflatten(-1, (-1, self.config.linear_key_head_dim))

    def _gated_norm(
        self, y: Float[Tensor, "S B N H"], z: Float[Tensor, "S B N H"]
    ) -> Float[Tensor, "S B N H"]:
        wide = torch.promote_types(y.dtype, torch.float32)
        return (self.norm(y).to(wide) * z.to(wide).sigmoid()).to(y.dtype)
