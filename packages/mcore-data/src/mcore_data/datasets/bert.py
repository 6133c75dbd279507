"""BERT samples: sentence pairs with masked tokens, from data of ``--split-sentences``.

A pair is two adjacent ranges of sentences of one document, swapped with probability 1/2.
Megatron's second loss (sentence order, ``sop``) predicts whether the ranges are swapped. A
sample depends on seed and index only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.masking import SentenceOptions, choose_spans, word_continuations
from mcore_data.datasets.sentence_map import SentenceMapSpec, build_sentence_map
from mcore_data.tokenizers.protocol import Tokenizer

_MASKED = 0.8  # share of hidden tokens that become [MASK]; half of the rest become random ids
_NO_LABEL = -1
_BERT_MASKING = SentenceOptions()


class Sentences(Protocol):
    """Stored sentences by number, with the documents that own them."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""

    @property
    def documents(self) -> NDArray[np.int64]:
        """Borders of the documents, in sentences."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a range of one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BertIds:
    """Special ids of BERT samples.

    Attributes:
        vocab_size: upper limit of random ids.
        cls: id at the start of a sample.
        sep: id at the end of each part.
        mask: id that replaces masked tokens.
        pad: id that pads a sample.
        continues: for each id whether it continues a word; None: no id does.
    """

    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int = 0
    continues: NDArray[np.bool_] | None = None

    @staticmethod
    def of(tokenizer: Tokenizer) -> "BertIds":
        """Look up the special ids of a WordPiece tokenizer.

        Raises:
            ValueError: if a token is missing.
        """
        names = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
        ids = {role: tokenizer.token_id(name) for role, name in names.items()}
        known = {role: number for role, number in ids.items() if number is not None}
        missing = [name for role, name in names.items() if role not in known]
        if missing:
            raise ValueError(
                f"the tokenizer has no {' and no '.join(missing)}: use "
                "--tokenizer-type BertWordPieceLowerCase or BertWordPieceCase."
            )
        continues = word_continuations(tokenizer)
        return BertIds(vocab_size=tokenizer.vocab_size, continues=continues, **known)


class BERTDataset:
    """Map-style dataset of masked sentence pairs as numpy arrays, in Megatron's names.

    A sample has ``text`` (int64 [S]), ``types`` (int64 [S], 0 and 1 for the two parts),
    ``labels`` (int64 [S], the masked ids, -1 elsewhere), ``loss_mask`` (float32 [S], 1 at
    masked tokens), ``padding_mask`` (int64 [S], 1 for tokens), ``is_random`` (int64 scalar, 1
    if the parts are swapped) and ``truncated`` (int64 scalar).

    Args:
        sentences: the stored sentences.
        ids: special ids.
        sequence_length: S.
        seed: seed of all random choices.
        num_samples: smallest number of samples; 0 means one epoch.
        document_ids: documents to use; None means all.
        masking: how tokens are masked, and how many samples are short.
        classification_head: whether samples are pairs, not single texts.

    Raises:
        ValueError: if no document has enough sentences for a sample.
    """

    def __init__(
        self,
        sentences: Sentences,
        ids: BertIds,
        *,
        sequence_length: int = 512,
        seed: int = 1234,
        num_samples: int = 0,
        document_ids: Sequence[int] | range | None = None,
        masking: SentenceOptions = _BERT_MASKING,
        classification_head: bool = True,
    ) -> None:
        self.sequences = sentences
        self.ids = ids
        self.sequence_length = sequence_length
        self.seed = seed
        self.masking = masking
        self.classification_head = classification_head
        spec = SentenceMapSpec(
            max_length=sequence_length - 3,
            min_sentences=2 if classification_head else 1,
            short_seq_prob=masking.short_seq_prob,
            seed=seed,
            num_samples=num_samples,
        )
        self.map = build_sentence_map(
            sentences.lengths, sentences.documents, document_ids, spec
        )

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, sample: int) -> dict[str, NDArray[Any]]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        random = np.random.default_rng([self.seed, sample])
        first, stop, target = self.map[sample].tolist()
        parts = [self.sequences.get(i).astype(np.int64) for i in range(first, stop)]
        pivot, swapped = len(parts), False
        if self.classification_head:
            pivot = int(random.integers(1, len(parts))) if len(parts) > 1 else 1
            swapped = bool(random.random() < 0.5)
        a = np.concatenate(parts[:pivot])
        b = np.concatenate(parts[pivot:] or [a[:0]])
        if swapped:
            a, b = b, a
        truncated = len(a) + len(b) > target
        a, b = trim_pair(a, b, target, random)
        return self._finish(a, b, target, random) | {
            "is_random": np.array(swapped, np.int64),
            "truncated": np.array(truncated, np.int64),
        }

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Return the sentences of a sample as (sentence, 0, number of tokens)."""
        first, stop, _ = self.map[sample].tolist()
        return [(i, 0, int(self.sequences.lengths[i])) for i in range(first, stop)]

    def _finish(
        self,
        a: NDArray[np.int64],
        b: NDArray[np.int64],
        target: int,
        random: np.random.Generator,
    ) -> dict[str, NDArray[Any]]:
        """Join the parts, mask tokens and pad."""
        ids, S = self.ids, self.sequence_length
        # [CLS] a [SEP] b [SEP]; without a second part only [CLS] a [SEP].
        text = np.concatenate([[ids.cls], a, [ids.sep], b, [ids.sep][: len(b)]])
        types = np.zeros(S, np.int64)
        types[len(a) + 2 : len(text)] = 1
        maskable = np.ones(len(text), bool)
        maskable[[0, len(a) + 1, -1]] = False  # [CLS] and both [SEP]
        share = self.masking.mask_prob
        budget = max(1, min(int(share * target), round(len(text) * share)))
        spans = choose_spans(text, maskable, ids.continues, self.masking, budget, random)
        hidden = np.zeros(S, bool)
        for start, stop in spans:
            hidden[start:stop] = True
        labels = np.full(S, _NO_LABEL, np.int64)
        labels[hidden] = text[hidden[: len(text)]]
        padded = np.full(S, ids.pad, np.int64)
        padded[: len(text)] = text
        padded[hidden] = replace_hidden(labels[hidden], ids, random)
        return {
            "text": padded,
            "types": types,
            "labels": labels,
            "loss_mask": hidden.astype(np.float32),
            "padding_mask": (np.arange(S) < len(text)).astype(np.int64),
        }


def trim_pair(
    a: NDArray[np.int64], b: NDArray[np.int64], target: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drop tokens of the longer part, randomly from its front or back, until both parts fit."""
    bounds = [[0, len(a)], [0, len(b)]]
    while sum(stop - start for start, stop in bounds) > target:
        sizes = [stop - start for start, stop in bounds]
        longer = bounds[0] if sizes[0] > sizes[1] else bounds[1]
        if random.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return a[slice(*bounds[0])], b[slice(*bounds[1])]


def replace_hidden(
    tokens: NDArray[np.int64], ids: BertIds, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return replacements of masked tokens: 80 % mask id, 10 % random id, 10 % unchanged."""
    kind = random.random(len(tokens))
    drawn = random.integers(0, ids.vocab_size, len(tokens))
    replaced = np.where(kind < _MASKED, ids.mask, drawn)
    return np.where(kind >= (1 + _MASKED) / 2, tokens, replaced)
