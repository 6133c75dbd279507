"""Which layers each pipeline stage holds, and which rank holds each stage; no torch.

With PP ranks and VPP stages on each rank there are PP x VPP stages. Stage ``chunk * PP + rank``
is chunk ``chunk`` of rank ``rank``, so a micro-batch visits all ranks in turn VPP times. In a V
the second chunks are in reverse rank order: a micro-batch goes down the ranks and comes back,
and the first rank has both ends of the model. Layers are split evenly, or by flags, or by a
pipeline layout (a string).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_parallel.pipeline_parallel.config import PipelineConfig

_MOST_LETTERS = 100_000
"""Limit on the letters of one expanded repetition; a longer layout is a mistake."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline; ``layers`` are global layer numbers and may be empty."""

    index: int
    layers: range
    has_embedding: bool
    has_loss: bool
    num_mtp_layers: int = 0
    """Multi-token-prediction layers that a pipeline layout puts after ``layers``."""
    mtp_stage: int = -1
    """Index of the stage where a layout puts multi-token prediction; -1: nowhere."""
    rank: int = -1
    """Pipeline rank that holds the stage; -1: not assigned."""

    @property
    def has_mtp(self) -> bool:
        """Whether the stage has multi-token prediction: by the layout, else with the loss."""
        return self.has_loss if self.mtp_stage < 0 else self.index == self.mtp_stage


def build_stages(config: PipelineConfig, num_layers: int, pp: int) -> list[Stage]:
    """Split layers over pipeline ranks by the config, and return all stages in order."""
    return split_layers(
        num_layers,
        pp,
        vpp=config.num_chunks,
        v_shaped=config.v_shaped,
        first=config.decoder_first_pipeline_num_layers,
        last=config.decoder_last_pipeline_num_layers,
        account_for_embedding=config.account_for_embedding_in_pipeline_split,
        account_for_loss=config.account_for_loss_in_pipeline_split,
        layout=config.pipeline_model_parallel_layout,
    )


def stages_of_rank(stages: Sequence[Stage], rank: int) -> list[Stage]:
    """Return the stages of one pipeline rank, one per chunk, in forward order."""
    return [stage for stage in stages if stage.rank == rank]


def stage_at(rank: int, chunk: int, pp: int, v_shaped: bool = False) -> int:
    """Return the stage of a rank's chunk; in a V odd chunks are in reverse rank order."""
    return chunk * pp + (pp - 1 - rank if v_shaped and chunk % 2 else rank)


def rank_and_chunk(stage: int, pp: int, v_shaped: bool = False) -> tuple[int, int]:
    """Return the rank that holds a stage, and the stage's chunk number on that rank."""
    chunk, position = divmod(stage, pp)
    return pp - 1 - position if v_shaped and chunk % 2 else position, chunk


@dataclass(frozen=True, slots=True)
class Placement:
    """The map between stages and (rank, chunk) for one number of ranks and chunks."""

    pp: int
    num_chunks: int = 1
    v_shaped: bool = False

    def has(self, stage: int) -> bool:
        """Whether the pipeline has a stage of this index."""
        return 0 <= stage < self.pp * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of a rank's chunk."""
        return stage_at(rank, chunk, self.pp, self.v_shaped)

    def rank(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return rank_and_chunk(stage, self.pp, self.v_shaped)[0]

    def chunk(self, stage: int) -> int:
        """Return the chunk number of a stage on its rank."""
        return rank_and_chunk(stage, self.pp, self.v_shaped)[1]


def split_layers(
    num_layers: int,
    pp: int,
    *,
    vpp: int = 1,
    first: int = 0,
    last: int = 0,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str = "",
    v_shaped: bool = False,
) -> list[Stage]:
    """Split the layers of a model over pipeline stages; return the stages in order.

    Args:
        num_layers: transformer layers of the model.
        pp: pipeline ranks.
        vpp: stages on each rank.
        first: layers on the first rank, over all its stages; 0: as on the other ranks.
        last: layers on the last rank; 0: as on the other ranks.
        account_for_embedding: count the embedding as one layer.
        account_for_loss: count head and loss as one layer.
        layout: the stages as a string, see ``PipelineConfig``; empty: by the other arguments.
        v_shaped: place the stages in a V, see ``stage_at``.

    Raises:
        ValueError: if the layers do not divide over the stages; names the flags to change.
    """
    if layout:
        stages = _from_layout(layout, num_layers, pp, vpp)
        return [replace(s, rank=rank_and_chunk(s.index, pp, v_shaped)[0]) for s in stages]
    if pp == 1 and vpp > 1:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {vpp} needs "
            "--pipeline-model-parallel-size 2 or more."
        )
    if first or last:
        by_rank = _uneven_counts(num_layers, pp, vpp, first, last)
        counts = [by_rank[rank_and_chunk(index, pp, v_shaped)[0]] for index in range(pp * vpp)]
    else:
        counts = _even_counts(num_layers, pp, vpp, account_for_embedding, account_for_loss)
    stages, begin = [], 0
    for index, count in enumerate(counts):
        is_last = index == len(counts) - 1
        rank, _ = rank_and_chunk(index, pp, v_shaped)
        layers = range(begin, begin + count)
        stages.append(Stage(index, layers, index == 0, is_last, rank=rank))
        begin += count
    return stages


def _even_counts(
    num_layers: int, pp: int, vpp: int, account_for_embedding: bool, account_for_loss: bool
) -> list[int]:
    total = num_layers + account_for_embedding + account_for_loss
    each, remainder = divmod(total, pp * vpp)
    if remainder or not each:
        extra = " (with embedding and loss as layers)" if total > num_layers else ""
        over = f"--pipeline-model-parallel-size {pp}"
        if vpp > 1:
            over += f" x --num-virtual-stages-per-pipeline-rank {vpp}"
        raise ValueError(
            f"--num-layers {num_layers}{extra} cannot be split over {over}: use a multiple of "
            f"{pp * vpp}, or spell the stages out with --pipeline-model-parallel-layout."
        )
    counts = [each] * (pp * vpp)
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    return counts


def _uneven_counts(num_layers: int, pp: int, vpp: int, first: int, last: int) -> list[int]:
    flags = " and ".join(
        f"--decoder-{name}-pipeline-num-layers {count}"
        for name, count in (("first", first), ("last", last))
        if count
    )
    others = pp - bool(first) - bool(last)
    remaining = num_layers - first - last
    if others < 0 or pp == 1:
        raise ValueError(f"{flags} need --pipeline-model-parallel-size 2 or more.")
    if remaining < 0 or (remaining % others if others else remaining):
        raise ValueError(
            f"{flags} leave {remaining} of --num-layers {num_layers} for {others} pipeline "
            "ranks, which must share them evenly."
        )
    by_rank = [remaining // others if others else 0] * pp
    by_rank[0] = first or by_rank[0]
    by_rank[-1] = last or by_rank[-1]
    for count in by_rank:
        if count % vpp:
            raise ValueError(
                f"{count} layers of a pipeline rank cannot be split over "
                f"--num-virtual-stages-per-pipeline-rank {vpp}: change {flags}."
            )
    return [count // vpp for count in by_rank]


def _from_layout(layout: str, num_layers: int, pp: int, vpp: int) -> list[Stage]:
    flag = f"--pipeline-model-parallel-layout {layout}"
    parts = expand_layout(layout, flag).split("|")
    letters = "".join(parts)
    if len(parts) != pp * vpp:
        raise ValueError(
            f"{flag} describes {len(parts)} stages, but --pipeline-model-parallel-size {pp} x "
            f"--num-virtual-stages-per-pipeline-rank {vpp} is {pp * vpp}: "
            f"{_suggestion(len(parts), pp, vpp)}."
        )
    if not re.fullmatch("Et*m*L", letters):
        raise ValueError(
            f"{flag} must hold one E first, then layers t, then layers m, then one L."
        )
    if letters.count("t") != num_layers:
        raise ValueError(
            f"{flag} holds {letters.count('t')} layers t, but --num-layers is {num_layers}."
        )
    mtp_stages = [index for index, part in enumerate(parts) if "m" in part]
    if len(mtp_stages) > 1:
        raise ValueError(
            f"{flag} holds layers m on {len(mtp_stages)} stages: put all of them on one."
        )
    stages, begin = [], 0
    for index, part in enumerate(parts):
        end = begin + part.count("t")
        ends = "E" in part, "L" in part
        stages.append(
            Stage(index, range(begin, end), *ends, part.count("m"), *(mtp_stages or (-1,)))
        )
        begin = end
    return stages


def _suggestion(num_stages: int, pp: int, vpp: int) -> str:
    """Return what to change so that the options give ``num_stages`` stages."""
    if num_stages % pp == 0:
        return f"use --num-virtual-stages-per-pipeline-rank {num_stages // pp}"
    if num_stages % vpp == 0:
        return f"use --pipeline-model-parallel-size {num_stages // vpp}"
    return f"write {pp * vpp} stages"


def expand_layout(layout: str, flag: str) -> str:
    """Expand repetitions: ``Et*2|(t|)*2L`` becomes ``Ett|t|t|L``."""

    def repeated(match: re.Match[str]) -> str:
        letters, count = match[1], int(match[2] or 1)
        if len(letters) * count > _MOST_LETTERS:
            raise ValueError(f"{flag} {layout} repeats {letters[:20]} more than can be built.")
        return letters * count

    text = re.sub(r"[,\s]", "", layout)
    text = re.sub(r"([EtmL|])\*(\d{1,9})", repeated, text)
    group = re.compile(r"\(([EtmL|]*)\)(?:\*(\d{1,9}))?")  # innermost parentheses first
    while group.search(text):
        text = group.sub(repeated, text)
    if wrong := re.search(r"[^EtmL|]", text):
        raise ValueError(
            f"{flag} cannot be read at {wrong[0]!r}: use the letters E, t, m, L, the "
            "stage mark |, and repetitions x*n or (..)*n."
        )
    return text
