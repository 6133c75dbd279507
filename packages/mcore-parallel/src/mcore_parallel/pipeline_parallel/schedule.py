"""Pipeline schedules as data: 1F1B, interleaved, zero-bubble and DualPipeV.

A schedule is one list of ``Action`` per rank. Each function writes the order of computation as
in the paper's figure; ``with_messages`` adds sends and receives. ``simulator`` checks any
schedule, ``runner`` executes it.
"""

from collections import Counter
from dataclasses import replace

from mcore_parallel.pipeline_parallel.actions import Action, Kind, Schedule, with_messages
from mcore_parallel.pipeline_parallel.config import PipelineConfig


def build_schedule(config: PipelineConfig, pp: int, num_microbatches: int) -> Schedule:
    """Return the schedule that the config names, one list of actions per rank.

    Args:
        config: schedule (not ``auto``, which ``search_schedules`` resolves), stages on a rank
            and size of micro-batch groups.
        pp: pipeline ranks.
        num_microbatches: micro-batches of a step on each data rank.

    Raises:
        ValueError: if micro-batches, groups and stages do not fit the pipeline.
    """
    name, paired = _name(config), config.overlap_moe_expert_parallel_comm
    _check_pairs(config, num_microbatches)
    if name == "interleaved" or (name == "1f1b" and paired):
        vpp = config.num_virtual_stages_per_pipeline_rank
        group = config.microbatch_group_size_per_virtual_pipeline_stage
        return interleaved(pp, num_microbatches, vpp, group, paired=paired)
    if name == "dualpipev":
        return dualpipe_v(pp, num_microbatches, paired=paired)
    builders = {"1f1b": one_f_one_b, "zb-h1": zero_bubble_h1, "zb-v": zero_bubble_v}
    return builders[name](pp, num_microbatches)


def check_schedule(config: PipelineConfig, pp: int, num_microbatches: int) -> None:
    """Make the checks of ``build_schedule`` without building; cheap for many batch sizes.

    Raises:
        ValueError: if micro-batches, groups and stages do not fit the pipeline.
    """
    name = _name(config)
    _check_pairs(config, num_microbatches)
    if name == "interleaved":
        vpp = config.num_virtual_stages_per_pipeline_rank
        group = config.microbatch_group_size_per_virtual_pipeline_stage or pp
        _check_groups(pp, num_microbatches, vpp, group)
    if config.v_shaped:
        _check_v(config.pipeline_schedule, pp, num_microbatches)


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """Build 1F1B: one forward, one backward; rank r holds at most PP - r micro-batches.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, figure 3 (PipeDream-Flush).
    """
    orders = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, i) for i in range(warmup)]
        for i in range(num_microbatches):
            if i + warmup < num_microbatches:
                order.append(Action(Kind.FORWARD, i + warmup))
            order.append(Action(Kind.BACKWARD, i))
        orders.append(order)
    return with_messages(orders)


def interleaved(
    pp: int, num_microbatches: int, vpp: int, group: int = 0, *, paired: bool = False
) -> Schedule:
    """Build interleaved 1F1B: 1/VPP of the bubble for VPP times the messages.

    Micro-batches run in groups: a group passes the first chunk, then the second, and so on,
    before the next group starts. Backward takes the chunks in reverse.

    Paired, each forward runs together with a backward (``ForwardBackwardOverlap``), so neither
    may need a result of the other: each rank warms up one forward more. With one stage per rank
    the first rank then holds 2 PP micro-batches; a single rank holds 2.

    Args:
        pp: pipeline ranks; at least 2 if ``vpp`` is above 1.
        num_microbatches: micro-batches of a step; a smaller last group must have at least PP.
        vpp: stages on each rank.
        group: micro-batches in a group, at least PP; 0: PP.
        paired: whether each forward runs together with a backward.

    Raises:
        ValueError: if micro-batches and group do not fit the pipeline.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, figure 4. Pairs: DeepSeek-AI 2024,
        arXiv:2412.19437, section 3.2.1.
    """
    group = group or pp
    if vpp > 1 or not paired:
        _check_groups(pp, num_microbatches, vpp, group)
    # All (chunk, micro-batch) in the order of their forwards on every rank.
    table = [
        (chunk, microbatch)
        for begin in range(0, num_microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(begin, min(begin + group, num_microbatches))
    ]
    forwards = [Action(Kind.FORWARD, microbatch, chunk) for chunk, microbatch in table]
    backwards = [Action(Kind.BACKWARD, m, vpp - 1 - chunk) for chunk, m in table]
    orders = []
    for rank in range(pp):
        warmup = min(2 * (pp - rank - 1) + (vpp - 1) * group + paired, len(table))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [replace(forward, is_paired=paired), backward]
        orders.append(order + backwards[len(table) - warmup :])
    return with_messages(orders)


def zero_bubble_h1(pp: int, num_microbatches: int) -> Schedule:
    """Build ZB-H1: 1F1B with backward split; weight gradients fill the bubble.

    Rank ``r`` computes weight gradients ``r`` micro-batches after input gradients, so that
    input gradients are sent at once, and every rank holds at most PP micro-batches.

    Reference:
        Qi et al. 2023, arXiv:2401.10241, section 2.3 and figure 2 (ZB-H1).
    """
    orders = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, i) for i in range(warmup)]
        for i in range(num_microbatches + rank):
            if i + warmup < num_microbatches:
                order.append(Action(Kind.FORWARD, i + warmup))
            if i < num_microbatches:
                order.append(Action(Kind.BACKWARD_INPUT, i))
            if i >= rank:
                order.append(Action(Kind.BACKWARD_WEIGHT, i - rank))
        orders.append(order)
    return with_messages(orders)


def zero_bubble_v(pp: int, num_microbatches: int) -> Schedule:
    """Build ZB-V: two stages per rank in a V, with backward split.

    There is no bubble if F, I and W take equal times.
    Rank ``r`` holds stages ``r`` and ``2 PP - 1 - r``, so the first rank has embedding and
    loss. Every rank holds at most 2 PP micro-batch chunks, the memory of 1F1B's first rank.
    Fewer than 2 PP - 1 micro-batches run in the order of 2 PP - 1, without the missing ones.

    Raises:
        ValueError: on one pipeline rank.

    Reference:
        Qi et al. 2024, arXiv:2405.15362 (V-ZB).
    """
    _check_v("zb-v", pp, num_microbatches)
    total = max(num_microbatches, 2 * pp - 1)
    orders = []
    for rank in range(pp):
        lane = _Lane()
        lane.add(2 * (pp - rank) - 1, "F0")
        lane.add(rank, "F1 F0")
        lane.add(pp - rank, "F1 I1 W1")
        lane.add(total - 2 * pp + rank + 1, "F0 I0 W0 F1 I1 W1")
        lane.add(pp - rank - 1, "I0 W0 F1 I1 W1")
        lane.add(rank, "I0 I1")
        lane.add(pp - rank, "I0 W0")
        lane.add(rank, "W1")
        lane.add(rank, "W0")
        orders.append([a for a in lane.actions if a.microbatch < num_microbatches])
    return with_messages(orders, v_shaped=True)


def dualpipe_v(pp: int, num_microbatches: int, *, paired: bool = False) -> Schedule:
    """Build DualPipeV: a forward of one chunk next to a backward of the other.

    In the middle of a step each full backward follows a forward and hides its messages, or runs
    together with the forward if paired (``ForwardBackwardOverlap``); at both ends of a step
    backward is split. Every rank holds at most 2 PP + 1 micro-batch chunks.

    Raises:
        ValueError: on one pipeline rank, or with fewer than 2 PP micro-batches.

    Reference:
        DeepSeek-AI 2024, arXiv:2412.19437 (DualPipe); its half in a V holds each stage once.
    """
    _check_v("dualpipev", pp, num_microbatches)
    orders = []
    for rank in range(pp):
        lane, ranks_after = _Lane(), pp - rank - 1
        lane.add(2 * ranks_after, "F0")
        lane.add(rank + 1, "F0 F1")
        lane.add(ranks_after, "I1 W1 F1")
        lane.add(num_microbatches - 2 * pp + rank + 1, "F0 B1 F1 B0", paired)
        lane.add(ranks_after, "B1 F1 B0", paired)
        # The first half of the last backwards is full, the second half defers weight gradients.
        ends = ["B1", "B0"] * (rank + 1)
        deferring = [word.replace("B", "I") for word in ends[rank + 1 :]]
        lane.add(1, " ".join(ends[: rank + 1] + deferring))
        lane.add(ranks_after, "W I0")
        lane.add(rank + 1, "W")
        orders.append(lane.actions)
    return with_messages(orders, v_shaped=True)


def forward_only(
    pp: int, num_microbatches: int, vpp: int = 1, v_shaped: bool = False
) -> Schedule:
    """Build a schedule without backward, for evaluation; PP micro-batches form a group."""
    order = [
        Action(Kind.FORWARD, microbatch, chunk)
        for begin in range(0, num_microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(begin, min(begin + pp, num_microbatches))
    ]
    return with_messages([list(order) for _ in range(pp)], v_shaped)


class _Lane:
    """One rank's order of computation, written in words such as ``F1``: kind and chunk.

    Each word takes the next micro-batch of its kind and chunk. ``W`` without a chunk is the
    oldest deferred weight gradient.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: Counter[str] = Counter()
        self._deferred: list[Action] = []

    def add(self, times: int, words: str, paired: bool = False) -> None:
        """Append the actions of ``words``, repeated ``times`` times."""
        for word in words.split() * times:
            kind = Kind(word[0])
            if kind is Kind.BACKWARD_WEIGHT:
                oldest = next(
                    i for i, a in enumerate(self._deferred) if word in ("W", f"W{a.chunk}")
                )
                self.actions.append(self._deferred.pop(oldest))
                continue
            chunk = int(word[1])
            # Full backwards and input halves count together.
            counted = f"{'F' if kind is Kind.FORWARD else 'B'}{chunk}"
            microbatch = self._counts[counted]
            self._counts[counted] += 1
            is_paired = paired and kind is Kind.FORWARD
            self.actions.append(Action(kind, microbatch, chunk, is_paired))
            if kind is Kind.BACKWARD_INPUT:
                self._deferred.append(Action(Kind.BACKWARD_WEIGHT, microbatch, chunk))


def _check_pairs(config: PipelineConfig, num_microbatches: int) -> None:
    if config.overlap_moe_expert_parallel_comm and num_microbatches == 1:
        raise ValueError(
            "--overlap-moe-expert-parallel-comm pairs a step's micro-batches, and there is 1: "
            "raise --global-batch-size, or leave it out."
        )


def _check_v(name: str, pp: int, num_microbatches: int) -> None:
    if pp == 1:
        raise ValueError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more."
        )
    if name == "dualpipev" and num_microbatches < 2 * pp:
        raise ValueError(
            "--pipeline-schedule dualpipev needs 2 x --pipeline-model-parallel-size = "
            f"{2 * pp} micro-batches or more, and a step has {num_microbatches}: raise "
            "--global-batch-size, or use zb-v."
        )


def _name(config: PipelineConfig) -> str:
    if config.pipeline_schedule == "auto":
        raise ValueError(
            "--pipeline-schedule auto names no single schedule: choose one of search_schedules."
        )
    is_interleaved = config.num_virtual_stages_per_pipeline_rank > 1
    return config.pipeline_schedule or ("interleaved" if is_interleaved else "1f1b")


def _check_groups(pp: int, num_microbatches: int, vpp: int, group: int) -> None:
    if vpp > 1 and pp == 1:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {vpp} needs "
            "--pipeline-model-parallel-size 2 or more."
        )
    if group < pp:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} must be at least "
            f"--pipeline-model-parallel-size {pp}."
        )
    rest = num_microbatches % group
    if num_microbatches < pp or 0 < rest < pp:
        raise ValueError(
            f"{num_microbatches} micro-batches in groups of {group} leave a group of {rest}, "
            f"which cannot fill {pp} pipeline ranks: use a multiple of {group} micro-batches "
            "(--global-batch-size), or change "
            "--microbatch-group-size-per-virtual-pipeline-stage."
        )
