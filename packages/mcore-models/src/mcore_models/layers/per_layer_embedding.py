"""Per-layer embeddings: every layer adds a small vector of the token to the stream.

One table stores a vector for each token and layer; a projection of the first layer's input is
added to the vector. A layer gates its vector by the stream, projects the result to D channels,
and adds the norm of the projection to the stream. The table is split by vocabulary over the
tensor ranks; the narrow matrices are replicated.

Reference:
    Gemma team 2025, Gemma 3n model card and developer guide: per-layer embeddings.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import build_norm
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.layers.residual import stream_cuts
from mcore_moe.activations import gelu_tanh
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab

_NO_INPUTS = BlockInputs()


class PerLayerEmbedding(nn.Module):
    """Maps tokens and the input of the first layer to a vector of P channels for each layer.

    Attributes:
        table: of vectors of all layers, ``[V, L*P]``, split by rows.
        proj: D to the channels of all layers.
        norm: of a layer's projected channels.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ctx: ParallelContext,
        vocab_size: int,
        *,
        vocab_split: dict[str, Any],
        **factory_kwargs: Any,
    ) -> None:
        """Allocate this rank's share; matrices are zero until the model fills them.

        Args:
            config: of the model.
            ctx: the layout.
            vocab_size: true number of tokens.
            vocab_split: keyword arguments of modules that hold rows of the vocabulary.
            factory_kwargs: device and dtype.
        """
        super().__init__()
        cuts = stream_cuts(ctx)
        self.width, D = config.per_layer_embedding_size, config.hidden_size
        channels = config.num_layers * self.width
        self.num_rows = config.per_layer_embedding_vocab_size or vocab_size
        padded = padded_vocab(self.num_rows, config.make_vocab_size_divisible_by, ctx.tp.size)
        vocab_split = vocab_split | {"padded_vocab_size": padded}
        self.table = VocabParallelEmbedding(
            self.num_rows, channels, **vocab_split, **factory_kwargs
        )
        self.proj = ReplicatedLinear(
            D, channels, axis=ctx.tp, sequence_parallel=cuts.size > 1, **factory_kwargs
        )
        self.norm = build_norm(
            config, self.width, replicas=ctx.tp, partial=cuts, **factory_kwargs
        )

    def forward(
        self, tokens: Int[Tensor, "B S"], x: Float[Tensor, "s B D"]
    ) -> Float[Tensor, "s B L P"]:
        """Return each layer's vector of every token; communicates like the main embedding.

        Args:
            tokens: ids.
            x: embeddings of the tokens, the input of the first layer.
        """
        # The factor is rounded to the model's dtype, like the factor of the main embedding.
        factor = torch.tensor(math.sqrt(self.width), dtype=x.dtype).item()
        rows = tokens.where(tokens < self.num_rows, 0)
        looked_up = (self.table(rows) * factor).unflatten(-1, (-1, self.width))
        projected = self.proj(x) * x.shape[-1] ** -0.5
        normed = self.norm(projected.unflatten(-1, (-1, self.width)))
        return (normed + looked_up) * 2**-0.5


class LayerInput(nn.Module):
    """Adds a layer's own vector of each token to the stream, gated by the stream.

    Attributes:
        gate: D to P.
        proj: P to D.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the matrices, zero until the model fills them."""
        super().__init__()
        D, P = setup.config.hidden_size, setup.config.per_layer_embedding_size
        self.layer = setup.layer
        options: dict[str, Any] = {"axis": setup.ctx.tp, **setup.factory_kwargs}
        options["sequence_parallel"] = setup.sequence_parallel
        self.gate = ReplicatedLinear(D, P, **options)
        self.proj = ReplicatedLinear(P, D, **options)

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Gate this layer's vectors by x and project them to D; no communication."""
        assert inputs.layer_inputs is not None, "the model must compute layer_inputs first"
        return self.proj(gelu_tanh(self.gate(x)) * inputs.layer_inputs[..., self.layer, :])
