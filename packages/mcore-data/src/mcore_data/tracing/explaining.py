"""``mcore-data explain``: the documents of a sample, and the steps that read a document.

The run's ``data_plan.json`` maps steps to documents; the ``.origins`` file of a pair maps
documents to lines of the input files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed.origins import Origins, kept_values
from mcore_data.loading.sampler import CyclicSampler
from mcore_data.preprocessing.blocks import describe
from mcore_data.preprocessing.sources import count_records
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import (
    DataPlan,
    batch_size_at,
    find_plan,
    find_step,
    rebuild,
    sample_at,
    samples_before,
)
from mcore_data.tracing.tracing import SampleRange, find, prefixes, trace

_SHOWN = 400
"""Largest number of characters of a document's text that are shown."""


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """A range of a document in a sample.

    Attributes:
        prefix: prefix of the ``.bin``/``.idx`` pair; "" for mock data.
        document: number of the document in the pair.
        source: the range of the stored sequence.
        position: position in the sample of the range's first token.
        bin: the ``.bin`` file that holds the range; "" for mock data.
        first_byte: first byte of the range in this file; -1 for mock data.
        last_byte: one past the last byte of the range; -1 for mock data.
        text: decoded text of the tokens; without a tokenizer the ids.
        origin: input file and line or row of the document; "" if unknown.
    """

    prefix: str
    document: int
    source: SampleRange
    position: int
    bin: str
    first_byte: int
    last_byte: int
    text: str
    origin: str


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
    source: SampleRange


class RunData:
    """The training data of a run, rebuilt from its latest checkpoint.

    Raises:
        FileNotFoundError: if the checkpoint has no plan, or data do not exist any more.
        ValueError: if the data have changed since the checkpoint.
    """

    def __init__(self, run: str | Path) -> None:
        self.plan: DataPlan
        self.plan, folder = find_plan(run)
        saved = folder / "tokenizer"
        self.tokenizer: Tokenizer | None = load_tokenizer(saved) if saved.is_dir() else None
        self.dataset = rebuild(self.plan, self.tokenizer)
        self._stored = {getattr(each, "prefix", ""): each for each in prefixes(self.dataset)}
        self._origins: dict[str, Origins] = {}
        self._records_before: dict[tuple[str, int], int] = {}

    def explain(self, step: int, sample: int) -> list[DocumentRange]:
        """Return the document ranges that a sample of a step consists of.

        Args:
            step: number of the step, counted from 1.
            sample: index in the step's global batch.

        Raises:
            ValueError: if the step or the sample does not exist.
        """
        order_position = samples_before(self.plan.stretches, step) + sample
        size = batch_size_at(self.plan.stretches, step)
        if not 0 <= sample < size:
            raise ValueError(f"step {step} has the samples 0 to {size - 1}, not {sample}.")
        endless = self.plan.data.dataloader_type == "cyclic"
        if order_position >= len(self.dataset) and not endless:
            raise ValueError(f"the run's data end before step {step}.")
        pieces, position = [], 0
        for source in trace(self.dataset, sample_at(self.plan, self.dataset, order_position)):
            pieces.append(self._piece(source, position))
            # The last token of a packed chat is only a label and takes no position.
            data = self.plan.data
            position += source.length - int(data.sft) - 2 * int(data.preferences)
        return pieces

    def visits(self, prefix: str, document: int) -> Iterator[Visit]:
        """Yield the completed steps that read a document, in the order of the run.

        Args:
            prefix: prefix of the pair; "" if the run reads a single pair.
            document: number of the document in the pair.

        Raises:
            ValueError: if the run has no such source or document.
        """
        name = self._full_prefix(prefix)
        reads = []
        for sequence in _sequences_of(self._stored[name], document):
            for sample in find(self.dataset, name, sequence):
                parts = [p for p in trace(self.dataset, sample) if p.sequence == sequence]
                reads += [(position, parts) for position in self._positions_of(sample)]
        for position, parts in sorted(reads, key=lambda each: each[0]):
            step, index = find_step(self.plan.stretches, position)
            for part in parts:
                yield Visit(step, index, part)

    def origin(self, prefix: str, document: int) -> str:
        """Return the input file, line or row, and kept values of a document; "" if unknown.

        For a part of a file the records before the part are counted in the file. If the file
        is missing or has another size, the text names the byte from which they are counted.

        Args:
            prefix: prefix of the pair; "" if the run reads a single pair.
            document: number of the document in the pair.

        Raises:
            ValueError: if the run has no such source.
        """
        name = self._full_prefix(prefix)
        if name not in self._origins:
            self._origins[name] = Origins(name)
        origin = self._origins[name].find(document)
        if origin is None:
            return ""
        number, suffix = origin.record, ""
        if origin.start:
            path = Path(origin.path)
            if path.is_file() and path.stat().st_size == origin.size:
                key = origin.path, origin.start
                if key not in self._records_before:
                    self._records_before[key] = count_records(
                        origin.path, origin.kind, origin.start
                    )
                number += self._records_before[key]
            else:
                suffix = f" (counted from byte {origin.start})"
        kept = kept_values(name, document, self._stored[name].cache_path)
        values = "".join(f", {key}: {value}" for key, value in kept.items())
        return f"{describe(origin.path, origin.kind, number)}{suffix}{values}"

    def _full_prefix(self, prefix: str) -> str:
        known = [name for name in self._stored if not prefix or _same(name, prefix)]
        if len(known) != 1:
            hint = f", not {prefix}" if prefix else ": give one by --prefix"
            raise ValueError(f"the run reads {', '.join(self._stored)}{hint}.")
        return known[0]

    def _positions_of(self, sample: int) -> Iterator[int]:
        """Yield the positions of a sample in the data order that the run has used so far."""
        used = self.plan.consumed_samples
        if self.plan.data.dataloader_type != "cyclic":
            if sample < used:
                yield sample
            return
        size = len(self.dataset)
        for epoch in range(-(-used // size)):
            order = CyclicSampler.order(self.plan.seed, epoch, size)
            position = epoch * size + int(np.flatnonzero(order == sample)[0])
            if position < used:
                yield position

    def _piece(self, source: SampleRange, position: int) -> DocumentRange:
        stored = self._stored[source.prefix]
        tokens = stored.get(source.sequence, source.offset, source.length).tolist()
        text = self.tokenizer.decode(tokens) if self.tokenizer else str(tokens)
        document, path, first, last, origin = source.sequence, "", -1, -1, ""
        if source.prefix:
            borders = stored.documents
            document = int(np.searchsorted(borders, source.sequence, side="right")) - 1
            size = stored.dtype.itemsize
            first = int(stored.index.pointers[source.sequence]) + source.offset * size
            path, first = stored.locate(first)
            last = first + source.length * size
            origin = self.origin(source.prefix, document)
            if stored.blocked is not None and stored.blocked[source.sequence]:
                text = "(--blocklist: not shown to the model)"
        return DocumentRange(
            source.prefix, document, source, position, str(path), first, last, text, origin
        )


def draw_explanation(data: RunData, step: int, sample: int) -> list[str]:
    """Format ``RunData.explain`` as lines: one for each document, then its text."""
    lines = [f"step {step}, sample {sample} of {batch_size_at(data.plan.stretches, step)}:"]
    if data.plan.fim.fim_data:
        lines.append("  (as stored; --fim-data rewrites it for training)")
    for piece in data.explain(step, sample):
        source = piece.source
        stop = source.offset + source.length
        where = f"document {piece.document} of {piece.prefix or 'mock data'}"
        stored = ""
        if piece.prefix:
            stored = f", bytes {piece.first_byte}-{piece.last_byte} of {piece.bin}"
        lines.append(
            f"  tokens {piece.position}-{piece.position + source.length} are tokens "
            f"{source.offset}-{stop} of {where}{stored}"
        )
        if piece.prefix:
            lines.append(f"    {draw_origin(piece.origin, piece.prefix)}")
        shown = piece.text if len(piece.text) <= _SHOWN else piece.text[:_SHOWN] + "..."
        lines += [f"    {line}" for line in shown.splitlines() or [""]]
    return lines


def draw_origin(origin: str, prefix: str) -> str:
    """Return a line with a document's origin, or why it is unknown."""
    if origin:
        return f"from {origin}"
    return (
        f"input unknown: {prefix} has no .origins file (only mcore-data preprocess writes one)"
    )


def _sequences_of(stored: Any, document: int) -> range:
    borders = getattr(stored, "documents", None)
    count = len(stored.lengths) if borders is None else len(borders) - 1
    if not 0 <= document < count:
        raise ValueError(f"there are the documents 0 to {count - 1}, not {document}.")
    if borders is None:
        return range(document, document + 1)
    return range(int(borders[document]), int(borders[document + 1]))


def _same(stored: str, prefix: str) -> bool:
    if stored == prefix:
        return True
    return bool(prefix) and Path(stored).resolve() == Path(prefix).resolve()
