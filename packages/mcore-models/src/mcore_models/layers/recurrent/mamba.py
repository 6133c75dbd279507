"""The Mamba-2 mixer: a short convolution, then a recurrent state.

One GEMM computes the gate z, the input x, the projections into (B) and out of (C) the state,
and a step size dt for each head. Heads and their groups (heads that share B and C) are split
over the tensor ranks; with fewer groups than ranks, neighbouring ranks hold the same groups.
Context ranks exchange heads for sequence before and after convolution and state.

Reference:
    Dao and Gu 2024, arXiv:2405.21060, section 7.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mcore_models.kernels.conv import conv_silu
from mcore_models.kernels.gated_norm import gated_norm
from mcore_models.kernels.ssd import ssd
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.recurrent.causal_conv import CausalConv, document_starts
from mcore_models.logical_tensors import mamba_sizes
from mcore_models.protocol import RecurrentState
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import heads_to_sequence, sequence_to_heads
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import ParamLayout, sliced_layout
from mcore_parallel.tensor_parallel.linear import (
    LinearOutput,
)

_NO_INPUTS = BlockInputs()


class Mamba(nn.Module):
    """Mamba-2 mixer of one layer.

    Attributes:
        in_proj: D to this rank's z, x, B, C and dt, in this order.
        conv1d: over this rank's x, B and C.
        dt_bias, A_log, D: of each head on this rank.
        norm: of the gated output, by groups, or None.
        out_proj: channels to D.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; matrices are zero until the model fills them."""
        super().__init__()
        config, ctx, factory_kwargs = setup.config, setup.ctx, setup.factory_kwargs
        self.config, self.layer, self.cp = config, setup.layer, ctx.cp
        sizes, tp = mamba_sizes(config), ctx.tp
        holders = ctx.tp_block(max(1, tp.size // sizes.groups))
        D, bias = config.hidden_size, config.mamba_proj_bias
        mixed = [
            LinearOutput("x", sizes.inner),
            LinearOutput("B", sizes.states, holders),
            LinearOutput("C", sizes.states, holders),
        ]
        outputs = [LinearOutput("z", sizes.inner), *mixed, LinearOutput("dt", sizes.heads)]
        self.in_proj = setup.column_linear(D, outputs, bias=bias)
        self.conv1d = CausalConv(
            mixed,
            config.mamba_conv_kernel,
            bias=config.mamba_conv_bias,
            axis=tp,
            **factory_kwargs,
        )
        heads = sizes.heads // tp.size
        self.num_heads, self.axis = sizes.heads, tp
        self.dt_bias = nn.Parameter(torch.zeros(heads, **factory_kwargs))
        self.A_log = nn.Parameter(torch.zeros(heads, **factory_kwargs))
        self.D = nn.Parameter(torch.ones(heads, **factory_kwargs))
        self.norm = None
        if config.mamba_norm != "none":
            self.norm = GatedNorm(
                sizes.inner,
                sizes.groups,
                epsilon=config.norm_epsilon,
                gates_first=config.mamba_norm == "gated",
                axis=tp,
                holders=holders,
                **factory_kwargs,
            )
        self.out_proj = setup.row_linear(sizes.inner, D, bias=bias)

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Mix every token with all earlier tokens of its document.

        Communicates in the two linears, and over ``cp``: an all-to-all for each of x, B, C and
        dt, and one for the output.

        Args:
            x: this rank's tokens.
            inputs: documents and state of the tokens.
        """
        projected = self.in_proj(x)
        inner, _, _, _, heads = self.in_proj.output_sizes
        z, xBC, dt = projected.split((inner, projected.shape[-1] - inner - heads, heads), -1)
        if inputs.state is not None:
            y = self._continued(xBC, dt, inputs.state.layer(self.layer))
        elif self.cp.size == 1:
            y = self._scan(xBC, dt, starts=document_starts(inputs.documents, x.device))[0]
        else:
            y = self._over_context(xBC, dt, inputs.documents)
        y = y.flatten(-2)
        return self.out_proj(y * F.silu(z) if self.norm is None else self.norm(y, z))

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the vectors with one number per head."""
        names = ("dt_bias", "A_log", "D")
        return {name: sliced_layout("", (self.num_heads,), 0, self.axis) for name in names}

    def _scan(
        self,
        xBC: Tensor,
        dt: Tensor,
        *,
        starts: Bool[Tensor, "S B"] | None = None,
        before: Tensor | None = None,
        state: Tensor | None = None,
        share: "_Share | None" = None,
    ) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N H K"]]:
        """Run convolution and state over complete sequences; return outputs and last state.

        ``xBC`` and ``dt`` hold the heads of ``share``; None: all heads of this rank.
        """
        share = share or _Share(self, 0, 1)
        mixed = conv_silu(xBC, share.weight, share.bias, starts=starts, before=before)
        x, B, C = mixed.split(share.sizes, dim=-1)
        wide = torch.promote_types(dt.dtype, torch.float32)
        low, high = self.config.mamba_dt_limit
        step = F.softplus(dt.to(wide) + share.dt_bias.to(wide))
        step = step.clamp(low, high or math.inf)
        return ssd(
            x.unflatten(-1, (-1, self.config.mamba_head_dim)),
            step,
            -share.A_log.to(wide).exp(),
            B.unflatten(-1, (-1, self.config.mamba_state_dim)),
            C.unflatten(-1, (-1, self.config.mamba_state_dim)),
            share.D,
            chunk_size=self.config.mamba_chunk_size,
            starts=starts,
            state=state,
        )

    def _continued(self, xBC: Tensor, dt: Tensor, layer_state: object) -> Tensor:
        """Continue from the stored inputs of the convolution and state; store the new ones."""
        if not isinstance(layer_state, RecurrentState):
            raise TypeError(
                f"layer {self.layer} (Mamba) needs a recurrent state, but its state is a "
                f"{type(layer_state).__name__}: implement RecurrentState.run."
            )

        def mix(
            stored: tuple[Tensor, Tensor] | None, xBC: Tensor, dt: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            # The state stores the convolution's inputs batch first: [B, w, F] -> [w, B, F].
            before, state = (stored[0].transpose(0, 1), stored[1]) if stored else (None, None)
            y, state = self._scan(xBC, dt, before=before, state=state)
            return y, (self.conv1d.recent(xBC, before).transpose(0, 1), state)

        return layer_state.run(mix, xBC, dt)

    def _over_context(
        self, xBC: Tensor, dt: Tensor, documents: Documents | None
    ) -> Float[Tensor, "s B N H"]:
        """Exchange tokens for heads, run over complete sequences, and exchange back."""
        # All tokens of some heads instead of some tokens of all heads. B and C of a group are
        # copied first if several context ranks get heads of the group.
        share = _Share(self, self.cp.rank, self.cp.size)
        parts = xBC.split(self.conv1d.sizes, dim=-1)
        widths = (self.config.mamba_head_dim, *(self.config.mamba_state_dim,) * 2)
        exchanged = [
            heads_to_sequence(
                part.unflatten(-1, (-1, width)).repeat_interleave(copies, 2), self.cp
            ).flatten(-2)
            for part, width, copies in zip(parts, widths, share.copies, strict=True)
        ]
        dt = heads_to_sequence(dt[..., None], self.cp).squeeze(-1)
        starts = document_starts(documents, dt.device)
        y, _ = self._scan(torch.cat(exchanged, -1), dt, starts=starts, share=share)
        return sequence_to_heads(y, self.cp)


class GatedNorm(nn.Module):
    """RMSNorm of a gated output, group by group, as ``--mamba-norm`` chooses.

    gated: ``norm(y * silu(z)) * weight``; before_gate: ``norm(y) * weight * silu(z)``.
    Statistics are float32 or wider, the weight is applied in the input's dtype.
    """

    def __init__(
        self,
        size: int,
        num_groups: int,
        *,
        epsilon: float,
        gates_first: bool = True,
        axis: Axis,
        holders: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's weights, initialized to the identity.

        Args:
            size: channels over all ranks.
            num_groups: equal blocks of channels, each normed separately.
            epsilon: added to the mean square.
            gates_first: gate the output before the norm; False: after it.
            axis: ranks that share the channels.
            holders: ranks that share one group; their sums of squares are all-reduced.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.size, self.epsilon, self.axis, self.holders = size, epsilon, axis, holders
        self.group_size, self.gates_first = size // num_groups, gates_first
        self.weight = nn.Parameter(torch.ones(size // axis.size, device=device, dtype=dtype))

    def forward(
        self, y: Float[Tensor, "*B F"], z: Float[Tensor, "*B F"]
    ) -> Float[Tensor, "*B F"]:
        """Return the gated and normed ``y``; all-reduces over ``holders``, also in backward."""
        return gated_norm(
            y,
            z,
            self.weight,
            group_size=self.group_size,
            epsilon=self.epsilon,
            gates_first=self.gates_first,
            holders=self.holders,
        )

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the weight."""
        return {"weight": sliced_layout("", (self.size,), 0, self.axis)}


class _Share:
    """Parameters of the ``rank``-th of ``size`` equal blocks of this tensor rank's heads.

    The block includes the groups of its heads. With fewer groups than blocks, several blocks
    have a copy of the same group.
    """

    def __init__(self, mixer: Mamba, rank: int, size: int) -> None:
        config = mixer.config
        groups = mixer.conv1d.sizes[1] // config.mamba_state_dim
        # Copies of each group (B and C) that make the number of groups a multiple of size.
        group_copies = size // math.gcd(size, groups)
        self.copies = (1, group_copies, group_copies)
        widths = (config.mamba_head_dim, config.mamba_state_dim, config.mamba_state_dim)

        def local_block(x: Tensor) -> Tensor:
            if size == 1:
                return x
            parts = x.split(mixer.conv1d.sizes)
            blocks = [
                part.unflatten(0, (-1, width))
                .repeat_interleave(copies, 0)
                .chunk(size)[rank]
                .flatten(0, 1)
                for part, width, copies in zip(parts, widths, self.copies, strict=True)
            ]
            return torch.cat(blocks)

        self.weight = local_block(mixer.conv1d.weight)
        self.bias = None if mixer.conv1d.bias is None else local_block(mixer.conv1d.bias)
        self.sizes = [
            count * copies // size
            for count, copies in zip(mixer.conv1d.sizes, self.copies, strict=True)
        ]
        self.dt_bias, self.A_log, self.D = (
            x.chunk(size)[rank] for x in (mixer.dt_bias, mixer.A_log, mixer.D)
        )
