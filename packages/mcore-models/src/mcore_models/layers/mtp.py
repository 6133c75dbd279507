"""Multi-token prediction: layers after the model that predict tokens further ahead.

Depth k joins the hidden state of depth k-1 with the embedding of the token k positions ahead,
runs one more layer on both, and predicts the token k+1 positions ahead. All depths share the
model's embedding and output head. Every depth is causal: position i attends to tokens up to
i + k to predict token i + k + 1.

DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437, section 2.2. As in its release, and unlike its
equation 21, depth 1 gets the model's hidden state after the final norm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.layers.residual import Residual, stream_cuts, stream_norm
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import ParallelContext


class PredictionLayer(nn.Module):
    """One depth: maps a hidden state and later tokens to the next hidden state.

    Attributes:
        enorm, hnorm: norms of the embedding and of the hidden state.
        eh_proj: embedding and hidden state, in this order, to D; replicated over tensor ranks.
        block: a layer like the model's last one.
        final_norm: norm of the layer's output.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ctx: ParallelContext,
        block: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's share; weights are zero until the model fills them."""
        super().__init__()
        D = config.hidden_size
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.enorm = stream_norm(config, ctx, **factory_kwargs)
        self.hnorm = stream_norm(config, ctx, **factory_kwargs)
        is_cut = stream_cuts(ctx).size > 1
        self.eh_proj = ReplicatedLinear(
            2 * D, D, axis=ctx.tp, sequence_parallel=is_cut, **factory_kwargs
        )
        self.block = block
        self.final_norm = stream_norm(config, ctx, **factory_kwargs)

    def forward(
        self,
        hidden: Float[Tensor, "s B D"],
        embedded: Float[Tensor, "s B D"],
        run: Callable[[nn.Module, Tensor], Residual],
    ) -> tuple[Float[Tensor, "s B D"], Float[Tensor, ""]]:
        """Return the hidden state of the next depth, and the layer's auxiliary losses.

        Communicates as the block does.

        Args:
            hidden: normed hidden state of the previous depth.
            embedded: embeddings of the tokens one position after those of the previous depth.
            run: begins a residual stream and calls the block with the inputs of all blocks.
        """
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        stream = run(self.block, self.eh_proj(joined))
        return stream.normed(self.final_norm)[0], stream.aux


def shifted(x: Shaped[Tensor, "B S"], by: int) -> Shaped[Tensor, "B S"]:
    """Shift complete rows to the left, filling zeros on the right.

    Args:
        x: complete rows, not a context rank's part.
        by: number of positions.
    """
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def has_token(
    num_rows: int, length: int, by: int, documents: Documents | None
) -> Bool[Tensor, "B S"]:
    """Return at which positions the token ``by`` positions ahead is in the same document.

    Args:
        num_rows: B.
        length: S.
        by: number of positions.
        documents: of the rows; None: each row is one document.
    """
    rows: Sequence[Sequence[int]] = [(0, length)] * num_rows
    if documents is not None:
        rows = [pieces.borders for pieces in documents.rows]
    positions = torch.arange(length)
    # For every position the end of its document: each end, repeated by the document's length.
    ends = [
        torch.tensor(borders[1:]).repeat_interleave(torch.tensor(borders).diff())
        for borders in rows
    ]
    return positions + by < torch.stack(ends)
