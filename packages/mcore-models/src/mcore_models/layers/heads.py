"""Heads on top of an encoder: prediction of masked tokens, and pooling of the first token.

Linears here are replicated over tensor ranks. Under sequence parallelism each rank computes its
own tokens, so a rank's gradient of a weight is a part of a sum.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig, activation
from mcore_models.layers.norm import build_norm
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_moe.activations import activation_function
from mcore_parallel.collectives import reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, sliced_layout


class MaskedTokenHead(nn.Module):
    """BERT's head of masked tokens: linear, activation, norm; a bias for each vocabulary row.

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
            sequence_parallel: whether tokens are split over ``axis``.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.vocab_size, self.axis = vocab_size, axis
        # The published form uses the activation of the layers; Megatron's form always uses
        # exact GELU.
        is_published = getattr(config, "post_layer_norm", False)
        self.activation = activation_function(activation(config) if is_published else "gelu")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        D = config.hidden_size
        split: dict[str, Any] = {"axis": axis, "sequence_parallel": sequence_parallel}
        self.dense = ReplicatedLinear(
            D, D, bias=config.add_bias_linear, **split, **factory_kwargs
        )
        partial = axis if sequence_parallel else SINGLE
        self.norm = build_norm(config, D, replicas=axis, partial=partial, **factory_kwargs)
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size // axis.size, **factory_kwargs))

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Return the hidden states that the embedding multiplies; no communication."""
        return self.norm(self.activation(self.dense(x)))

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the bias."""
        return {
            "bias": sliced_layout("", (self.vocab_size,), 0, self.axis, tuple(self.bias.shape))
        }


class Pooler(nn.Module):
    """Applies a linear and tanh to the first token of each row.

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
            axis: ranks that hold the linear.
            sequence_parallel: whether tokens are split over ``axis``.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.dense = ReplicatedLinear(
            hidden_size, hidden_size, bias=True, axis=axis, device=device, dtype=dtype
        )

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "B D"]:
        """Return tanh(linear(first token)) of each row; all-reduces under sequence parallelism.

        Args:
            x: hidden states; the first tensor rank has the first token.
        """
        first = x[0]
        if self.sequence_parallel:
            # A sum in which the other ranks add 0 broadcasts rank 0's token with a gradient.
            first = reduce_from(first if self.axis.rank == 0 else first * 0.0, self.axis)
        return torch.tanh(self.dense(first))


class OutputBias(nn.Module):
    """A bias for each token of a tied head, split over the tensor ranks."""

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, axis: Axis, **factory_kwargs: Any
    ) -> None:
        """Allocate this rank's part, with zeros."""
        super().__init__()
        self.vocab_size, self.axis = vocab_size, axis
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size // axis.size, **factory_kwargs))

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the bias."""
        return {
            "bias": sliced_layout("", (self.vocab_size,), 0, self.axis, tuple(self.bias.shape))
        }
