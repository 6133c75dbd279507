"""GPT: a decoder-only language model, whole or one pipeline stage of it.

The model is plain torch inside and knows its layout only through the context it is given.
Blocks are keyed by global layer number, so names are the same on every stage. ``forward``
carries the residual stream; ``logits``, ``token_losses`` and ``loss`` are what the last
stage does with it. Auxiliary losses travel beside the stream, as a second root of backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig
from mcore_models.initialization import initialize_
from mcore_models.layers.block import TransformerBlock
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.norm import build_norm
from mcore_models.layers.position_embedding import PositionEmbedding
from mcore_models.layers.residual import Residual
from mcore_models.layers.rope import build_local_rotary, build_rotary, query_temperature
from mcore_models.layers.stack import block_groups
from mcore_models.layout_checks import check_layout, check_length
from mcore_models.protocol import LanguageModel, ModelState
from mcore_moe.config import MoEConfig
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_positions
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.recomputing import recompute
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    padded_vocab,
)
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel
from mcore_parallel.tensor_parallel.linear_cross_entropy import head_loss

_NO_EXPERTS = MoEConfig()
_KEEP_ALL = RecomputeConfig()
_ANY_KERNELS = KernelConfig()


class GPT(LanguageModel):
    """Token ids to next-token scores.

    Attributes:
        embedding: on the first stage, and on the last where the head is tied to it.
        position_embedding: learned positions, on the first stage.
        blocks: this stage's layers by global number; what wrappers work on.
        final_norm: on the last stage.
        head: on the last stage, unless tied.
        streams: random streams of dropout; their state belongs in a checkpoint.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ctx: ParallelContext,
        *,
        vocab_size: int,
        moe: MoEConfig = _NO_EXPERTS,
        stage: Stage | None = None,
        seed: int = 1234,
        recomputing: RecomputeConfig = _KEEP_ALL,
        kernels: KernelConfig = _ANY_KERNELS,
        gemms: Sequence[LinearGemms] = (),
        streams: RngStreams | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate this rank's share and fill it; talks to nobody.

        Args:
            config: shape and numerics of the layers.
            ctx: the layout.
            vocab_size: true number of tokens; tables are padded for the layout.
            moe: experts, none by default.
            stage: layers of a pipeline stage; None: all.
            seed: of the initial weights, equal on all ranks.
            recomputing: what backward computes again.
            kernels: which compute it.
            gemms: of every layer, by global number (``layer_gemms``); empty: of none but in
                the model's dtype.
            streams: of dropout; None: made from ``seed``. Chunks of one rank share one.
            device: of the parameters; None: that of ``ctx``.
            dtype: of the parameters and activations.

        Raises:
            ValueError: if the model does not fit the layout, or a kernel is not installed.
        """
        super().__init__()
        check_layout(config, ctx.config, moe)
        if stage is None:
            if ctx.pp.size > 1:
                raise ValueError(
                    f"--pipeline-model-parallel-size {ctx.pp.size}: give each rank its stage, "
                    "one of mcore_parallel.pipeline_parallel.stages.split_layers."
                )
            stage = Stage(0, range(config.num_layers), has_embedding=True, has_loss=True)
        self.config, self.vocab_size, self.stage = config, vocab_size, stage
        self.tp, self.cp = ctx.tp, ctx.cp
        self.sequence_parallel = ctx.config.sequence_parallel and ctx.tp.size > 1
        self.recomputing = recomputing
        self.streams = streams or RngStreams(seed, ctx)
        self.padded_vocab_size = padded_vocab(
            vocab_size, config.make_vocab_size_divisible_by, ctx.tp.size
        )
        placed: dict[str, Any] = {"device": device or ctx.device, "dtype": dtype}
        self._add_ends_before(ctx, placed)
        self.blocks = nn.ModuleDict(
            {
                str(layer): TransformerBlock(
                    config,
                    ctx,
                    layer,
                    streams=self.streams,
                    moe=moe,
                    recomputing=recomputing,
                    kernels=kernels,
                    gemms=gemms[layer] if gemms else PLAIN_GEMMS,
                    **placed,
                )
                for layer in stage.layers
            }
        )
        self._add_ends_after(placed)
        initialize_(self, config, seed)

    def _add_ends_before(self, ctx: ParallelContext, placed: dict[str, Any]) -> None:
        """Make the embedding where this stage has one, or is tied to one."""
        config, is_tied = self.config, not self.config.untie_embeddings_and_output_weights
        split: dict[str, Any] = {
            "axis": self.tp,
            "sequence_parallel": self.sequence_parallel,
            **placed,
        }
        if self.stage.has_embedding or (self.stage.has_loss and is_tied):
            self.embedding = VocabParallelEmbedding(
                self.vocab_size,
                config.hidden_size,
                padded_vocab_size=self.padded_vocab_size,
                tied=ctx.embedding_ends if is_tied else SINGLE,
                init_std=0.0,
                **split,
            )
        if self.stage.has_embedding and config.position_embedding_type == "learned_absolute":
            self.position_embedding = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, **split
            )
        stream = "tensor_parallel" if self.sequence_parallel else "replicated"
        self.dropout = StreamDropout(config.hidden_dropout, self.streams, stream)

    def _add_ends_after(self, placed: dict[str, Any]) -> None:
        """Make the last norm and the head where this stage has the loss."""
        if not self.stage.has_loss:
            return
        self.final_norm = build_norm(
            self.config,
            self.config.hidden_size,
            replicas=self.tp,
            partial=self.tp if self.sequence_parallel else SINGLE,
            **placed,
        )
        if self.config.untie_embeddings_and_output_weights:
            self.head = VocabParallelHead(
                self.config.hidden_size,
                self.vocab_size,
                padded_vocab_size=self.padded_vocab_size,
                axis=self.tp,
                sequence_parallel=self.sequence_parallel,
                init_std=0.0,
                **placed,
            )

    def forward(
        self,
        x: Shaped[Tensor, "..."],
        positions: Int[Tensor, "*B S"] | None = None,
        state: ModelState | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "s B D"], Float[Tensor, ""]]:
        """Run this stage's layers.

        Args:
            x: token ids ``[B, S/cp]`` on the first stage, else the hidden state ``[S/cp, B,
                D]`` (``[S/cp/tp, B, D]`` under sequence parallelism) of the stage before.
            positions: of the tokens, ``[S/cp]`` or ``[B, S/cp]``; None: counted from 0, or
                from the state's length, in the zigzag order of ``cp``. Give them only where
                sequences begin anew inside a sample.
            state: what the layers remember of earlier tokens; extended by these.
            documents: packed in the rows, which are cut over ``cp`` as any others; none sees
                another. Their ``positions`` go on from one to the next unless given.

        Returns:
            The hidden state, normed on the last stage, and this stage's auxiliary losses
            (their coefficients included; 0 without experts).

        Raises:
            ValueError: if the sequence is longer than the model's positions, a state is given
                under context parallelism or with documents, or the documents are of other
                rows.
        """
        num_tokens = self._check_inputs(x, state, documents)
        remembered = 0 if state is None else state.length
        if state is None or positions is None:  # else the state's owner counts them
            check_length(self.config, num_tokens * self.cp.size, remembered)
        length = num_tokens * self.cp.size + remembered
        if positions is None:
            positions = self._positions(num_tokens, state, x.device)
        elif positions.dim() == 2 and positions.shape[0] == 1:
            # Tables without a batch are smaller, and fused kernels' own.
            positions = positions[0]
        if self.stage.has_embedding:
            x = self._embed(x, positions)
        inputs = BlockInputs(
            rotary=build_rotary(self.config, positions, x.dtype, length),
            local_rotary=build_local_rotary(self.config, positions, x.dtype),
            temperature=query_temperature(self.config, positions, x.dtype),
            documents=documents,
            state=state,
        )
        stream = Residual.begin(x)
        for blocks, is_recomputed in block_groups(list(self.blocks.values()), self.recomputing):
            if is_recomputed and self.training and state is None:
                stream = recompute(
                    _run_recomputed,
                    blocks,
                    stream.total(),  # so that one tensor is kept, not two
                    stream.aux,
                    inputs,
                    streams=self.streams,
                    shared_by=self._saved_by(),
                )
            else:
                stream = _run(blocks, stream, inputs)
        if not self.stage.has_loss:
            return stream.total(), stream.aux
        return stream.normed(self.final_norm)[0], stream.aux

    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Score the vocabulary: this rank's slice of it, padding included as zeros.

        Gathers the sequence under sequence parallelism.

        Args:
            hidden: of ``forward`` on the last stage.
        """
        scores = column_parallel(
            self._scaled(hidden), self.output_weight, None, self.tp, self.sequence_parallel
        )
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(scores / cap) if cap else scores

    def token_losses(
        self,
        hidden: Float[Tensor, "s B D"],
        labels: Int[Tensor, "B S"],
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, "B S"]:
        """Cross-entropy of every token, float32 or wider, with any gradient.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: next token of every token.
            label_smoothing: share of the target spread over the vocabulary.
        """
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
        label_smoothing: float = 0.0,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B S"]]:
        """Weighted sum of token losses, without whole logits in memory.

        The sum must be a root of backward; for anything else use ``token_losses``.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: next token of every token.
            weights: of the token losses: mask over the global count of valid tokens.
            label_smoothing: share of the target spread over the vocabulary.

        Returns:
            The sum, and every token's loss without gradient.
        """
        return head_loss(
            self._scaled(hidden),
            self.output_weight,
            labels,
            weights,
            vocab_size=self.vocab_size,
            axis=self.tp,
            sequence_parallel=self.sequence_parallel,
            label_smoothing=label_smoothing,
            softcap=self.config.final_logit_softcapping,
        )

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Multiply what the head reads, which multiplies its scores."""
        return hidden * factor if (factor := self.config.logits_multiplier) != 1 else hidden

    @property
    def output_weight(self) -> Float[Tensor, "v D"]:
        """This rank's rows of the head: its own, or the embedding's."""
        is_untied = self.config.untie_embeddings_and_output_weights
        return self.head.weight if is_untied else self.embedding.weight

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.config.embedding_multiplier != 1.0:
            # Rounded to the model's dtype first, as published models were trained.
            x = x * torch.tensor(self.config.embedding_multiplier, dtype=x.dtype).item()
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.position_embedding(positions)
        return self.dropout(x)

    def _saved_by(self) -> Axis:
        """Return the ranks that each keep a piece of what a recomputed layer begins from."""
        is_whole_everywhere = not self.sequence_parallel
        is_cut = self.recomputing.distribute_saved_activations and is_whole_everywhere
        return self.tp if is_cut else SINGLE

    def _num_tokens(self, hidden: Tensor) -> int:
        """Tokens of this context rank's slice, from a hidden state."""
        return hidden.shape[0] * (self.tp.size if self.sequence_parallel else 1)

    def _positions(
        self, num_tokens: int, state: ModelState | None, device: torch.device
    ) -> Tensor:
        if state is not None:
            return torch.arange(state.length, state.length + num_tokens, device=device)
        if self.cp.size == 1:
            return torch.arange(num_tokens, device=device)
        return zigzag_positions(num_tokens * self.cp.size, self.cp, device)

    def _check_inputs(
        self, x: Tensor, state: ModelState | None, documents: Documents | None
    ) -> int:
        """Refuse what the stage cannot run; return the tokens of this context rank's slice."""
        if state is not None and self.cp.size > 1:
            raise ValueError(
                f"a cache cannot be cut over --context-parallel-size {self.cp.size}: generate "
                "with 1."
            )
        num_tokens = x.shape[1] if self.stage.has_embedding else self._num_tokens(x)
        if self.sequence_parallel and num_tokens % self.tp.size:
            raise ValueError(
                f"--sequence-parallel cannot cut {num_tokens} tokens over "
                f"--tensor-model-parallel-size {self.tp.size}: use a --seq-length that is a "
                "multiple."
            )
        if documents is not None:
            if state is not None:
                raise ValueError("a cache holds one document a row: generate without packing.")
            num_rows = x.shape[0] if self.stage.has_embedding else x.shape[1]
            documents.check(num_rows, num_tokens * self.cp.size)
        return num_tokens


def _run(blocks: Sequence[nn.Module], stream: Residual, inputs: BlockInputs) -> Residual:
    for block in blocks:
        stream = block(stream, inputs)
    return stream


def _run_recomputed(
    blocks: Sequence[nn.Module], x: Tensor, aux: Tensor, inputs: BlockInputs
) -> Residual:
    return _run(blocks, Residual(x, None, aux), inputs)
