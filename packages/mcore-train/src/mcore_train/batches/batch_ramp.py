"""Batch sizes over a run: ``--rampup-batch-size`` and ``--step-batch-size-schedule``.

The size is a pure function of the samples used so far, so a resumed run, also under another
layout, continues with the size that it would have had. A run that continues with another batch
size records the sizes of its earlier steps before the ramp, so numbers of steps are always
counted by the sizes that the steps really have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mcore_data.tracing.data_plan import BatchSizePhase


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Sizes of the global batch over a run; a start of 0 means one size throughout.

    As in Megatron, the size grows from ``start`` to ``final`` in steps of ``increment``
    sequences, each of which lasts for an equal share of ``samples``.
    """

    final: int
    """Sequences of a step after the ramp."""
    start: int = 0
    """Sequences of the first step."""
    increment: int = 0
    """Sequences by which the size grows."""
    samples: int = 0
    """Sequences after which the size is ``final``."""
    steps: tuple[tuple[int, int], ...] = ()
    """Instead of a ramp: pairs of the sequences from which a size is used, and the size."""
    past: tuple[tuple[int, int], ...] = ()
    """Pairs of the number and batch size of earlier steps, done under other options."""

    def size_at(self, consumed: int) -> int:
        """Batch size of the step that begins after ``consumed`` sequences."""
        done = 0
        for number, size in self.past:
            done += number * size
            if consumed < done:
                return size
        if consumed >= self.samples:
            return self.final
        if self.steps:
            return [size for begin, size in self.steps if begin <= consumed][-1]
        if not self.start or self.final == self.start:
            return self.final
        num_increments = (self.final - self.start) // self.increment
        return self.start + consumed * num_increments // self.samples * self.increment

    def sizes(self) -> tuple[int, ...]:
        """Return every batch size that a step after the first ``past`` may have, ascending."""
        if self.steps:
            return tuple(sorted({size for _, size in self.steps}))
        if not self.start:
            return (self.final,)
        return tuple(range(self.start, self.final + 1, self.increment or 1))

    def num_steps(self, samples: int) -> int:
        """Whole steps that fit into ``samples`` sequences."""
        steps = consumed = 0
        for number, size in self.past:
            fitting = min(number, (samples - consumed) // size)
            steps += fitting
            consumed += fitting * size
            if fitting < number:
                return steps
        while consumed < self.samples and consumed + self.size_at(consumed) <= samples:
            consumed += self.size_at(consumed)
            steps += 1
        if consumed < self.samples:
            return steps
        return steps + (samples - consumed) // self.final

    def samples_before(self, step: int) -> int:
        """Sequences used before a step, counted from 1."""
        done = consumed = 0
        for number, size in self.past:
            taken = min(number, step - 1 - done)
            done += taken
            consumed += taken * size
        while consumed < self.samples and done < step - 1:
            consumed += self.size_at(consumed)
            done += 1
        return consumed + (step - 1 - done) * self.final

    def continue_after(self, phases: Sequence[BatchSizePhase], steps: int) -> "BatchRamp":
        """Return the ramp with the recorded batch sizes of the steps that are done.

        Args:
            phases: batch sizes from the first step on.
            steps: number of steps done.
        """
        begins = [*(phase.first_step for phase in phases), steps + 1]
        past = tuple(
            (after - phase.first_step, phase.batch_size)
            for phase, after in zip(phases, begins[1:], strict=True)
        )
        if begins[0] != 1 or any(number < 1 for number, _ in past):
            return self  # the record does not begin at the first step
        continued = replace(self, past=past)
        is_same = all(self.size_at(s.first_sample) == s.batch_size for s in phases)
        is_same &= self.samples_before(steps + 1) == continued.samples_before(steps + 1)
        return self if is_same else continued


def build_ramp(words: tuple[int, ...], final: int) -> BatchRamp:
    """Return the ramp of --rampup-batch-size; without numbers, one size throughout."""
    if not words:
        return BatchRamp(final)
    start, increment, samples = words
    if start < 1 or increment < 1 or samples < 1 or start > final:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples}: give a first size from 1 to "
            f"--global-batch-size {final}, an increment and a number of samples."
        )
    if (final - start) % increment:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples} does not reach "
            f"--global-batch-size {final} in whole increments: {final} - {start} must be a "
            f"multiple of {increment}."
        )
    return BatchRamp(final, start, increment, samples)


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_token_steps(flag: str, text: str, seq_length: int) -> list[tuple[int, int]]:
    """Parse entries TOKENS:VALUE; return the sequences and value of each.

    Args:
        flag: the option, for error messages.
        text: entries separated by blanks.
        seq_length: tokens of a sequence; a value begins with the first step at or after its
            number of tokens.

    Raises:
        ValueError: if an entry cannot be read, or the entries do not follow each other.
    """
    steps = []
    for entry in text.split():
        tokens, _, value = entry.partition(":")
        factor = _SUFFIXES.get(tokens[-1:].upper(), 1)
        number = tokens[:-1] if factor > 1 else tokens
        try:
            steps.append((-(-int(float(number) * factor) // seq_length), int(value)))
        except ValueError:
            raise ValueError(f"{flag}: {entry} is not TOKENS:NUMBER, such as 2B:128.") from None
    begins = [begin for begin, _ in steps]
    is_ordered = begins[:1] == [0] and all(a < b for a, b in pairwise(begins))
    if not is_ordered or min(value for _, value in steps) < 1:
        raise ValueError(
            f"{flag} {text}: begin with 0:NUMBER, use numbers of 1 or more, and let the tokens "
            f"of each entry be at least one sequence of {seq_length} above those before."
        )
    return steps


def build_step_schedule(text: str, final: int, seq_length: int) -> BatchRamp:
    """Read ``--step-batch-size-schedule``: entries TOKENS:SIZE.

    Args:
        text: its entries.
        final: ``--global-batch-size``, the largest size.
        seq_length: tokens of a sequence.

    Raises:
        ValueError: see ``read_token_steps``; or if the largest size is not ``final``.
    """
    steps = read_token_steps("--step-batch-size-schedule", text, seq_length)
    if max(size for _, size in steps) != final:
        raise ValueError(
            f"--step-batch-size-schedule {text}: its largest size must be --global-batch-size "
            f"{final}."
        )
    return BatchRamp(steps[-1][1], start=steps[0][1], samples=steps[-1][0], steps=tuple(steps))


def piece_length(text: str, seq_length: int, consumed: int) -> int:
    """Return the length of ``--seq-length-schedule`` after ``consumed`` sequences.

    Raises:
        ValueError: see ``read_token_steps``; or if the schedule does not end with whole rows.
    """
    if not text:
        return seq_length
    steps = read_token_steps("--seq-length-schedule", text, seq_length)
    if steps[-1][1] != seq_length or max(length for _, length in steps) > seq_length:
        raise ValueError(
            f"--seq-length-schedule {text}: its last length, the longest, must be --seq-length "
            f"{seq_length}."
        )
    return [length for begin, length in steps if begin <= consumed][-1]
