"""Pairs of a chosen and a rejected answer to one prompt, for preference optimization.

A stored text is the chosen conversation followed by the rejected one. Its marks tell which
tokens are answers: 1 in the chosen and 2 in the rejected answer, and 3 at the first token of
the rejected conversation, which is never a label. A row packs full pairs; each conversation is
a document of its own, which attends to nothing else.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import count_from, packed_borders
from mcore_data.datasets.chat import LEARNT, TOKENS, Render, load_template
from mcore_data.datasets.packing import PackedDataset
from mcore_data.indexed.index_format import token_dtype
from mcore_data.indexed.output_lock import make_parent_folder
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

ANSWER_IDS, PAIR_MASK = "answer_ids", "pair_mask"
"""Entries ``[S]`` of a row: number of each token's answer within the row, chosen 2i and
rejected 2i + 1 for pair i; and 1 at one token of each pair."""

_CHOSEN, _REJECTED, _BORDER = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PreferenceReport:
    """Counts of ``prepare_preferences``.

    Attributes:
        num_pairs: pairs written.
        num_tokens: tokens written, of both conversations.
        num_answer_tokens: tokens of both answers.
    """

    num_pairs: int
    num_tokens: int
    num_answer_tokens: int


def read_preferences(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file that have ``chosen`` and ``rejected``."""
    names = {"chosen", "rejected"}
    return read_records(
        path, "--input", "record of chosen and rejected", lambda record: names <= record.keys()
    )


def read_records(
    path: str | Path, flag: str, expected: str, is_valid: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file.

    Args:
        path: of the file.
        flag: option that names the file, for errors.
        expected: content of a line, for errors.
        is_valid: whether an object has that content.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a line that is not valid.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag} {path} is not a file.")
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not is_valid(record):
                raise ValueError(f"{path}, line {number}: no {expected}.")
            yield record


def prepare_preferences(
    records: Iterable[Mapping[str, Any]],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    template: str = "",
) -> PreferenceReport:
    """Write pairs of answers as the two pairs of files ``<prefix>_tokens`` and ``_learnt``.

    A record has one of these forms: ``prompt``, ``chosen`` and ``rejected`` as texts; the same
    as lists of messages; or ``chosen`` and ``rejected`` as whole chats, whose common beginning
    is the prompt.

    Args:
        records: of ``read_preferences``.
        output_prefix: prefix of the outputs.
        tokenizer: encodes the texts; its end of document ends an answer given as text.
        template: text of a Jinja template for messages; "": the tokenizer's.

    Raises:
        ValueError: for a record of another form (names its number).
    """
    make_parent_folder(output_prefix)
    render: Render | None = None
    num_pairs = num_tokens = num_answer_tokens = 0
    dtype = token_dtype(tokenizer.vocab_size).name
    with (
        IndexedWriter(f"{output_prefix}{TOKENS}", dtype) as token_writer,
        IndexedWriter(f"{output_prefix}{LEARNT}", "uint8") as mark_writer,
    ):
        for record in records:
            if render is None and not isinstance(record["chosen"], str):
                render = load_template(template, tokenizer)
            try:
                prompt, *answers = _encode(record, tokenizer, render)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(f"pair {num_pairs + 1}: {error}") from error
            if not (prompt and all(answers)):
                raise ValueError(f"pair {num_pairs + 1}: the prompt or an answer is empty.")
            chosen, rejected = answers
            tokens = [*prompt, *chosen, *prompt, *rejected]
            marks = [0] * len(prompt) + [_CHOSEN] * len(chosen)
            marks += [_BORDER] + [0] * (len(prompt) - 1) + [_REJECTED] * len(rejected)
            token_writer.add_document(tokens)
            mark_writer.add_document(marks)
            num_pairs += 1
            num_tokens += len(tokens)
            num_answer_tokens += len(chosen) + len(rejected)
    return PreferenceReport(num_pairs, num_tokens, num_answer_tokens)


def _encode(
    record: Mapping[str, Any], tokenizer: Tokenizer, render: Render | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens of the prompt, of the chosen and of the rejected answer."""

    def ids(text: str, is_whole: bool) -> list[int]:
        found = tokenizer.encode(text, add_special_tokens=False)
        end = [] if is_whole or tokenizer.eod is None else [tokenizer.eod]
        return [*found, *end]

    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str):
        if not isinstance(record.get("prompt"), str):
            raise ValueError("answers are texts, and there is no prompt as a text.")
        prompt = tokenizer.encode(record["prompt"], add_special_tokens=True)
        if prompt and prompt[-1] == tokenizer.eod and len(prompt) > 1:
            prompt = prompt[:-1]  # an end that the tokenizer adds to every text
        return prompt, ids(chosen, False), ids(rejected, False)
    assert render is not None
    beginning = record.get("prompt")
    if beginning is None:
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        count = same.index(False) if False in same else len(same)
        beginning, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if isinstance(beginning, str):
        beginning = [{"role": "user", "content": beginning}]
    text = render(beginning, True)
    answers = []
    for answer in (chosen, rejected):
        whole = render([*beginning, *answer], False)
        if not whole.startswith(text):
            raise ValueError(
                "the chat template writes the prompt in another way before an answer: use a "
                "template that only adds."
            )
        answers.append(ids(whole[len(text) :], True))
    return ids(text, True), answers[0], answers[1]


class PreferenceDataset(PackedDataset):
    """Rows that pack full pairs; the loss mask counts the tokens of both answers.

    A sample has the entries of ``PackedDataset``, ``answer_ids`` (int64 [S]) and ``pair_mask``
    (float32 [S]). Pairs of more than S + 1 tokens are left out.

    Args:
        tokens: stored pairs.
        marks: their marks.
        sequence_length: S.
        **options: further options of ``PackedDataset``.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        marks: IndexedDataset,
        sequence_length: int,
        **options: Any,
    ) -> None:
        super().__init__(
            tokens, weights=marks, sequence_length=sequence_length, too_long="skip", **options
        )
        self.marks = marks
        lengths = np.asarray(tokens.lengths)
        if num_long := int((lengths > sequence_length + 1).sum()):
            log.warning(
                "%d of %d pairs have more than --seq-length %d tokens in both conversations "
                "together and are left out.",
                *(num_long, len(lengths), sequence_length),
            )

    def __getitem__(self, sample: int | None) -> dict[str, NDArray[Any]]:
        """Return one row; None: a row without any pair."""
        if sample is None:
            return self[0] | {PAIR_MASK: np.zeros(self.sequence_length, np.float32)}
        S = self.sequence_length
        row = {name: np.zeros(S, np.int64) for name in ("tokens", "labels", ANSWER_IDS)}
        row |= {name: np.zeros(S, np.float32) for name in ("loss_mask", PAIR_MASK)}
        starts: list[int] = []
        place = 0
        for pair, source in enumerate(self.sources(sample)):
            text, marks = self.sequences.get(*source), self.marks.get(*source)
            border = int(np.flatnonzero(marks == _BORDER)[0])
            for answer, part in enumerate((slice(0, border), slice(border, None))):
                ids, counts = text[part], np.isin(marks[part][1:], (_CHOSEN, _REJECTED))
                stop = place + len(ids) - 1
                row["tokens"][place:stop], row["labels"][place:stop] = ids[:-1], ids[1:]
                row["loss_mask"][place:stop] = counts
                row[ANSWER_IDS][place:stop] = 2 * pair + answer
                if answer == 0:
                    row[PAIR_MASK][place] = 1.0
                starts.append(stop)
                place = stop
        borders = np.array([start for start in starts if start < S])
        positions = {"position_ids": count_from(borders, S)}
        return row | positions | packed_borders(borders, S)


def build_preferences(tokens: IndexedDataset, **options: Any) -> PreferenceDataset:
    """Build the rows of stored pairs, from the dataset of their tokens."""
    prefix = tokens.prefix.removesuffix(TOKENS) + LEARNT
    marks = IndexedDataset(prefix, mmap=tokens.mmap, cache_path=tokens.cache_path)
    return PreferenceDataset(tokens, marks, **options)
