"""Pairs of a chosen and a rejected answer to one prompt, for preference optimization.

A stored text is the chosen conversation followed by the rejected one. A second pair of files
marks each token: 1 in the chosen answer, 2 in the rejected answer, 3 at the first token of the
rejected conversation, which is never a label, and 0 elsewhere. A row packs full pairs; each
conversation is a document of its own, and attention does not cross its borders.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import count_from, packed_borders
from mcore_data.datasets.chat import (
    LEARNT,
    TOKENS,
    Render,
    check_template_writes,
    load_template,
)
from mcore_data.datasets.chat_records import OnBadRecord, checked_messages, encode_records
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


def prepare_preferences(
    path: str | Path,
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    template: str = "",
    *,
    on_bad_record: OnBadRecord = "refuse",
) -> PreferenceReport:
    """Write preferences of a JSONL file as the pairs ``<prefix>_tokens`` and ``_learnt``.

    A record has one of these forms: ``prompt``, ``chosen`` and ``rejected`` as texts; the same
    as lists of messages; or ``chosen`` and ``rejected`` as whole chats, whose common beginning
    is the prompt.

    Args:
        path: JSONL file.
        output_prefix: prefix of the outputs.
        tokenizer: encodes the texts; its end of document ends an answer given as text.
        template: text of a Jinja template for messages; "": the tokenizer's.
        on_bad_record: refuse the file, or leave out the records that cannot be used.

    Raises:
        ValueError: for records of another form (names their lines).
    """
    make_parent_folder(output_prefix)
    num_pairs = num_tokens = num_answer_tokens = 0
    dtype = token_dtype(tokenizer.vocab_size).name
    with (
        IndexedWriter(f"{output_prefix}{TOKENS}", dtype) as token_writer,
        IndexedWriter(f"{output_prefix}{LEARNT}", "uint8") as mark_writer,
    ):
        encode = _Encoder(tokenizer, template)
        for prompt, chosen, rejected in encode_records(path, encode, on_bad_record):
            tokens = [*prompt, *chosen, *prompt, *rejected]
            marks = [0] * len(prompt) + [_CHOSEN] * len(chosen)
            marks += [_BORDER] + [0] * (len(prompt) - 1) + [_REJECTED] * len(rejected)
            token_writer.add_document(tokens)
            mark_writer.add_document(marks)
            num_pairs += 1
            num_tokens += len(tokens)
            num_answer_tokens += len(chosen) + len(rejected)
    return PreferenceReport(num_pairs, num_tokens, num_answer_tokens)


class _Encoder:
    """Encodes the prompt, the chosen and the rejected answer of records."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template

    @cached_property
    def render(self) -> Render:
        """The chat template, which records of texts do not need."""
        return load_template(self.template, self.tokenizer)

    def __call__(self, record: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
        if missing := [key for key in ("chosen", "rejected") if key not in record]:
            raise ValueError(
                f"no key {' and '.join(map(repr, missing))} "
                f"(keys: {', '.join(record) or 'none'}): "
                "name the two answers chosen and rejected, and their prompt prompt"
            )
        if record["chosen"] == record["rejected"]:
            raise ValueError("chosen and rejected are equal, so nothing is preferred")
        kinds = {isinstance(record[key], str) for key in ("chosen", "rejected")}
        if len(kinds) > 1:
            raise ValueError(
                "one of chosen and rejected is a text, the other a list: give both as texts or "
                "both as lists of messages"
            )
        encoded = self._texts(record) if True in kinds else self._chats(record)
        for name, ids in zip(("prompt", "chosen", "rejected"), encoded, strict=True):
            if not ids:
                raise ValueError(f"{name} is empty")
        return encoded

    def _texts(self, record: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
        tokenizer = self.tokenizer
        if not isinstance(record.get("prompt"), str):
            raise ValueError(
                "chosen and rejected are texts, and prompt is not: give the prompt as a text, "
                'or each answer as a list of messages, [{"role": "assistant", "content": ...}]'
            )
        for name in ("chosen", "rejected"):
            if not record[name]:
                raise ValueError(f"{name} is empty")
        prompt = tokenizer.encode(record["prompt"], add_special_tokens=True)
        if prompt and prompt[-1] == tokenizer.eod and len(prompt) > 1:
            prompt = prompt[:-1]  # an end that the tokenizer adds to every text
        end = [] if tokenizer.eod is None else [tokenizer.eod]
        chosen, rejected = (
            [*tokenizer.encode(record[name], add_special_tokens=False), *end]
            for name in ("chosen", "rejected")
        )
        return prompt, chosen, rejected

    def _chats(self, record: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
        chosen, rejected = (
            checked_messages(record[key], key) for key in ("chosen", "rejected")
        )
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        num_common = same.index(False) if False in same else len(same)
        prompt = record.get("prompt")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if prompt is not None:
            prompt = checked_messages(prompt, "prompt")
        # Many published sets repeat the prompt in both answers, which are then whole chats.
        if prompt is None or chosen[:num_common][-len(prompt) :] == prompt:
            prompt = chosen[:num_common]
            chosen, rejected = chosen[num_common:], rejected[num_common:]
            if not prompt:
                raise ValueError(
                    "chosen and rejected begin with different messages, and there is no "
                    "prompt: both must begin with the messages of the prompt"
                )
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer or answer[0]["role"] != "assistant":
                raise ValueError(
                    f"the answer {name!r} does not begin with a message of the assistant: give "
                    "the prompt once, as prompt or at the beginning of both answers"
                )
        tools = record.get("tools") or None
        prompt_text = self.render(prompt, True, tools=tools)
        answers = []
        for answer in (chosen, rejected):
            check_template_writes([*prompt, *answer], self.render, tools)
            conversation = self.render([*prompt, *answer], False, tools=tools)
            if not conversation.startswith(prompt_text):
                raise ValueError(
                    "the chat template renders the prompt differently when an answer follows: "
                    "use a template that appends only."
                )
            answers.append(
                self.tokenizer.encode(
                    conversation[len(prompt_text) :], add_special_tokens=False
                )
            )
        return (
            self.tokenizer.encode(prompt_text, add_special_tokens=False),
            answers[0],
            answers[1],
        )


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
        ends: list[int] = []
        start = 0
        for pair, source in enumerate(self.sources(sample)):
            text, marks = self.sequences.get(*source), self.marks.get(*source)
            border = int(np.flatnonzero(marks == _BORDER)[0])
            for answer, part in enumerate((slice(0, border), slice(border, None))):
                ids, counts = text[part], np.isin(marks[part][1:], (_CHOSEN, _REJECTED))
                stop = start + len(ids) - 1
                row["tokens"][start:stop], row["labels"][start:stop] = ids[:-1], ids[1:]
                row["loss_mask"][start:stop] = counts
                row[ANSWER_IDS][start:stop] = 2 * pair + answer
                if answer == 0:
                    row[PAIR_MASK][start] = 1.0
                ends.append(stop)
                start = stop
        borders = np.array([end for end in ends if end < S])
        positions = {"position_ids": count_from(borders, S)}
        return row | positions | packed_borders(borders, S)


def build_preferences(tokens: IndexedDataset, **options: Any) -> PreferenceDataset:
    """Build the rows of stored pairs, from the dataset of their tokens."""
    prefix = tokens.prefix.removesuffix(TOKENS) + LEARNT
    marks = IndexedDataset(prefix, mmap=tokens.mmap, cache_path=tokens.cache_path)
    return PreferenceDataset(tokens, marks, **options)
