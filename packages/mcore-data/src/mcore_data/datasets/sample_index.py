"""Document, sample and shuffle index of a GPT dataset: which tokens sample k consists of.

The documents of a split are repeated for as many epochs as needed, shuffled, concatenated and
cut into samples of L + E tokens that overlap by E (E = 1: the label of a sample's last token is
the first token of the next sample). The order equals Megatron's exactly, from one legacy
``RandomState``; the walk over documents is vectorised.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.caching import cached_arrays

_SEPARATE_BELOW = 0.80  # Megatron's: used share of the final epoch
_INT32_MAX = np.iinfo(np.int32).max
_UINT32_LIMIT = 2**32 - 2
_FORMAT = b"sample-index-1"
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndexSpec:
    """Parameters that, together with the documents, determine the order of samples.

    Attributes:
        sequence_length: L, input tokens of a sample.
        extra_tokens: E, 1 if labels are the tokens shifted by one, else 0.
        num_samples: smallest number of samples; 0 means one epoch.
        seed: seed of the two shuffles.
        drop_last_partial: whether to drop the last tokens if they do not fill a sample.
    """

    sequence_length: int
    extra_tokens: int = 1
    num_samples: int = 0
    seed: int = 1234
    drop_last_partial: bool = True

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.num_samples < 0:
            raise ValueError(
                f"{self.num_samples} samples of --seq-length {self.sequence_length} cannot be "
                "made: use at least 1 token, and at least 0 samples."
            )


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The three arrays; sample k spans rows ``shuffle[k]`` and the next of ``samples``.

    Attributes:
        documents: int32, sequence ids in the order in which they are concatenated.
        samples: int32 or int64 [num_samples + 1, 2]: position in ``documents`` and token
            offset at which each sample starts.
        shuffle: uint32 or int64 [num_samples].
    """

    documents: NDArray[np.int32]
    samples: NDArray[Any]
    shuffle: NDArray[Any]


def build_sample_index(
    lengths: NDArray[np.int32], ids: NDArray[np.int32] | range, spec: SampleIndexSpec
) -> SampleIndex:
    """Build the order of samples over the sequences ``ids``.

    Raises:
        ValueError: if the split has too few tokens for one sample.
    """
    # Each document is shuffled as one int64 that holds its id and its length. The order equals
    # that of shuffling ids, and no random access to ``lengths`` is needed afterwards.
    is_range = isinstance(ids, range)
    packed = np.arange(ids.start, ids.stop, ids.step) if is_range else ids.astype(np.int64)
    columns = packed.view(np.int32).reshape(-1, 2)  # little-endian: [id, upper half of id = 0]
    columns[:, 1] = lengths[ids.start : ids.stop : ids.step] if is_range else lengths[ids]
    tokens_per_epoch = int(columns[:, 1].sum(dtype=np.int64))
    num_epochs = count_epochs(tokens_per_epoch, spec)
    separate = _is_final_epoch_separate(tokens_per_epoch, num_epochs, spec)
    random = np.random.RandomState(spec.seed)  # Megatron's order needs the legacy generator
    shuffled = _shuffle_documents(packed, num_epochs, random, separate)
    columns = shuffled.view(np.int32).reshape(-1, 2)
    samples = cut_samples(columns[:, 1], spec)
    num_samples = len(samples) - 1
    before_final = _samples_before(tokens_per_epoch, num_epochs, spec)
    parts = [0, before_final, num_samples] if separate else [0, num_samples]
    documents = np.ascontiguousarray(columns[:, 0])
    return SampleIndex(documents, samples, _shuffle_samples(parts, random))


def count_epochs(tokens_per_epoch: int, spec: SampleIndexSpec) -> int:
    """Return the number of epochs that give at least ``spec.num_samples`` samples."""
    length, extra = spec.sequence_length, spec.extra_tokens
    if tokens_per_epoch == 0:
        raise ValueError("the split has no tokens: give it more documents or a larger share.")
    if spec.num_samples == 0:
        if tokens_per_epoch < length + extra and spec.drop_last_partial:
            raise ValueError(
                f"the split has {tokens_per_epoch} tokens, fewer than one sample of "
                f"{length + extra}: give it more documents or lower --seq-length."
            )
        return 1
    return -(-(spec.num_samples * length + extra) // tokens_per_epoch)


def cut_samples(sizes: NDArray[np.int32], spec: SampleIndexSpec) -> NDArray[Any]:
    """Return rows (position in the order of documents, token offset) of the samples' borders.

    Sample k starts at token k*L of the concatenated documents. The document of a border is the
    one that holds token k*L + E - 1, the last token before the cut: a cut at a document's end
    belongs to that document. Documents are processed in pieces that fit a processor's cache.

    Args:
        sizes: tokens of the documents in the order in which they are concatenated.
        spec: lengths of samples.
    """
    length, extra = spec.sequence_length, spec.extra_tokens
    total = int(sizes.sum(dtype=np.int64))
    whole, rest = divmod(total - extra, length)
    num_samples = whole + (rest > 0 and not spec.drop_last_partial)
    fits = len(sizes) <= _INT32_MAX  # offsets always fit: lengths are stored as int32
    samples = np.empty((num_samples + 1, 2), np.int32 if fits else np.int64)
    row, before = 0, 0
    positions = np.arange(_PIECE)
    for first in range(0, len(sizes), _PIECE):
        piece = sizes[first : first + _PIECE]
        ends = np.cumsum(piece, dtype=np.int64)
        ends += before
        before = int(ends[-1])
        last_rows = (ends - extra) // length  # number of the last border up to each end
        counts = np.diff(last_rows, prepend=row - 1)  # borders inside each document
        stop = int(last_rows[-1]) + 1
        owners = np.flatnonzero(counts)  # the document of each border
        if len(owners) != stop - row:  # some document has several borders
            owners = np.repeat(positions[: len(piece)], counts)
        samples[row:stop, 0] = owners + first
        samples[row:stop, 1] = np.arange(row, stop) * length - (ends - piece)[owners]
        row = stop
    if row <= num_samples:  # the last sample is partial and ends at the end of the text
        last = len(sizes) - 1 - int((sizes[::-1] > 0).argmax())
        samples[row] = last, sizes[last] - extra
    samples[0] = 0
    return samples


def load_sample_index(
    lengths: NDArray[np.int32],
    ids: NDArray[np.int32] | range,
    spec: SampleIndexSpec,
    cache_folder: str | Path = "",
) -> SampleIndex:
    """Build the index in memory, or map it from a cache under its content hash.

    All processes may call this function at the same time, also on a shared disk (``caching``).

    Args:
        lengths: tokens of every sequence of the dataset.
        ids: the sequences that belong to this split.
        spec: lengths, counts and seed.
        cache_folder: folder of the cached arrays; "" builds the arrays in memory.
    """
    if not cache_folder:
        return build_sample_index(lengths, ids, spec)

    def build() -> list[NDArray[Any]]:
        index = build_sample_index(lengths, ids, spec)
        return [index.documents, index.samples, index.shuffle]

    key = content_hash(lengths, ids, spec)
    names = ("document_index", "sample_index", "shuffle_index")
    return SampleIndex(*cached_arrays(cache_folder, key, names, build))


def content_hash(
    lengths: NDArray[np.int32], ids: NDArray[np.int32] | range, spec: SampleIndexSpec
) -> str:
    """Return a hash of everything that determines the index; paths do not count."""
    digest = hashlib.blake2b(_FORMAT, digest_size=16)
    digest.update(repr(spec).encode())
    for part in (lengths, ids):
        if isinstance(part, range):
            digest.update(repr(part).encode())
        else:
            digest.update(str(len(part)).encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _samples_before(tokens_per_epoch: int, num_epochs: int, spec: SampleIndexSpec) -> int:
    """Return the number of samples that end before the final epoch."""
    tokens = (num_epochs - 1) * tokens_per_epoch - spec.extra_tokens
    return tokens // spec.sequence_length


def _is_final_epoch_separate(
    tokens_per_epoch: int, num_epochs: int, spec: SampleIndexSpec
) -> bool:
    """Whether less than 80 % of the final epoch is used, so that it is shuffled separately.

    Shuffled together with the other epochs, the unused documents would be missing at random
    places of the whole run, not at its end.
    """
    if num_epochs == 1:
        return False
    from_final = spec.num_samples - _samples_before(tokens_per_epoch, num_epochs, spec)
    per_epoch = (tokens_per_epoch - spec.extra_tokens) // spec.sequence_length
    assert 0 <= from_final <= per_epoch + 1
    return from_final < int(_SEPARATE_BELOW * per_epoch)


def _shuffle_documents(
    documents: NDArray[np.int64], num_epochs: int, random: np.random.RandomState, separate: bool
) -> NDArray[np.int64]:
    """Return all epochs shuffled together, or the last separately; may change ``documents``."""
    if num_epochs == 1:
        random.shuffle(documents)
        return documents
    shuffled = np.tile(documents, num_epochs - separate)
    random.shuffle(shuffled)
    if not separate:
        return shuffled
    random.shuffle(documents)
    return np.concatenate([shuffled, documents])


def _shuffle_samples(borders: list[int], random: np.random.RandomState) -> NDArray[Any]:
    dtype = np.uint32 if borders[-1] < _UINT32_LIMIT else np.int64
    order = np.arange(borders[-1])  # int64: numpy shuffles it faster, in the same order
    for start, stop in pairwise(borders):
        random.shuffle(order[start:stop])
    return order.astype(dtype)
