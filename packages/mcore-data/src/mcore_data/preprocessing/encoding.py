"""Encodes a block of records as arrays of tokens, in a worker process or in the main one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.engines.protocol import Engine
from mcore_data.engines.spot_check import CheckReport, Verifier
from mcore_data.preprocessing.blocks import Block, describe
from mcore_data.preprocessing.records import BadRecord, Text


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Tokens of one key.

    Attributes:
        tokens: tokens of all sequences, concatenated, in the stored dtype.
        lengths: int32, tokens of each sequence.
        sequences: int32, sequences of each document; 0 for an empty one.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block of records, tokenized.

    Attributes:
        keys: tokens of each key.
        num_documents: records with a text for every key.
        num_records: all records.
        bad: records that were left out, numbered from 1 in the block.
        num_texts: texts encoded.
        num_characters: characters of these texts.
        checked: texts and characters that the reference tokenizer encoded too.
        kept: values of the kept keys of all documents, a line of JSON each.
    """

    keys: dict[str, EncodedTexts]
    num_documents: int
    num_records: int
    bad: list[BadRecord]
    num_texts: int = 0
    num_characters: int = 0
    checked: CheckReport = field(default_factory=CheckReport)
    kept: bytes = b""

    def origins(self, source: int, before: int) -> NDArray[np.int64]:
        """Return the rows for ``IndexedWriter.add_origins``: one after each bad record.

        Args:
            source: number of the input.
            before: records of the input before this block; 0 adds the input's first row.
        """
        bad = np.array([record.number for record in self.bad], np.int64)
        documents = bad - np.arange(1, len(bad) + 1)  # good records before each bad one
        rows = np.stack([documents, np.full_like(bad, source), before + bad + 1], axis=1)
        return rows if before else np.concatenate([[[0, source, 1]], rows])


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes blocks; holds everything that a worker process needs.

    Attributes:
        engine: encodes the texts.
        verifier: compares ids with the tokenizer's; None compares none, since the engine is
            the tokenizer itself.
        json_keys: keys of a record to tokenize.
        dtype: dtype of the stored tokens.
        eod: id appended to each document that is not empty; None appends none.
        split: cuts a text into the sentences that become sequences; None keeps each text as
            one sequence.
        keep_keys: keys of a record whose values are stored with the document.
    """

    engine: Engine
    verifier: Verifier | None
    json_keys: tuple[str, ...]
    dtype: np.dtype
    eod: int | None = None
    split: Callable[[str], list[str]] | None = None
    keep_keys: tuple[str, ...] = ()

    def encode_block(self, block: Block) -> EncodedBlock:
        """Parse and tokenize a block.

        Raises:
            EngineDifferenceError: if the engine's ids of a text are not the tokenizer's.
        """
        parsed = block.parse(self.json_keys, self.keep_keys)
        num_documents = len(parsed.columns[0])
        keys: dict[str, EncodedTexts] = {}
        num_texts, num_characters, checked = 0, 0, CheckReport()
        for number, (key, column) in enumerate(
            zip(self.json_keys, parsed.columns, strict=True)
        ):
            documents = [_cut(text, self.split) for text in column]
            texts, owners = _flatten(documents)
            ids = self.engine.encode(texts)
            characters = sum(map(len, texts))
            if self.verifier is None:
                report = CheckReport(len(texts), characters)
            else:

                def where(i: int, key: str = key, owners: Sequence[int] | None = owners) -> str:
                    record = parsed.number_of(i if owners is None else owners[i])
                    counted_from = f" (counted from byte {block.start})" if block.start else ""
                    return (
                        f"{describe(block.path, block.kind, record)}{counted_from}, key {key!r}"
                    )

                seed = (block.start, num_documents, number)
                report = self.verifier.check(texts, ids, seed=seed, describe=where)
            checked.texts += report.texts
            checked.characters += report.characters
            num_texts += len(texts)
            num_characters += characters
            keys[key] = self._store(documents, ids)
        return EncodedBlock(
            keys,
            num_documents,
            parsed.num_records,
            parsed.bad,
            num_texts,
            num_characters,
            checked,
            b"".join(parsed.kept),
        )

    def _store(self, documents: Sequence[Text], ids: list[NDArray[Any]]) -> EncodedTexts:
        """Join the ids of all documents, in the stored dtype, with ends of document.

        Sentences without tokens are dropped; a document without tokens has 0 sequences.
        """
        end = None if self.eod is None else np.array([self.eod], np.uint32)
        counts = np.ones(len(documents), np.int32)
        parts: list[NDArray[Any]] = []
        lengths: list[int] = []
        encoded = iter(ids)
        for number, document in enumerate(documents):
            before = len(lengths)
            for _ in range(1 if isinstance(document, str) else len(document)):
                sequence = next(encoded)
                if len(sequence):
                    parts.append(sequence)
                    lengths.append(len(sequence))
            counts[number] = len(lengths) - before
            if end is not None and len(lengths) > before:
                parts.append(end)
                lengths[-1] += 1
        tokens = np.concatenate(parts) if parts else np.zeros(0, self.dtype)
        return EncodedTexts(_as_stored(tokens, self.dtype), np.array(lengths, np.int32), counts)


def _flatten(documents: Sequence[Text]) -> tuple[list[str], list[int] | None]:
    """Return all texts, and the document of each text; None if each text is a document."""
    if all(isinstance(document, str) for document in documents):
        return list(map(str, documents)), None
    lists = [[text] if isinstance(text, str) else text for text in documents]
    owners = [number for number, texts in enumerate(lists) for _ in texts]
    return list(chain.from_iterable(lists)), owners


def _as_stored(tokens: NDArray[Any], dtype: np.dtype) -> NDArray[Any]:
    """Cast ids, which are not negative, to the stored dtype; equal item sizes need no copy."""
    if tokens.dtype.itemsize == dtype.itemsize:
        return tokens.view(dtype)
    return tokens.astype(dtype)


def _cut(text: Text, split: Callable[[str], list[str]] | None) -> Text:
    """Cut a text into sentences; a list of sentences is returned unchanged."""
    return split(text) if split and isinstance(text, str) else text
