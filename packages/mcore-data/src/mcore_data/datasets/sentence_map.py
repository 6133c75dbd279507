"""Groups sentences into samples of BERT and T5: consecutive sentences of one document.

A sample takes sentences until its target length is reached; a single last sentence of a
document joins the sample before it. The target is the full length or, for a share of the
samples, a shorter one. The k-th samples of all documents are computed together.

The order differs from Megatron's on purpose: Megatron draws the targets of all documents from
one stream of random numbers, so a document depends on all documents before it. Here the target
of a document's k-th sample is a hash of seed, epoch, document and k, and each epoch is shuffled
separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LONGEST_SENTENCE = 512
"""Documents with a longer sentence are not used, unless they have only one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceMapSpec:
    """Parameters that, together with the documents, determine the samples.

    Attributes:
        max_length: tokens of a sample, without special tokens.
        min_sentences: 2 if a sample is a pair, else 1.
        short_seq_prob: share of the samples with a shorter target.
        seed: seed of targets and order.
        num_samples: smallest number of samples; 0 means one epoch.
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
    """Return samples (first sentence, last sentence + 1, target), shuffled, int64 [N, 3].

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
    """Return the samples of one epoch: the first of each document, the second of each, ..."""
    tokens_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    starts, ends = borders[documents], borders[documents + 1]
    rows, number = [], 0
    while len(starts):
        targets = target_lengths(spec, epoch, documents, number)
        reached = np.searchsorted(tokens_before, tokens_before[starts] + targets)
        stops = np.maximum(reached, starts + spec.min_sentences)
        stops = np.where(ends - stops <= 1, ends, stops)  # a single last sentence joins
        rows.append(np.stack([starts, stops, targets], axis=1))
        unfinished = stops < ends
        starts, ends, documents = stops[unfinished], ends[unfinished], documents[unfinished]
        number += 1
    return np.concatenate(rows)


def target_lengths(
    spec: SentenceMapSpec, epoch: int, documents: NDArray[np.int64], number: int
) -> NDArray[np.int64]:
    """Return the target length of the ``number``-th sample of each document."""
    state = np.uint64(spec.seed)
    for part in (epoch, number):
        state = _mix(state + np.uint64(part))
    drawn = _mix(state + documents.astype(np.uint64))
    short = (drawn >> np.uint64(11)) * 2.0**-53 < spec.short_seq_prob
    shorter = 2 + (_mix(drawn) % np.uint64(max(1, spec.max_length - 1))).astype(np.int64)
    return np.where(short, shorter, spec.max_length)


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Return SplitMix64's increment and finaliser (Steele, Lea, Flood 2014)."""
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
