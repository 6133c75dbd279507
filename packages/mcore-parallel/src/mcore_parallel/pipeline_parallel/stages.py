"""Which layers each pipeline stage holds: plain numbers, no torch.

With PP ranks and VPP stages on each there are PP x VPP stages; stage ``chunk * PP + rank``
is chunk ``chunk`` of rank ``rank``, so that a micro-batch visits the ranks in turn VPP
times. In a V the second chunks lie the other way round: a micro-batch goes down the ranks and
comes back, and the first rank has both ends of the model. Layers are split evenly, or by
flags, or by a pipeline layout (a string).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_parallel.pipeline_parallel.config import PipelineConfig

_MOST_LETTERS = 100_000
"""Letters that a repetition in a layout may write out; more are a mistake, and fill memory."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline; ``layers`` are global numbers and may be empty."""

    index: int
    layers: range
    has_embedding: bool
    has_loss: bool
    num_mtp_layers: int = 0
    """Multi-token-prediction layers that a pipeline layout puts after ``layers`` here."""
    mtp_stage: int = -1
    """Index of the stage where a layout places them; -1: it places none."""
    rank: int = -1
    """Pipeline rank that holds the stage; -1: not decided."""

    @property
    def has_mtp(self) -> bool:
        """Whether a model's multi-token prediction is here: with the loss unless placed."""
        return self.has_loss if self.mtp_stage < 0 else self.index == self.mtp_stage


def build_stages(config: PipelineConfig, num_layers: int, pp: int) -> list[Stage]:
    """Split ``num_layers`` over ``pp`` ranks by the config; see ``split_layers``."""
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
    """Return the stages of one pipeline rank, one a chunk, in forward order."""
    return [stage for stage in stages if stage.rank == rank]


def stage_at(rank: int, chunk: int, pp: int, v_shaped: bool = False) -> int:
    """Return the stage that is a chunk of a rank; in a V every second chunk runs back."""
    return chunk * pp + (pp - 1 - rank if v_shaped and chunk % 2 else rank)


def rank_and_chunk(stage: int, pp: int, v_shaped: bool = False) -> tuple[int, int]:
    """Return the rank that holds a stage and which of its chunks it is."""
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if v_shaped and chunk % 2 else place, chunk


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the stages of a pipeline are: ``stage_at`` for one number of ranks and chunks."""

    pp: int
    num_chunks: int = 1
    v_shaped: bool = False

    def has(self, stage: int) -> bool:
        """Whether there is such a stage."""
        return 0 <= stage < self.pp * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that is a chunk of a rank."""
        return stage_at(rank, chunk, self.pp, self.v_shaped)

    def rank(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return rank_and_chunk(stage, self.pp, self.v_shaped)[0]

    def chunk(self, stage: int) -> int:
        """Return which of its rank's chunks a stage is."""
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
    """Give each stage its layers, in stage order.

    Args:
        num_layers: transformer layers of the whole model.
        pp: pipeline ranks.
        vpp: stages on each rank.
        first: layers on the first rank, over all its stages; 0: as on the others.
        last: layers on the last rank; 0: as on the others.
        account_for_embedding: the embedding takes the place of one layer.
        account_for_loss: head and loss take the place of one layer.
        layout: the stages spelled out; see ``PipelineConfig``.
        v_shaped: place them in a V, see ``stage_at``.

    Raises:
        ValueError: if the layers do not divide so, naming the flags to change.
    """
    if layout:
        found = _from_layout(layout, num_layers, pp, vpp)
        return [replace(s, rank=rank_and_chunk(s.index, pp, v_shaped)[0]) for s in found]
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
    each, rest = divmod(total, pp * vpp)
    if rest or not each:
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
    parts = _expand(layout, flag).split("|")
    letters = "".join(parts)
    if len(parts) != pp * vpp:
        raise ValueError(
            f"{flag} describes {len(parts)} stages, but --pipeline-model-parallel-size {pp} x "
            f"--num-virtual-stages-per-pipeline-rank {vpp} is {pp * vpp}: "
            f"{_mend(len(parts), pp, vpp)}."
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


def _mend(num_stages: int, pp: int, vpp: int) -> str:
    if num_stages % pp == 0:
        return f"use --num-virtual-stages-per-pipeline-rank {num_stages // pp}"
    if num_stages % vpp == 0:
        return f"use --pipeline-model-parallel-size {num_stages // vpp}"
    return f"write {pp * vpp} stages"


def _expand(layout: str, flag: str) -> str:
    """Write out repetitions: ``Et*2|(t|)*2L`` becomes ``Ett|t|t|L``."""

    def repeated(found: re.Match[str]) -> str:
        count = int(found[2] or 1)
        if len(found[1]) * count > _MOST_LETTERS:
            raise ValueError(f"{flag} {layout} repeats {found[1][:20]} more than can be built.")
        return found[1] * count

    text = re.sub(r"[,\s]", "", layout)
    text = re.sub(r"([EtmL|])\*(\d{1,9})", repeated, text)
    group = re.compile(r"\(([EtmL|]*)\)(?:\*(\d{1,9}))?")
    while group.search(text):
        text = group.sub(repeated, text)
    if wrong := re.search(r"[^EtmL|]", text):
        raise ValueError(
            f"{flag} cannot be read at {wrong[0]!r}: use the letters E, t, m, L, the "
            "stage mark |, and repetitions x*n or (..)*n."
        )
    return text
