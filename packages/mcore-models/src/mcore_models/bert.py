"""BERT: an encoder that predicts masked tokens, and the order of two segments.

Norms precede attention and MLP (Megatron) or follow them (as published): see ``BertConfig``.
Every token attends to all tokens of its row except padding. Context ranks split rows in the
zigzag order of a GPT, and every rank gathers keys and values.

Devlin et al. 2018, arXiv:1810.04805.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.building.encoder_layouts import encoder_layout_problems
from mcore_models.building.stage_model import StageModel, check_inputs
from mcore_models.encoder_config import BertConfig
from mcore_models.layers.encoder_decoder_block import MaskedBlock, MaskedInputs
from mcore_models.layers.heads import MaskedTokenHead, Pooler
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.position_embedding import PositionEmbedding
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.layers.residual import stream_norm
from mcore_models.layers.rope import build_local_rotary, build_rotary
from mcore_models.logical_tensors import num_positions
from mcore_models.protocol import LABELS, LM_LOSS, LOSS_MASK, BatchEntry, MicroBatch
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.pipeline_parallel.runner import Payload, PayloadShape
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel

TEXT, TYPES, PADDING_MASK, IS_RANDOM = "text", "types", "padding_mask", "is_random"
ROW_MASK = "row_mask"
"""Entry added by ``prepare``: 1 for rows with a masked token; only these count in the loss."""
SOP_LOSS = "sop loss"
"""Name of the loss of the segments' order, as in Megatron's log."""


class BERT(StageModel):
    """Predicts masked tokens from token ids.

    Attributes:
        embedding, position_embedding, tokentype_embedding: on the first stage; ``embedding``
            also on the last stage, as the head's weight.
        embedding_norm: on the first stage, with ``post_layer_norm`` or
            ``embedding_layernorm``.
        blocks: this stage's layers by global number.
        final_norm: on the last stage, without ``post_layer_norm``.
        lm_head, pooler, binary_head: on the last stage, by ``bert_heads``.
    """

    config: BertConfig
    layout_problems = staticmethod(encoder_layout_problems)
    entries = MappingProxyType(
        {
            TEXT: BatchEntry(),
            TYPES: BatchEntry(),
            LABELS: BatchEntry(),
            LOSS_MASK: BatchEntry(),
            PADDING_MASK: BatchEntry(is_cut=False),
            IS_RANDOM: BatchEntry(length=""),
            ROW_MASK: BatchEntry(length="", is_derived=True),
        }
    )

    def build_parts(self, ctx: ParallelContext, setups: Sequence[LayerSetup]) -> None:
        """Allocate embeddings, layers and heads, see ``StageModel``."""
        config, factory_kwargs = self.config, setups[0].factory_kwargs
        self.has_binary = "binary" in config.bert_heads
        self.loss_coefficients = {LM_LOSS: 1.0} | ({SOP_LOSS: 1.0} if self.has_binary else {})
        self._add_embeddings(ctx, factory_kwargs)
        self.blocks = nn.ModuleDict()
        for layer in self.stage.layers:
            block = MaskedBlock(setups[layer], post_norm=config.post_layer_norm)
            self.blocks[str(layer)] = block
        self._add_heads(ctx, factory_kwargs)

    def _add_embeddings(self, ctx: ParallelContext, factory_kwargs: Mapping[str, Any]) -> None:
        config, stage = self.config, self.stage
        has_head = "lm" in config.bert_heads
        if stage.has_embedding or (stage.has_loss and has_head):
            self.add_embedding(ctx.embedding_ends if has_head else SINGLE, factory_kwargs)
        if not stage.has_embedding:
            return
        table: dict[str, Any] = {**self.split(), **factory_kwargs}
        if config.position_embedding_type == "learned_absolute":
            self.position_embedding = PositionEmbedding(
                num_positions(config),
                config.hidden_size,
                offset=config.position_embedding_offset,
                **table,
            )
        if config.num_tokentypes:
            self.tokentype_embedding = PositionEmbedding(
                config.num_tokentypes, config.hidden_size, **table
            )
        if config.post_layer_norm or config.embedding_layernorm:
            self.embedding_norm = stream_norm(config, ctx, **factory_kwargs)

    def _add_heads(self, ctx: ParallelContext, factory_kwargs: Mapping[str, Any]) -> None:
        config, heads = self.config, self.config.bert_heads
        if not self.stage.has_loss:
            return
        if not config.post_layer_norm:
            self.final_norm = stream_norm(config, ctx, **factory_kwargs)
        if "lm" in heads:
            self.lm_head = MaskedTokenHead(
                config,
                self.vocab_size,
                self.padded_vocab_size,
                **self.split(),
                **factory_kwargs,
            )
        if "pooler" in heads:
            self.pooler = Pooler(config.hidden_size, **self.split(), **factory_kwargs)
        if self.has_binary:
            self.binary_head = ReplicatedLinear(
                config.hidden_size, 2, bias=True, axis=self.tp, **factory_kwargs
            )

    def forward(
        self,
        x: Shaped[Tensor, "..."],
        types: Int[Tensor, "B Q"] | None = None,
        padding_mask: Int[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "s B D"]:
        """Run this stage's layers on tokens, or on the previous stage's hidden state.

        Args:
            x: token ids ``[B, S/cp]`` on the first stage; on others the previous stage's hidden
                state ``[S/cp, B, D]`` (``[S/cp/tp, B, D]`` under sequence parallelism).
            types: segment of each token; None: all tokens are in the first segment. Read on the
                first stage only.
            padding_mask: 1 for tokens, 0 for padding, of complete rows; None: no padding.

        Returns:
            The hidden state; on the last stage the input of the heads.

        Raises:
            ValueError: if the sequence is longer than the model's positions, or cannot be split
                over the tensor ranks.
        """
        num_tokens = x.shape[1] if self.stage.has_embedding else x.shape[0] * self.cuts.size
        if self.stage.has_embedding:
            check_inputs(
                (x.shape[0], x.shape[1]), config=self.config, axes=(self.cp, self.cuts)
            )
            x = self._embed(x, types)
        mask = None
        if padding_mask is not None:
            mask = (padding_mask > 0)[:, None, None, :]  # [B, Z] -> [B, 1, 1, Z]
        blocks, inputs = list(self.blocks.values()), self._inputs(mask, num_tokens, x)
        stream = self.run_blocks(blocks, x, inputs, self.training)
        if self.stage.has_loss and not self.config.post_layer_norm:
            return stream.normed(self.final_norm)[0]
        return stream.total()

    def _inputs(self, mask: Tensor | None, num_tokens: int, x: Tensor) -> MaskedInputs:
        """Return masks and rotary tables of the blocks for this context rank's tokens."""
        config = self.config
        positions = self.local_positions(num_tokens, x.device)
        local_mask = mask
        if (span := config.window_size[0]) >= 0:
            keys = torch.arange(num_tokens * self.cp.size, device=x.device)
            # Keys are gathered in the order of the sequence: [S/cp, Z] -> [1, 1, S/cp, Z].
            distance = (positions[:, None] - keys).abs()[None, None]
            # A padding token attends at least to itself: a softmax without keys is NaN.
            local_mask = (distance <= span) & (True if mask is None else mask | (distance == 0))
        return MaskedInputs(
            mask=mask,
            rotary=build_rotary(config, positions, x.dtype),
            local_mask=local_mask,
            local_rotary=build_local_rotary(config, positions, x.dtype),
        )

    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Return every position's scores of this rank's slice of the vocabulary, with padding.

        Gathers the sequence under sequence parallelism.

        Args:
            hidden: of ``forward`` on the last stage.
        """
        return column_parallel(
            self.lm_head(hidden),
            self.embedding.weight,
            self.lm_head.bias,
            self.tp,
            self.sequence_parallel,
        )

    def binary_logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "B 2"]:
        """Return each row's scores of segments in order (0) and swapped (1).

        Args:
            hidden: of ``forward`` on the last stage, of the first context rank.
        """
        return self.binary_head(self.pooler(hidden))

    @property
    def read_entries(self) -> frozenset[str]:
        """The padding mask on every stage; tokens on the first, labels on the last."""
        names = {PADDING_MASK}
        if self.stage.has_embedding:
            names |= {TEXT} | ({TYPES} if self.config.num_tokentypes > 1 else set())
        if self.stage.has_loss:
            names |= {LABELS, LOSS_MASK}
            names |= {IS_RANDOM, ROW_MASK} if self.has_binary else set()
        return frozenset(names)

    def prepare(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with ``ROW_MASK``: 1 for rows with a masked token."""
        if LOSS_MASK not in batch:
            return batch
        return {**batch, ROW_MASK: (batch[LOSS_MASK] > 0).any(1).to(batch[LOSS_MASK].dtype)}

    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run ``forward`` on the batch, or on the hidden state of the previous stage."""
        x = batch[TEXT] if received is None else received
        assert isinstance(x, Tensor)
        has_types = received is None and self.config.num_tokentypes > 1
        hidden = self(x, batch[TYPES] if has_types else None, batch[PADDING_MASK])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden, torch.zeros((), dtype=wide, device=hidden.device)

    def payload_shape(self, batch: MicroBatch, _sender: int, num_cuts: int, /) -> PayloadShape:
        """Return the shape of a hidden state, the same for all stages."""
        num_rows, length = batch[TEXT].shape
        return length // num_cuts, num_rows, self.config.hidden_size

    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return masks of tokens and of rows; only the first context rank counts rows."""
        masks = {LM_LOSS: batch[LOSS_MASK]}
        if self.has_binary:
            masks[SOP_LOSS] = batch[ROW_MASK] * float(self.cp.rank == 0)
        return masks

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the cross-entropy of every position ``[B, S/cp]`` and of every row ``[B]``."""
        assert isinstance(output, Tensor)
        losses = {
            LM_LOSS: vocab_parallel_cross_entropy(
                self.logits(output),
                batch[LABELS].clamp(min=0).t(),  # -1 where no token is masked: weight 0
                vocab_size=self.vocab_size,
                padded_vocab_size=self.padded_vocab_size,
                axis=self.tp,
            ).t()
        }
        if self.has_binary:
            scores = self.binary_logits(output)
            wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
            losses[SOP_LOSS] = F.cross_entropy(wide, batch[IS_RANDOM], reduction="none")
        return losses

    def _embed(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        num_tokens = tokens.shape[1]
        positions = self.local_positions(num_tokens, tokens.device)
        x = self.embedding(tokens)
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.position_embedding(positions)
        if self.config.num_tokentypes:
            types = torch.zeros_like(tokens) if types is None else types
            x = x + self.tokentype_embedding(types)
        if self.config.post_layer_norm or self.config.embedding_layernorm:
            x = self.embedding_norm(x)
        return self.dropout(x)
