"""Which sentences make a sample of BERT and T5: neighbours of one document up to a length.

Sentences are gathered until a sample's target length is reached; no single sentence is left
over at a document's end. All documents go forward side by side, a sample of each at a time.
A target is the full length or, for a share of the samples, a shorter one.

The order differs from Megatron's on purpose: there one stream of random numbers runs through
all documents in turn, so no document can be laid out without those before it. Here the target
of a document's k-th sample is a hash of seed, epoch, document and k, and each epoch is
shuffled by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LONGEST_SENTENCE = 512
"""Documents with a longer sentence are left out, unless it is their only one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceMapSpec:
    """What, besides the documents, decides the samples.

    Attributes:
        max_length: tokens of a sample, special ones not counted.
        min_sentences: 2 where a sample is a pair, else 1.
        short_seq_prob: share of the samples with a shorter target.
        seed: of targets and order.
        num_samples: samples wanted at least; 0 means one epoch.
    """

    max_length: int
    min_sentences: int = 1
    short_seq_prob: float = 0.1
    seed: int = 1234
    num_samples: int = 0


def build_sentence_map(
    lengths: NDArray[np.int32],
    borders: NDArray[np.int64],
    document_ids: Sequence[int] | range | NDArray[np.int64] | None,
    spec: SentenceMapSpec,
) -> NDArray[np.int64]:
    """Rows (first sentence, last sentence + 1, target length) in shuffled order, int64 [N, 3].

    Args:
        lengths: tokens of every sentence.
        borders: document j owns the sentences ``borders[j]`` to ``borders[j + 1]``.
        document_ids: documents to use; None means all.
        spec: lengths, counts and seed.
    """
    lengths, borders = np.asarray(lengths), np.asarray(borders, np.int64)
    documents = range(len(borders) - 1) if document_ids is None else document_ids
    usable = _usable(lengths, borders, np.asarray(documents, np.int64), spec.min_sentences)
    if not len(usable):
        raise ValueError(
            f"no document has the {spec.min_sentences} sentences that a sample needs: "
            "preprocess with --split-sentences, or give more documents."
        )
    epochs, total = [], 0
    while not epochs or total < spec.num_samples:
        rows = map_epoch(lengths, borders, usable, spec, len(epochs))
        random = np.random.default_rng([spec.seed, len(epochs)])
        epochs.append(rows[random.permutation(len(rows))])
        total += len(rows)
    return np.concatenate(epochs)


def map_epoch(
    lengths: NDArray[np.int32],
    borders: NDArray[np.int64],
    documents: NDArray[np.int64],
    spec: SentenceMapSpec,
    epoch: int,
) -> NDArray[np.int64]:
    """Samples of one epoch: the first of each document, then the second of each, ..."""
    tokens_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    starts, ends = borders[documents], borders[documents + 1]
    found, number = [], 0
    while len(starts):
        targets = target_lengths(spec, epoch, documents, number)
        reached = np.searchsorted(tokens_before, tokens_before[starts] + targets)
        stops = np.maximum(reached, starts + spec.min_sentences)
        stops = np.where(ends - stops <= 1, ends, stops)
        found.append(np.stack([starts, stops, targets], axis=1))
        going = stops < ends
        starts, ends, documents = stops[going], ends[going], documents[going]
        number += 1
    return np.concatenate(found)


def target_lengths(
    spec: SentenceMapSpec, epoch: int, documents: NDArray[np.int64], number: int
) -> NDArray[np.int64]:
    """Target of the ``number``-th sample of each document."""
    state = np.uint64(spec.seed)
    for part in (epoch, number):
        state = _mix(state + np.uint64(part))
    drawn = _mix(state + documents.astype(np.uint64))
    short = (drawn >> np.uint64(11)) * 2.0**-53 < spec.short_seq_prob
    shorter = 2 + (_mix(drawn) % np.uint64(max(1, spec.max_length - 1))).astype(np.int64)
    return np.where(short, shorter, spec.max_length)


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), after its increment."""
    with np.errstate(over="ignore"):
        z = np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _usable(
    lengths: NDArray[np.int32],
    borders: NDArray[np.int64],
    documents: NDArray[np.int64],
    min_sentences: int,
) -> NDArray[np.int64]:
    counts = borders[documents + 1] - borders[documents]
    too_long = np.concatenate([[0], np.cumsum(lengths > _LONGEST_SENTENCE)])
    has_long = too_long[borders[documents + 1]] > too_long[borders[documents]]
    return documents[(counts >= max(1, min_sentences)) & ~(has_long & (counts > 1))]
