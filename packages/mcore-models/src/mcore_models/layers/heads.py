"""Heads on top of an encoder: hidden tokens, the first token of a row.

Linears here are whole on every tensor rank; under sequence parallelism a rank sees its own
tokens, so their gradients are parts of a sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.norm import build_norm
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_parallel.collectives import reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, sliced


class MaskedTokenHead(nn.Module):
    """What BERT predicts hidden tokens from: dense, GELU, norm; and a bias for each token.

    Attributes:
        dense: D to D.
        norm: after the activation.
        bias: of this rank's part of the vocabulary.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        padded_vocab_size: int,
        *,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the parameters; matrices are zero until the model fills them.

        Args:
            config: of the model.
            vocab_size: true number of tokens.
            padded_vocab_size: biases over all ranks.
            axis: ranks that share the vocabulary.
            sequence_parallel: whether tokens are cut over ``axis``.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.vocab_size, self.axis = vocab_size, axis
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        D = config.hidden_size
        cut: dict[str, Any] = {"axis": axis, "sequence_parallel": sequence_parallel}
        self.dense = ReplicatedLinear(D, D, bias=True, **cut, **placed)
        partial = axis if sequence_parallel else SINGLE
        self.norm = build_norm(config, D, replicas=axis, partial=partial, **placed)
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size // axis.size, **placed))

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Return what is multiplied by the embedding; no communication."""
        return self.norm(F.gelu(self.dense(x)))

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the bias, see ``mcore_parallel.sharding``."""
        return {"bias": sliced("", (self.vocab_size,), 0, self.axis, tuple(self.bias.shape))}


class Pooler(nn.Module):
    """The first token of each row through a linear and tanh.

    Attributes:
        dense: D to D.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the linear; its weight is zero until the model fills it.

        Args:
            hidden_size: D.
            axis: ranks that hold it.
            sequence_parallel: whether tokens are cut over ``axis``.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.dense = ReplicatedLinear(
            hidden_size, hidden_size, bias=True, axis=axis, device=device, dtype=dtype
        )

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "B D"]:
        """Pool; all-reduces one token a row under sequence parallelism.

        Args:
            x: hidden states; the first tensor rank has the first token.
        """
        first = x[0]
        if self.sequence_parallel:
            first = reduce_from(first if self.axis.rank == 0 else first * 0.0, self.axis)
        return torch.tanh(self.dense(first))


class OutputBias(nn.Module):
    """A bias for each token of a tied head, split over the tensor ranks."""

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, axis: Axis, **placed: Any
    ) -> None:
        """Allocate this rank's part; zeros."""
        super().__init__()
        self.vocab_size, self.axis = vocab_size, axis
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size // axis.size, **placed))

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the bias, see ``mcore_parallel.sharding``."""
        return {"bias": sliced("", (self.vocab_size,), 0, self.axis, tuple(self.bias.shape))}
