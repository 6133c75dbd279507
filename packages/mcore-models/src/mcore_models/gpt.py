"""GPT: a decoder-only language model, complete or one pipeline stage of it.

The context passed to the constructor determines the layout. Blocks are keyed by global layer
number, so that names are the same on every stage. ``forward`` returns the hidden state and the
auxiliary losses, a second root of backward. On the last stage ``logits``, ``token_losses`` and
``loss`` compute scores and losses from the hidden state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.building.mtp_model import MTP_TOKENS, MTPLanguageModel
from mcore_models.building.stage_model import StageModel, check_inputs
from mcore_models.kernels.batch_invariant import BatchInvariantGemm, token_log_probs
from mcore_models.layers.altup import StreamProjections
from mcore_models.layers.block import build_block
from mcore_models.layers.block_inputs import build_inputs
from mcore_models.layers.heads import OutputBias
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.mtp import PredictionLayer
from mcore_models.layers.per_layer_embedding import PerLayerEmbedding
from mcore_models.layers.position_embedding import PositionEmbedding
from mcore_models.layers.residual import Residual, stream_norm
from mcore_models.logical_tensors import further_mixers, num_positions
from mcore_models.mup import embedding_factor, logits_factor
from mcore_models.protocol import MicroBatch, ModelState
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.embedding import VocabParallelHead
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel
from mcore_parallel.tensor_parallel.linear_cross_entropy import linear_cross_entropy


class GPT(StageModel, MTPLanguageModel):
    """Maps token ids to next-token scores.

    Attributes:
        embedding: on the first stage; with a tied head also on the last stage, and with
            ``mtp`` on the stage of ``mtp``.
        position_embedding: learned positions, on the first stage.
        embedding_norm: norm of the embeddings, on the first stage.
        per_layer_embedding: vectors that the layers add, on the first stage.
        altup_projections: compute further residual streams, on the first stage.
        altup_unembed_projections: merge the residual streams, on the last stage.
        blocks: this stage's layers by global number; wrappers apply to them.
        final_norm: on the last stage, or on the stage of ``mtp``.
        head: on the last stage, unless tied.
        lm_head: bias of the head, on the last stage.
        head_gemm: GEMM with the head's weight in ``logits``.
        mtp: ``mtp_num_layers`` layers that predict further tokens, on the last stage or on the
            stage that a pipeline layout assigns.
    """

    def build_parts(self, ctx: ParallelContext, setups: Sequence[LayerSetup]) -> None:
        """Allocate embeddings, layers, norm and head, see ``StageModel``."""
        config, stage, factory_kwargs = self.config, self.stage, setups[0].factory_kwargs
        self.add_further_losses()
        self._add_embeddings(ctx, factory_kwargs)
        self.blocks = nn.ModuleDict(
            {str(layer): build_block(setups[layer]) for layer in stage.layers}
        )
        if self.is_normed:
            self.final_norm = stream_norm(config, ctx, **factory_kwargs)
            if config.altup_num_inputs:
                self.altup_unembed_projections = StreamProjections(
                    config, ctx, **factory_kwargs
                )
        self.head_gemm: Gemm = PLAIN_GEMM
        if stage.has_loss and config.untie_embeddings_and_output_weights:
            self.head = VocabParallelHead(
                config.hidden_size, self.vocab_size, **self.vocab_split(), **factory_kwargs
            )
        if stage.has_loss and config.add_output_bias:
            self.lm_head = OutputBias(
                self.vocab_size, self.padded_vocab_size, self.tp, **factory_kwargs
            )
        mixers = further_mixers(config, setups[0].moe)
        self.mtp = nn.ModuleList(
            PredictionLayer(config, ctx, build_block(setup, mixers), **factory_kwargs)
            for setup in (setups[config.num_layers :] if stage.has_mtp else ())
        )

    def _add_embeddings(self, ctx: ParallelContext, factory_kwargs: Mapping[str, Any]) -> None:
        """Allocate the embedding on stages that embed tokens or share it with a tied head."""
        config, stage = self.config, self.stage
        is_tied = not config.untie_embeddings_and_output_weights
        has_copy = (stage.has_loss and is_tied) or self.predicts_further
        is_apart = ctx.pp.size > 1 and not stage.has_embedding and stage.rank != 0
        if has_copy and is_apart and ctx.embedding_ends.size == 1:
            raise ValueError(
                f"stage {stage.index} shares the embedding: add its pipeline rank to the "
                "embedding_stages of ParallelContext.build."
            )
        if stage.has_embedding or has_copy:
            is_tied = is_tied or config.mtp_num_layers > 0
            self.add_embedding(ctx.embedding_ends if is_tied else SINGLE, factory_kwargs)
        if stage.has_embedding and config.position_embedding_type == "learned_absolute":
            self.position_embedding = PositionEmbedding(
                num_positions(config),
                config.hidden_size,
                offset=config.position_embedding_offset,
                **self.split(),
                **factory_kwargs,
            )
        if stage.has_embedding and config.embedding_layernorm:
            self.embedding_norm = stream_norm(config, ctx, **factory_kwargs)
        if stage.has_embedding and config.per_layer_embedding_size:
            split = self.vocab_split()
            self.per_layer_embedding = PerLayerEmbedding(
                config, ctx, self.vocab_size, vocab_split=split, **factory_kwargs
            )
        if stage.has_embedding and config.altup_num_inputs:
            self.altup_projections = StreamProjections(config, ctx, **factory_kwargs)

    def forward(
        self,
        x: Shaped[Tensor, "..."],
        positions: Int[Tensor, "*B S"] | None = None,
        state: ModelState | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "s B D"], Float[Tensor, ""]]:
        """Run this stage's layers on tokens, or on the previous stage's hidden state.

        Args:
            x: token ids ``[B, S/cp]`` on the first stage; on others the previous stage's hidden
                state ``[S/cp, B, C]`` (``[S/cp/tp, B, C]`` under sequence parallelism), with C
                channels by ``payload_width``: residual streams and per-layer embeddings.
            positions: of the tokens, ``[S/cp]`` or ``[B, S/cp]``; None: counted from 0, or from
                the state's length, in the zigzag order of ``cp``. Required only if positions
                restart inside a row.
            state: of earlier tokens in the layers; these tokens are appended.
            documents: packed in the rows; they do not attend to each other. Positions continue
                across documents unless given.

        Returns:
            The hidden state, normed on stages with ``final_norm``, and this stage's auxiliary
            losses (including their coefficients; 0 without experts).

        Raises:
            ValueError: if the sequence is longer than the model's positions, a state is given
                under context parallelism or with documents, or the documents do not fit the
                rows.
        """
        rows, num_tokens = x.shape[:2]
        if not self.stage.has_embedding:  # a hidden state
            rows, num_tokens = num_tokens, rows * self.cuts.size
        # With both a state and positions, the owner of the state checks the length.
        is_counted = state is None or positions is None
        length = check_inputs(
            (rows, num_tokens),
            state,
            documents,
            config=self.config,
            axes=(self.cp, self.cuts),
            is_counted=is_counted,
        )
        positions = self._positions(positions, num_tokens, state, x.device)
        layer_inputs, depth = None, self.config.num_layers
        width = depth * self.config.per_layer_embedding_size
        if self.stage.has_embedding:
            tokens, x = x, self.embedded(x, positions)
            if width:
                layer_inputs = self.per_layer_embedding(tokens, x)
            if self.config.altup_num_inputs:
                x = self.altup_projections.split(x)
        elif width:
            x, vectors = x.split((x.shape[-1] - width, width), -1)
            layer_inputs = vectors.unflatten(-1, (depth, -1))
        inputs = build_inputs(self.config, positions, length, x.dtype, documents, state)
        inputs = replace(inputs, layer_inputs=layer_inputs)
        blocks = list(self.blocks.values())
        stream = self.run_blocks(blocks, x, inputs, self.training and state is None)
        if not self.is_normed:
            hidden = stream.total()
            if layer_inputs is not None:
                hidden = torch.cat([hidden, layer_inputs.flatten(-2)], -1)
            return hidden, stream.aux
        if self.config.altup_num_inputs:
            merged = self.altup_unembed_projections.merge(stream.total())
            stream = Residual(merged, None, stream.aux)
        return stream.normed(self.final_norm)[0], stream.aux

    def further_hidden(
        self, hidden: Float[Tensor, "s B D"], batch: MicroBatch
    ) -> tuple[list[Float[Tensor, "s B D"]], Float[Tensor, ""]]:
        """Run the layers that predict further tokens, see ``MTPLanguageModel``."""
        tokens = batch[MTP_TOKENS]
        positions = self._positions(batch.positions, tokens.shape[1], None, hidden.device)
        length = tokens.shape[1] * self.cp.size
        inputs = build_inputs(self.config, positions, length, hidden.dtype, batch.documents)

        def run(block: nn.Module, x: Tensor) -> Residual:
            return self.run_blocks([block], x, inputs, self.training)

        states, total = [], torch.zeros((), device=hidden.device)
        for depth, layer in enumerate(self.mtp):
            hidden, aux = layer(hidden, self.embedded(tokens[..., depth], positions), run)
            states.append(hidden)
            total = total + aux
        return states, total

    def draft_hidden(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, state: ModelState
    ) -> Tensor:
        """Run the first layer that predicts further tokens, see ``MTPLanguageModel``."""
        positions = self._positions(positions, tokens.shape[1], state, hidden.device)
        length = tokens.shape[1]
        inputs = build_inputs(self.config, positions, length, hidden.dtype, None, state)
        return self.mtp[0](
            hidden,
            self.embedded(tokens, positions),
            lambda block, x: self.run_blocks([block], x, inputs, is_trained=False),
        )[0]

    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Return the scores of this rank's slice of the vocabulary; padding has zeros.

        Gathers the sequence under sequence parallelism.

        Args:
            hidden: of ``forward`` on the last stage.
        """
        split = self.tp, self.sequence_parallel
        scores = column_parallel(
            self._scaled(hidden),
            self.output_weight,
            self.lm_head.bias if self.config.add_output_bias else None,
            *split,
            self.head_gemm,
        )
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(scores / cap) if cap else scores

    def token_losses(
        self,
        hidden: Float[Tensor, "s B D"],
        labels: Int[Tensor, "B S"],
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, "B S"]:
        """Return the cross-entropy of every token, float32 or wider, differentiable.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: next token of every token.
            label_smoothing: share of the target spread over the vocabulary.
        """
        if isinstance(self.head_gemm, BatchInvariantGemm) and not label_smoothing:
            # Bitwise equal to the engine's log probabilities; there is one tensor rank.
            scores = self.logits(hidden)[..., : self.vocab_size]
            return -token_log_probs(scores, labels.t()).t()
        return vocab_parallel_cross_entropy(
            self.logits(hidden),
            labels.t(),  # [B, S] -> [S, B]
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            axis=self.tp,
            label_smoothing=label_smoothing,
        ).t()

    def loss(
        self,
        hidden: Float[Tensor, "s B D"],
        labels: Int[Tensor, "B S"],
        weights: Float[Tensor, "B S"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B S"]]:
        """Return the weighted sum of token losses; full logits are never in memory.

        Includes the label smoothing and the z-loss of the config; ``token_losses``, used for
        evaluation, does not. The sum must be a root of backward. A head with a bias computes
        all logits at once.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: next token of every token.
            weights: of the token losses: mask divided by the global count of valid tokens.

        Returns:
            The sum, and every token's loss without a gradient.
        """
        if self.config.add_output_bias:
            losses = self.token_losses(hidden, labels, self.config.label_smoothing)
            return (losses * weights).sum(), losses.detach()
        return linear_cross_entropy(
            self._scaled(hidden),
            self.output_weight,
            labels,
            weights,
            vocab_size=self.vocab_size,
            axis=self.tp,
            sequence_parallel=self.sequence_parallel,
            label_smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss_coeff,
            softcap=self.config.final_logit_softcapping,
        )

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return the head's input times the config's and muP's factor on logits."""
        return hidden * factor if (factor := logits_factor(self.config)) != 1 else hidden

    @property
    def output_weight(self) -> Float[Tensor, "v D"]:
        """This rank's rows of the head's weight; with a tied head, of the embedding's."""
        is_untied = self.config.untie_embeddings_and_output_weights
        return self.head.weight if is_untied else self.embedding.weight

    def embedded(
        self, tokens: Int[Tensor, "B S"], positions: Int[Tensor, "*B S"]
    ) -> Float[Tensor, "s B D"]:
        """Return the input of the first layer from token ids and positions."""
        x = self.embedding(tokens)
        if (factor := embedding_factor(self.config)) != 1.0:
            # The factor is rounded to the model's dtype, as in published models.
            x = x * torch.tensor(factor, dtype=x.dtype).item()
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.position_embedding(positions)
        if self.config.embedding_layernorm:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def _positions(
        self,
        positions: Tensor | None,
        num_tokens: int,
        state: ModelState | None,
        device: torch.device,
    ) -> Tensor:
        """Return the tokens' positions, counting them if they are not given."""
        if positions is not None:
            # Fused kernels require rotary tables without a batch dimension.
            return positions[0] if positions.dim() == 2 and len(positions) == 1 else positions
        if state is not None:
            return torch.arange(state.length, state.length + num_tokens, device=device)
        return self.local_positions(num_tokens, device)
