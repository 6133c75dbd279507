"""Batch sizes over a run: ``--rampup-batch-size`` and ``--step-batch-size-schedule``.

A pure function of the samples used so far, so a run that is resumed, also under another
layout, goes on with the size it would have had. A run that continues with another batch size
has the sizes of its steps so far in front of the ramp: every number of steps is counted by what
its steps really use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mcore_data.tracing.data_plan import Stretch


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Sizes of the global batch over a run; a start of 0 means one size throughout.

    The way from ``start`` to ``final`` is cut into steps of ``increment`` sequences, each
    held for an equal share of ``samples``. Megatron's rule.
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
    """In place of a ramp, the sequences from which on a step has a size, and the size."""
    past: tuple[tuple[int, int], ...] = ()
    """Number and batch size of the steps that were done before, under other options."""

    def size_at(self, consumed: int) -> int:
        """Sequences of the step that begins after ``consumed`` sequences."""
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
        """Every size that the run has, smallest first."""
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

    def continue_after(self, stretches: Sequence[Stretch], steps: int) -> "BatchRamp":
        """Return the ramp with the batch sizes that the run has had in the place of its first.

        Args:
            stretches: batch sizes from the first step on.
            steps: that the run has done.
        """
        begins = [*(stretch.first_step for stretch in stretches), steps + 1]
        past = tuple(
            (after - stretch.first_step, stretch.batch_size)
            for stretch, after in zip(stretches, begins[1:], strict=True)
        )
        if begins[0] != 1 or any(number < 1 for number, _ in past):
            return self  # not known from the first step on
        continued = replace(self, past=past)
        is_same = all(self.size_at(s.first_sample) == s.batch_size for s in stretches)
        is_same &= self.samples_before(steps + 1) == continued.samples_before(steps + 1)
        return self if is_same else continued


def build_ramp(words: tuple[int, ...], final: int) -> BatchRamp:
    """Read the three numbers of the flag; none of them means one size throughout."""
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
    """Read entries TOKENS:VALUE; return sequences and value of each.

    Args:
        flag: whose value it is, for messages.
        text: entries with blanks between them.
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
            f"grow by a sequence of {seq_length} at least from entry to entry."
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
            f"{final}, by which everything else is planned."
        )
    return BatchRamp(steps[-1][1], start=steps[0][1], samples=steps[-1][0], steps=tuple(steps))


def piece_length(text: str, seq_length: int, consumed: int) -> int:
    """Return the length of ``--seq-length-schedule`` after so many sequences.

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
