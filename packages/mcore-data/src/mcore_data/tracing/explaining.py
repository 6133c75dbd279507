"""``mcore-data explain``: which text made a sample of a step, and where a document went."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed.index_format import bin_path
from mcore_data.loading.sampler import CyclicSampler
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import (
    DataPlan,
    batch_size_of,
    find_plan,
    rebuild,
    sample_at,
    samples_before,
    step_of,
)
from mcore_data.tracing.tracing import Source, find, prefixes, trace


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a document in a sample.

    Attributes:
        prefix: of the ``.bin``/``.idx`` pair; "" for made-up data.
        document: number of the document in the pair.
        source: the range of the stored sequence.
        position: first token in the sample.
        first_byte: in the ``.bin``; -1 for made-up data.
        last_byte: behind the range in the ``.bin``; -1 for made-up data.
        text: what the tokens say; the ids where there is no tokenizer.
    """

    prefix: str
    document: int
    source: Source
    position: int
    first_byte: int
    last_byte: int
    text: str


@dataclass(frozen=True, slots=True)
class Visit:
    """A step that reads a document.

    Attributes:
        step: counted from 1.
        sample: index in the step's global batch.
        source: the range of the stored sequence.
    """

    step: int
    sample: int
    source: Source


class RunData:
    """The training data of a run, as its last checkpoint tells it.

    Args:
        run: run folder or step folder.

    Raises:
        FileNotFoundError: if there is no plan, or its data are gone.
        ValueError: if the data have changed since.
    """

    def __init__(self, run: str | Path) -> None:
        self.plan: DataPlan
        self.plan, folder = find_plan(run)
        kept = folder / "tokenizer"
        self.tokenizer: Tokenizer | None = load_tokenizer(kept) if kept.is_dir() else None
        self.dataset = rebuild(self.plan, self.tokenizer)
        self._stored = {getattr(each, "prefix", ""): each for each in prefixes(self.dataset)}

    def explain(self, step: int, sample: int) -> list[Piece]:
        """Say which documents made a sample.

        Args:
            step: counted from 1.
            sample: index in the step's global batch.

        Raises:
            ValueError: if the step or the sample does not exist.
        """
        place = samples_before(self.plan.stretches, step) + sample
        size = batch_size_of(self.plan.stretches, step)
        if not 0 <= sample < size:
            raise ValueError(f"step {step} has the samples 0 to {size - 1}, not {sample}.")
        endless = self.plan.data.dataloader_type == "cyclic"
        if place >= len(self.dataset) and not endless:
            raise ValueError(f"the run's data end before step {step}.")
        pieces, position = [], 0
        for source in trace(self.dataset, sample_at(self.plan, self.dataset, place)):
            pieces.append(self._piece(source, position))
            # The last token of a packed chat is a label alone: the next begins in its place.
            position += source.length - int(self.plan.data.sft)
        return pieces

    def visits(self, prefix: str, document: int) -> Iterator[Visit]:
        """Yield the steps done so far that read a document, in the order of the run.

        Args:
            prefix: of the pair; "" where the run reads one only.
            document: its number in the pair.

        Raises:
            ValueError: if the run has no such source or document.
        """
        known = [name for name in self._stored if not prefix or _same(name, prefix)]
        if len(known) != 1:
            hint = f", not {prefix}" if prefix else ": give one by --prefix"
            raise ValueError(f"the run reads {', '.join(self._stored)}{hint}.")
        stored = self._stored[known[0]]
        sequences = _sequences_of(stored, document)
        found = []
        for sequence in sequences:
            for sample in find(self.dataset, known[0], sequence):
                parts = trace(self.dataset, sample)
                mine = [part for part in parts if part.sequence == sequence]
                found += [(place, mine) for place in self._places_of(sample)]
        for place, parts in sorted(found, key=lambda each: each[0]):
            step, index = step_of(self.plan.stretches, place)
            for part in parts:
                yield Visit(step, index, part)

    def _places_of(self, sample: int) -> Iterator[int]:
        """Places of the data order, used so far, at which a sample stands."""
        used = self.plan.consumed_samples
        if self.plan.data.dataloader_type != "cyclic":
            if sample < used:
                yield sample
            return
        size = len(self.dataset)
        for epoch in range(-(-used // size)):
            order = CyclicSampler.order(self.plan.seed, epoch, size)
            place = epoch * size + int(np.flatnonzero(order == sample)[0])
            if place < used:
                yield place

    def _piece(self, source: Source, position: int) -> Piece:
        stored = self._stored[source.prefix]
        tokens = stored.get(source.sequence, source.offset, source.length).tolist()
        text = self.tokenizer.decode(tokens) if self.tokenizer else str(tokens)
        document, first, last = source.sequence, -1, -1
        if source.prefix:
            borders = stored.documents
            document = int(np.searchsorted(borders, source.sequence, side="right")) - 1
            size = stored.dtype.itemsize
            first = int(stored.index.pointers[source.sequence]) + source.offset * size
            last = first + source.length * size
        return Piece(source.prefix, document, source, position, first, last, text)


def draw_explanation(data: RunData, step: int, sample: int, width: int = 400) -> list[str]:
    """Draw ``explain`` for people: a line for each document, then its text."""
    lines = [f"step {step}, sample {sample} of {batch_size_of(data.plan.stretches, step)}:"]
    if data.plan.fim.fim_data:
        lines.append("  (as stored; --fim-data rewrites it for training)")
    for piece in data.explain(step, sample):
        source = piece.source
        stop = source.offset + source.length
        where = f"document {piece.document} of {piece.prefix or 'made-up data'}"
        stored = ""
        if piece.prefix:
            stored = f", bytes {piece.first_byte}-{piece.last_byte} of {bin_path(piece.prefix)}"
        lines.append(
            f"  tokens {piece.position}-{piece.position + source.length} are tokens "
            f"{source.offset}-{stop} of {where}{stored}"
        )
        shown = piece.text if len(piece.text) <= width else piece.text[:width] + "..."
        lines += [f"    {line}" for line in shown.splitlines() or [""]]
    return lines


def _sequences_of(stored: Any, document: int) -> range:
    borders = getattr(stored, "documents", None)
    count = len(stored.lengths) if borders is None else len(borders) - 1
    if not 0 <= document < count:
        raise ValueError(f"there are the documents 0 to {count - 1}, not {document}.")
    if borders is None:
        return range(document, document + 1)
    return range(int(borders[document]), int(borders[document + 1]))


def _same(stored: str, given: str) -> bool:
    return stored == given or (bool(given) and Path(stored).resolve() == Path(given).resolve())
