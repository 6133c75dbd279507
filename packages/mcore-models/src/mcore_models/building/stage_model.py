"""``StageModel``: constructor and shared methods of GPT, BERT and T5 under a layout.

The constructor checks model and layout, pads the vocabulary, sets up random streams and
recomputation, calls the model's ``build_parts``, and fills the weights.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.building.layouts import check_length, layout_problems, stage_problems
from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.layers.layer_setup import PLAIN_EXECUTION, Execution, LayerSetup
from mcore_models.layers.residual import Residual, stream_cuts, stream_dropout
from mcore_models.logical_tensors import layer_config
from mcore_models.protocol import ModelState, TrainableModel
from mcore_moe.config import MoEConfig
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_positions
from mcore_parallel.data_parallel.meta_matrices import MatricesOnMeta
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.precision.fp8 import PLAIN_GEMMS
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import named_shards
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab

_NO_EXPERTS = MoEConfig()
_KEEP_ALL = RecomputeConfig()

BlockCaller = Callable[[nn.Module, Residual, Any], Residual]
"""Calls a block with the residual stream and the inputs that all blocks share."""


class StageModel(TrainableModel):
    """A model whose tables and layers are split over tensor, context and pipeline ranks.

    Attributes:
        embedding: rows of tokens, where ``add_embedding`` was called.
        cp: ranks that share a sequence.
        cuts: ranks that split the tokens between mixers: ``tp`` under sequence parallelism,
            otherwise a single rank.
        sequence_parallel: whether ``cuts`` has several ranks.
        recomputing: what backward recomputes.
        saved_by: ranks that each keep a slice of the input of a recomputed layer.
        streams: random streams of dropout; their state belongs in a checkpoint.
        dropout: of embedded tokens.
        padded_vocab_size: rows of the tables over all ranks.
    """

    layout_problems: Callable[..., list[str]] = staticmethod(layout_problems)
    """Returns why the model cannot be split, see ``Family``."""
    num_layers: Callable[..., int] = staticmethod(attrgetter("num_layers"))
    """Number of layers that pipeline stages share, see ``Family``."""

    def __init__(
        self,
        config: TransformerConfig,
        ctx: ParallelContext,
        *,
        vocab_size: int,
        moe: MoEConfig = _NO_EXPERTS,
        stage: Stage | None = None,
        seed: int | None = 1234,
        execution: Execution = PLAIN_EXECUTION,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate and fill this rank's part; no communication.

        Args:
            config: shape and numerics of the layers.
            ctx: the layout.
            vocab_size: true number of tokens; tables are padded for the layout.
            moe: experts, none by default.
            stage: layers of a pipeline stage; None: all.
            seed: of the initial weights, equal on all ranks; None: matrices stay on the meta
                device, for an engine that shards them, and ``initialize`` fills the shards.
            execution: kernels, GEMMs, recomputation, random streams.
            device: of the parameters; None: that of ``ctx``.
            dtype: of the parameters and activations.

        Raises:
            ValueError: if the model does not fit the layout, or a kernel is not installed.
        """
        super().__init__()
        if problems := self.layout_problems(config, ctx.config, moe):
            raise ValueError("\n".join(problems))
        count = self.num_layers(config)
        if stage is None:
            if ctx.pp.size > 1:
                raise ValueError(
                    f"--pipeline-model-parallel-size {ctx.pp.size}: give each rank its stage, "
                    "one of mcore_parallel.pipeline_parallel.stages.split_layers."
                )
            stage = Stage(0, range(count), has_embedding=True, has_loss=True)
        if problems := stage_problems(config, [stage.layers]):
            raise ValueError("\n".join(problems))
        self.config, self.vocab_size, self.stage = config, vocab_size, stage
        self.dtype = dtype
        self.tp, self.cp, self.pp = ctx.tp, ctx.cp, ctx.pp
        self.cuts = stream_cuts(ctx)
        self.sequence_parallel = self.cuts.size > 1
        recomputing = execution.recomputing
        is_shared = recomputing.distribute_saved_activations and not self.sequence_parallel
        self.recomputing, self.saved_by = recomputing, ctx.tp if is_shared else SINGLE
        self.call_block: BlockCaller = nn.Module.__call__
        self.streams = execution.streams or RngStreams(seed or 0, ctx)
        self.dropout = stream_dropout(config, ctx, self.streams)
        self.padded_vocab_size = padded_vocab(
            vocab_size, config.make_vocab_size_divisible_by, ctx.tp.size
        )
        num_setups = count + config.mtp_num_layers
        gemms = execution.gemms or (PLAIN_GEMMS,) * num_setups
        setups = [
            LayerSetup(
                config=layer_config(config, min(index, count - 1)),
                ctx=ctx,
                layer=min(index, count - 1),  # MTP layers are built like the last layer
                streams=self.streams,
                moe=moe,
                recomputing=recomputing,
                kernels=execution.kernels,
                gemms=gemms[index],
                parts=execution.parts,
                device=device or ctx.device,
                dtype=dtype,
            )
            for index in range(num_setups)
        ]
        with MatricesOnMeta() if seed is None else nullcontext():
            self.build_parts(ctx, setups)
        if seed is not None:
            self.initialize(named_shards(self), seed)

    @abstractmethod
    def build_parts(self, ctx: ParallelContext, setups: Sequence[LayerSetup]) -> None:
        """Allocate the modules of this stage; weights are filled later.

        Args:
            ctx: the layout.
            setups: of every layer, by global number; then of those that predict further tokens.
        """

    def add_embedding(self, tied: Axis, factory_kwargs: Mapping[str, Any]) -> None:
        """Allocate this rank's rows of the embedding."""
        self.embedding = VocabParallelEmbedding(
            self.vocab_size,
            self.config.hidden_size,
            tied=tied,
            **self.vocab_split(),
            **factory_kwargs,
        )

    def vocab_split(self) -> dict[str, Any]:
        """Return keyword arguments of modules that hold rows of the vocabulary."""
        return self.split() | {"padded_vocab_size": self.padded_vocab_size, "init_std": 0.0}

    def split(self) -> dict[str, Any]:
        """Return keyword arguments of modules that are split over the tensor ranks."""
        return {"axis": self.tp, "sequence_parallel": self.sequence_parallel}

    def run_blocks(
        self, blocks: Sequence[nn.Module], x: Tensor, inputs: Any, is_trained: bool
    ) -> Residual:
        """Run blocks on the residual stream; communicates as the blocks do.

        Args:
            blocks: in order.
            x: the stream before the first block.
            inputs: of all blocks.
            is_trained: whether recomputation applies.
        """
        stream = Residual.begin(x)
        recomputing = self.recomputing if is_trained else _KEEP_ALL
        for group, is_recomputed in block_groups(blocks, recomputing):
            if is_recomputed:
                begin = stream.total()  # recomputation saves one tensor instead of two
                stream = recompute(
                    self._run_group,
                    begin,
                    stream.aux,
                    group,
                    inputs,
                    streams=self.streams,
                    shared_by=self.saved_by,
                )
                continue
            for block in group:
                stream = self.call_block(block, stream, inputs)
        return stream

    def _run_group(
        self, x: Tensor, aux: Tensor, group: Sequence[nn.Module], inputs: Any
    ) -> Residual:
        stream = Residual(x, None, aux)
        for block in group:
            stream = self.call_block(block, stream, inputs)
        return stream

    def local_positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this context rank's tokens, in the zigzag order of ``cp``."""
        if self.cp.size == 1:
            return torch.arange(num_tokens, device=device)
        return zigzag_positions(num_tokens * self.cp.size, self.cp, device)


def check_inputs(
    size: tuple[int, int],
    state: ModelState | None = None,
    documents: Documents | None = None,
    *,
    config: TransformerConfig,
    axes: tuple[Axis, Axis],
    is_counted: bool = True,
    flag: str = "--seq-length",
) -> int:
    """Check the inputs of a forward pass against model and layout; no communication.

    Args:
        size: rows, and tokens of this context rank's part of each.
        state: of earlier tokens in the layers.
        documents: packed in the rows.
        config: of the model.
        axes: context ranks, and the ranks that split a context rank's tokens (a single rank
            without sequence parallelism).
        is_counted: positions continue from the state's length; False: the caller passes them,
            and the length is not checked.
        flag: option that sets the sequence length.

    Returns:
        Tokens of the complete sequence, including those of the state.

    Raises:
        ValueError: if the sequence is too long or cannot be split, a state is given under
            context parallelism or with documents, or the documents do not fit the rows.
    """
    (num_rows, num_tokens), (cp, tp) = size, axes
    if state is not None and cp.size > 1:
        raise ValueError(
            f"--context-parallel-size {cp.size} does not support a cache of earlier tokens: "
            "generate with --context-parallel-size 1."
        )
    remembered = 0 if state is None else state.length
    if is_counted:
        check_length(config, num_tokens * cp.size, remembered, flag)
    if num_tokens % tp.size:
        raise ValueError(
            f"--sequence-parallel cannot split {num_tokens} tokens over "
            f"--tensor-model-parallel-size {tp.size}: use a {flag} that is a multiple of "
            f"{tp.size}."
        )
    if documents is not None:
        if state is not None:
            raise ValueError(
                "a cache of earlier tokens supports one document in each row: pass rows "
                "without packed documents."
            )
        documents.check(num_rows, num_tokens * cp.size)
    return num_tokens * cp.size + remembered


def block_groups(
    blocks: Sequence[nn.Module], recomputing: RecomputeConfig
) -> Iterator[tuple[Sequence[nn.Module], bool]]:
    """Yield groups of a stage's blocks, each with whether backward recomputes the group."""
    if recomputing.recompute_granularity != "full":
        yield blocks, False
        return
    count = recomputing.recompute_num_layers
    if recomputing.recompute_method == "block":
        for block in blocks[:count]:
            yield [block], True
        yield blocks[count:], False
        return
    for begin in range(0, len(blocks), count):
        yield blocks[begin : begin + count], True
