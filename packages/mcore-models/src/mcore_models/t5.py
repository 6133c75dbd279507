"""T5: an encoder reads a text without some spans, a decoder predicts the spans.

The fields of ``T5Config`` choose Megatron's form or the published ones (1.0 and 1.1). Pipeline
stages hold the encoder's layers, then the decoder's. Each stage passes on both streams and,
with relative positions, the bias tables. The first stage embeds both inputs, so only the first
and the last stage have an embedding. Layers are named ``encoder.blocks.N`` and
``decoder.blocks.N``.

Raffel et al. 2019, arXiv:1910.10683.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.building.encoder_layouts import t5_layout_problems
from mcore_models.building.stage_model import StageModel, check_inputs
from mcore_models.encoder_config import T5Config, encoder_layers, num_stack_layers
from mcore_models.layers.encoder_decoder_block import MaskedBlock, MaskedInputs
from mcore_models.layers.heads import OutputBias
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_models.layers.position_embedding import PositionEmbedding
from mcore_models.layers.relative_bias import (
    RelativePositionBias,
    distance_buckets,
    position_scores,
)
from mcore_models.layers.residual import stream_norm
from mcore_models.logical_tensors import num_positions
from mcore_models.protocol import LABELS, LM_LOSS, LOSS_MASK, BatchEntry, MicroBatch, ModelState
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.pipeline_parallel.runner import Payload, PayloadShape
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.embedding import VocabParallelHead
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel

TEXT_ENC, TEXT_DEC, ENC_MASK = "text_enc", "text_dec", "enc_mask"
ENCODER, DECODER, TABLES = "encoder", "decoder", "relative_position_bias"
"""Payload entries between stages: both streams and the tables of relative positions."""
_DECODER_LENGTH = "decoder_seq_length"

Streams = Mapping[str, Tensor]
"""``encoder`` ``[S, B, D]`` and ``decoder`` ``[S', B, D]`` of this rank's tokens; with relative
positions ``relative_position_bias`` ``[2, buckets, n]``."""


class T5Stack(nn.Module):
    """One stage's part of the encoder or of the decoder.

    Attributes:
        relative_position_bias: on the first stage, with relative positions.
        blocks: layers by their number in the stack.
        final_norm: on the stage with the stack's last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias: RelativePositionBias | None = None
        self.blocks = nn.ModuleDict()
        self.final_norm: RMSNorm | LayerNorm | None = None


class T5(StageModel):
    """Maps the encoder's and the decoder's tokens to scores of the decoder's next tokens.

    Attributes:
        embedding, position_embedding: on the first stage; the last stage also holds the
            token embedding if the head is tied to it.
        encoder, decoder: this stage's part of each stack.
        head, lm_head: on the last stage: weight of an untied head, bias of a tied head.
    """

    config: T5Config
    layout_problems = staticmethod(t5_layout_problems)
    num_layers = staticmethod(num_stack_layers)
    entries = MappingProxyType(
        {
            TEXT_ENC: BatchEntry(),
            TEXT_DEC: BatchEntry(length=_DECODER_LENGTH),
            LABELS: BatchEntry(length=_DECODER_LENGTH),
            LOSS_MASK: BatchEntry(length=_DECODER_LENGTH),
            ENC_MASK: BatchEntry(is_cut=False),
        }
    )

    def build_parts(self, ctx: ParallelContext, setups: Sequence[LayerSetup]) -> None:
        """Allocate embeddings, both stacks and the head, see ``StageModel``."""
        config, layers, factory_kwargs = (
            self.config,
            self.stage.layers,
            setups[0].factory_kwargs,
        )
        self.is_relative = config.position_embedding_type == "relative"
        self.is_tied = not config.untie_embeddings_and_output_weights
        self._add_ends(ctx, factory_kwargs)
        depth = encoder_layers(config)
        self.encoder, self.decoder = T5Stack(), T5Stack()
        for layer in layers:
            is_decoder = layer >= depth
            stack = self.decoder if is_decoder else self.encoder
            stack.blocks[str(layer - depth * is_decoder)] = MaskedBlock(
                setups[layer],
                is_decoder=is_decoder,
                scale=None if config.scale_attention_scores else 1.0,
            )
        has_last = (depth - 1 in layers, self.stage.has_loss)
        for stack, has_norm in zip((self.encoder, self.decoder), has_last, strict=True):
            if self.stage.has_embedding and self.is_relative:
                stack.relative_position_bias = RelativePositionBias(
                    config.relative_attention_num_buckets,
                    config.num_attention_heads,
                    axis=self.tp,
                    **factory_kwargs,
                )
            if has_norm:
                stack.final_norm = stream_norm(config, ctx, **factory_kwargs)

    def _add_ends(self, ctx: ParallelContext, factory_kwargs: Mapping[str, Any]) -> None:
        """Allocate embeddings, and an untied head or the bias of a tied head."""
        config, stage = self.config, self.stage
        if stage.has_embedding or (stage.has_loss and self.is_tied):
            self.add_embedding(ctx.embedding_ends if self.is_tied else SINGLE, factory_kwargs)
        if stage.has_embedding and not self.is_relative:
            self.position_embedding = PositionEmbedding(
                num_positions(config),
                config.hidden_size,
                offset=config.position_embedding_offset,
                **self.split(),
                **factory_kwargs,
            )
        if stage.has_loss and not self.is_tied:
            self.head = VocabParallelHead(
                config.hidden_size, self.vocab_size, **self.vocab_split(), **factory_kwargs
            )
        if stage.has_loss and self.is_tied and config.add_output_bias:
            self.lm_head = OutputBias(
                self.vocab_size, self.padded_vocab_size, axis=self.tp, **factory_kwargs
            )

    def forward(
        self,
        x: Streams | tuple[Int[Tensor, "B Q"], Int[Tensor, "B R"]],
        encoder_mask: Int[Tensor, "B S"] | None = None,
    ) -> Streams:
        """Run this stage's layers on both inputs, or on the previous stage's streams.

        Args:
            x: on the first stage token ids of encoder and decoder, split over context ranks;
                on others the output of the previous stage.
            encoder_mask: 1 for tokens of the encoder, 0 for padding, complete rows on every
                context rank; None: no padding.

        Returns:
            Both streams; on the last stage the decoder's stream is the input of the head.

        Raises:
            ValueError: if a sequence is longer than the model's positions, or does not divide
                over the tensor ranks.
        """
        streams = dict(x) if isinstance(x, Mapping) else self._embed(*x)
        visible_keys = None
        if encoder_mask is not None:
            visible_keys = (encoder_mask > 0)[:, None, None, :]  # [B, Z] -> [B, 1, 1, Z]
        if self.encoder.blocks:
            inputs = MaskedInputs(mask=self._mask(streams, 0, visible_keys))
            streams[ENCODER] = self._run(self.encoder, streams[ENCODER], inputs)
        if self.decoder.blocks:
            inputs = MaskedInputs(
                mask=self._mask(streams, 1, None),
                memory=streams[ENCODER],
                memory_mask=visible_keys,
            )
            streams[DECODER] = self._run(self.decoder, streams[DECODER], inputs)
        elif self.decoder.final_norm is not None:  # a last stage without layers
            streams[DECODER] = self.decoder.final_norm(streams[DECODER])
        if self.stage.has_loss:
            streams[DECODER] = self._scaled(streams[DECODER])
        return streams

    def read(
        self, texts: Int[Tensor, "B S"], mask: Int[Tensor, "B S"] | None = None
    ) -> Streams:
        """Run the encoder of an unsplit model.

        Args:
            texts: token ids.
            mask: 1 for tokens, 0 for padding; None: no padding.

        Returns:
            The encoder's stream and the tables, the input of ``write``.

        Raises:
            ValueError: if texts are longer than the model's positions.
        """
        streams = self._tables() | {ENCODER: self._embedded(texts, "--seq-length")}
        visible_keys = None if mask is None else (mask > 0)[:, None, None, :]
        inputs = MaskedInputs(mask=self._mask(streams, 0, visible_keys))
        return {**streams, ENCODER: self._run(self.encoder, streams[ENCODER], inputs)}

    def write(
        self,
        tokens: Int[Tensor, "B R"],
        texts: Streams,
        mask: Int[Tensor, "B S"] | None,
        state: ModelState,
    ) -> Float[Tensor, "R B D"]:
        """Run the decoder of an unsplit model on the next tokens.

        Args:
            tokens: the tokens after those in the state.
            texts: output of ``read``.
            mask: the mask given to ``read``.
            state: keys and values of earlier tokens and of the texts; keys and values of
                ``tokens`` are appended.
        """
        x = self._embedded(tokens, "--decoder-seq-length", state.length)
        visible_keys = None if mask is None else (mask > 0)[:, None, None, :]
        inputs = MaskedInputs(
            mask=self._mask({**texts, DECODER: x}, 1, None, state),
            memory=texts[ENCODER],
            memory_mask=visible_keys,
            state=state,
        )
        return self._scaled(self._run(self.decoder, x, inputs))

    def _scaled(self, hidden: Tensor) -> Tensor:
        factor = self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else 1.0
        return hidden if factor == 1.0 else hidden * factor

    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Return the scores of this rank's slice of the vocabulary, padding included.

        Gathers the sequence under sequence parallelism.

        Args:
            hidden: the decoder's stream of ``forward`` on the last stage.
        """
        weight = self.embedding.weight if self.is_tied else self.head.weight
        bias = self.lm_head.bias if hasattr(self, "lm_head") else None
        return column_parallel(hidden, weight, bias, self.tp, self.sequence_parallel)

    @property
    def read_entries(self) -> frozenset[str]:
        """The encoder's mask on every stage; texts on the first, labels on the last."""
        names = {ENC_MASK}
        names |= {TEXT_ENC, TEXT_DEC} if self.stage.has_embedding else set()
        names |= {LABELS, LOSS_MASK} if self.stage.has_loss else set()
        return frozenset(names)

    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run ``forward`` on the batch, or on the streams of the previous stage."""
        x: Any = (batch[TEXT_ENC], batch[TEXT_DEC]) if received is None else received
        streams = self(x, batch[ENC_MASK])
        hidden = streams[DECODER]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        aux = torch.zeros((), dtype=wide, device=hidden.device)
        return (hidden if self.stage.has_loss else streams), aux

    def payload_shape(self, batch: MicroBatch, _sender: int, num_cuts: int, /) -> PayloadShape:
        """Return the shapes of both streams and of the tables, the same for all stages."""
        config, shapes = self.config, {}
        for stream, text in ((ENCODER, TEXT_ENC), (DECODER, TEXT_DEC)):
            num_rows, length = batch[text].shape
            shapes[stream] = (length // num_cuts, num_rows, config.hidden_size)
        if self.is_relative:
            heads = config.num_attention_heads // self.tp.size
            shapes[TABLES] = (2, config.relative_attention_num_buckets, heads)
        return shapes

    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the mask of the decoder's real tokens."""
        return {LM_LOSS: batch[LOSS_MASK]}

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the cross-entropy of every position of the decoder ``[B, S/cp]``."""
        assert isinstance(output, Tensor)
        losses = vocab_parallel_cross_entropy(
            self.logits(output),
            batch[LABELS].clamp(min=0).t(),
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            axis=self.tp,
        )
        return {LM_LOSS: losses.t()}

    def _run(self, stack: T5Stack, x: Tensor, inputs: MaskedInputs) -> Tensor:
        blocks = list(stack.blocks.values())
        stream = self.run_blocks(blocks, x, inputs, self.training)
        if stack.final_norm is not None:
            return stream.normed(stack.final_norm)[0]
        return stream.total()

    def _embed(self, encoder_ids: Tensor, decoder_ids: Tensor) -> dict[str, Tensor]:
        streams = {ENCODER: self._embedded(encoder_ids, "--seq-length")}
        streams[DECODER] = self._embedded(decoder_ids, "--decoder-seq-length")
        return streams | self._tables()

    def _embedded(self, ids: Tensor, flag: str, begin: int = 0) -> Tensor:
        size, axes = (ids.shape[0], begin + ids.shape[1]), (self.cp, self.cuts)
        check_inputs(size, config=self.config, axes=axes, flag=flag)
        x = self.embedding(ids)
        if not self.is_relative:
            x = x + self.position_embedding(
                self.local_positions(ids.shape[1], ids.device) + begin
            )
        return self.dropout(x)

    def _tables(self) -> dict[str, Tensor]:
        if not self.is_relative:
            return {}
        tables = [stack.relative_position_bias for stack in (self.encoder, self.decoder)]
        return {TABLES: torch.stack([table.weight for table in tables if table is not None])}

    def _mask(
        self,
        streams: Streams,
        number: int,
        visible_keys: Tensor | None,
        state: ModelState | None = None,
    ) -> Shaped[Tensor, "b n q Z"] | None:
        """Return the mask of self-attention in a stack: 0 the encoder, 1 the decoder.

        With relative positions the mask is the bias on scores, -inf for hidden keys.
        """
        x = streams[(ENCODER, DECODER)[number]]
        num_tokens = x.shape[0] * self.cuts.size
        is_decoder = number == 1
        begin, is_plain = state.length if state else 0, state is None and not self.is_relative
        if is_plain and (visible_keys is not None or self.cp.size == 1):
            return visible_keys  # None in a decoder: causal attention needs no mask
        queries = self.local_positions(num_tokens, x.device) + begin
        keys = torch.arange(begin + num_tokens * self.cp.size, device=x.device)
        visible = visible_keys
        if is_decoder:
            visible = (keys[None, :] <= queries[:, None])[None, None]
        if not self.is_relative:
            return visible
        buckets = distance_buckets(
            queries,
            keys,
            both_sides=not is_decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        scores = position_scores(streams[TABLES][number], buckets)
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
