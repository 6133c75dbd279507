"""From a block of records to arrays of tokens: the work that a worker process does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mcore_data.index_format import token_dtype
from mcore_data.records import BadLine, Block, Text, parse_lines
from mcore_data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Tokens of one key.

    Attributes:
        tokens: of all sequences, one after the other, in the stored dtype.
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
        keys: what each key gave.
        num_documents: good records.
        num_lines: good and bad lines.
        bad: lines that gave no record, numbered from 1 in the block.
    """

    keys: dict[str, EncodedTexts]
    num_documents: int
    num_lines: int
    bad: list[BadLine]


def encode_block(
    block: Block,
    tokenizer: Tokenizer,
    json_keys: Sequence[str],
    *,
    eod: int | None = None,
    split: Callable[[str], list[str]] | None = None,
) -> EncodedBlock:
    """Parse and tokenize a block.

    Args:
        block: lines of a file.
        tokenizer: for the texts.
        json_keys: keys of a record to tokenize.
        eod: id that ends each document that is not empty; None adds none.
        split: cuts a text into the sentences that become sequences; None leaves it whole.
    """
    parsed = parse_lines(block.read(), json_keys)
    columns = zip(*parsed.records, strict=True) if parsed.records else ([] for _ in json_keys)
    keys = {
        key: encode_texts([_cut(text, split) for text in column], tokenizer, eod)
        for key, column in zip(json_keys, columns, strict=True)
    }
    return EncodedBlock(keys, len(parsed.records), parsed.num_lines, parsed.bad)


def encode_texts(texts: Sequence[Text], tokenizer: Tokenizer, eod: int | None) -> EncodedTexts:
    """Tokenize documents given as texts or as lists of sentences.

    Sentences without a token are dropped; a document without any keeps its place with no
    sequence.
    """
    sentences_of = [[text] if isinstance(text, str) else text for text in texts]
    encoded = iter(tokenizer.encode_batch(list(chain.from_iterable(sentences_of))))
    kept: list[list[int]] = []
    counts = np.zeros(len(texts), np.int32)
    for document, sentences in enumerate(sentences_of):
        before = len(kept)
        kept.extend(ids for ids in (next(encoded) for _ in sentences) if ids)
        counts[document] = len(kept) - before
        if counts[document] and eod is not None:
            kept[-1].append(eod)
    lengths = np.fromiter(map(len, kept), np.int32, len(kept))
    tokens = np.fromiter(
        chain.from_iterable(kept),
        token_dtype(tokenizer.vocab_size),
        int(lengths.sum(dtype=np.int64)),
    )
    return EncodedTexts(tokens, lengths, counts)


def _cut(text: Text, split: Callable[[str], list[str]] | None) -> Text:
    """Sentences of a text; a list already is its sentences."""
    return split(text) if split and isinstance(text, str) else text
