"""Packed sequences: a row holds several documents, and attention stays inside a document.

A packed row is split over context ranks like any other row (zigzag over the full row, not per
document), so documents may have any lengths, without padding. The cost is balance: a rank whose
chunks hold short documents computes less. Document borders are integers on the host, so the
blocks of the score matrix are known before any kernel starts, without synchronisation.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.context_parallel.zigzag import chunk_length, own_chunks
from mcore_parallel.mesh import Axis


class DocumentPieces:
    """A range of tokens divided into consecutive pieces: documents, or parts of documents.

    Attributes:
        borders: 0, the first token of every further piece, and the length of the range.
        longest: tokens of the longest piece.
    """

    def __init__(self, borders: Sequence[int]) -> None:
        """Set the borders.

        Raises:
            ValueError: if the borders do not ascend from 0.
        """
        self.borders = tuple(borders)
        if len(borders) < 2 or borders[0] != 0 or any(a >= b for a, b in pairwise(borders)):
            raise ValueError(
                f"borders of documents must ascend from 0 to the row's length, not {borders}"
            )
        self.longest = max(b - a for a, b in pairwise(self.borders))
        self._tensors: dict[torch.device, Tensor] = {}

    @property
    def length(self) -> int:
        """Number of tokens in the range."""
        return self.borders[-1]

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, " n"]:
        """Return the borders as int32 on a device; copied once, without synchronisation."""
        if device not in self._tensors:
            self._tensors[device] = self._borders_on(device)
        return self._tensors[device]

    def _borders_on(self, device: torch.device) -> Tensor:
        if len(self.borders) == 2:  # one piece: [0, length] computed on the device, no copy
            return torch.arange(
                0, self.length + 1, self.length, dtype=torch.int32, device=device
            )
        borders = torch.tensor(self.borders, dtype=torch.int32)
        if device.type == "cuda":
            borders = borders.pin_memory()
        return borders.to(device, non_blocking=True)

    def first_seen(self, device: torch.device | None = None) -> Int[Tensor, " S"]:
        """Return the first token of each token's piece: the first key it attends to."""
        borders = torch.tensor(self.borders, device=device)
        return borders[:-1].repeat_interleave(borders.diff(), output_size=self.length)


class Documents:
    """Document borders of every row of a micro-batch; equal on all tensor and context ranks.

    Attributes:
        rows: the documents of each full row.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """Set each row's borders: 0, the first token of every further document, S.

        Raises:
            ValueError: if borders do not ascend from 0, or rows differ in length.
        """
        self.rows = tuple(DocumentPieces(borders) for borders in rows)
        if len({pieces.length for pieces in self.rows}) != 1:
            raise ValueError(
                f"rows of one batch have equal lengths, not {[p.length for p in self.rows]}"
            )
        self._pieces: dict[tuple[int, tuple[range, ...]], DocumentPieces] = {}
        self._cut: dict[int, Documents] = {}

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Tensor, "B n"]) -> "Documents":
        """Build from a batch's tensor of borders.

        Args:
            cu_seqlens: on the CPU; each row ascends from 0 to S and is padded with S.

        Raises:
            ValueError: if a row does not ascend from 0, or the tensor has another number of
                dimensions.
        """
        if cu_seqlens.dim() != 2:
            raise ValueError(
                f"cu_seqlens {list(cu_seqlens.shape)} must have a line of borders for each row "
                "of the batch, [B, n]: for a single row pass cu_seqlens.unsqueeze(0)"
            )
        return cls([row.unique_consecutive().tolist() for row in cu_seqlens])

    @property
    def length(self) -> int:
        """Number of tokens in each row, S."""
        return self.rows[0].length

    @property
    def are_whole_rows(self) -> bool:
        """Whether each row is one document."""
        return all(len(pieces.borders) == 2 for pieces in self.rows)

    def check(self, num_rows: int, length: int) -> None:
        """Raise ``ValueError`` unless a batch has these numbers of rows and tokens."""
        if (num_rows, length) != (len(self.rows), self.length):
            raise ValueError(
                f"documents are of {len(self.rows)} rows of {self.length} tokens, but the "
                f"batch has {num_rows} rows of {length} (rows are whole, over all context "
                "ranks)"
            )

    def cut(self, size: int) -> "Documents":
        """Return documents with each document cut into pieces of at most ``size`` tokens."""
        if size not in self._cut:
            self._cut[size] = Documents(
                [
                    [at for a, b in pairwise(row.borders) for at in range(a, b, size)]
                    + [row.length]
                    for row in self.rows
                ]
            )
        return self._cut[size]

    def flat(self) -> DocumentPieces:
        """Return the documents of all rows as one range, with the rows concatenated."""
        key = (-1, ())
        if key not in self._pieces:
            borders = [0]
            for number, pieces in enumerate(self.rows):
                borders += [number * self.length + border for border in pieces.borders[1:]]
            self._pieces[key] = DocumentPieces(borders)
        return self._pieces[key]

    def within(self, row: int, chunks: Sequence[range]) -> DocumentPieces:
        """Return the documents of a row inside concatenated token ranges.

        The parts of one document at the end of a range and at the start of the next range form
        one piece, since their tokens attend to each other.
        """
        key = (row, tuple(chunks))
        if key not in self._pieces:
            borders, begin = [0], 0
            for number, chunk in enumerate(chunks):
                # A border between two ranges, unless a document spans the gap between them.
                if number and self.bounds(row, chunk.start)[0] >= chunks[number - 1].stop:
                    borders.append(begin)
                inside = (b for b in self.rows[row].borders if chunk.start < b < chunk.stop)
                borders += [begin + border - chunk.start for border in inside]
                begin += len(chunk)
            self._pieces[key] = DocumentPieces([*borders, begin])
        return self._pieces[key]

    def bounds(self, row: int, token: int) -> tuple[int, int]:
        """Return the first token, and one past the last, of the document of a token."""
        borders = self.rows[row].borders
        index = bisect_right(borders, token)
        return borders[index - 1], borders[index]

    def shared(self, row: int, queries: range, keys: range) -> tuple[range, range] | None:
        """Return the queries and keys of the document that spans both ranges, if any.

        Every such query attends to every such key.

        Args:
            row: row of the batch.
            queries: a range of the row.
            keys: an earlier range of the row, so that at most one document spans both.
        """
        begin, end = self.bounds(row, queries.start)
        if begin >= keys.stop:
            return None
        return range(queries.start, min(end, queries.stop)), range(
            max(begin, keys.start), keys.stop
        )


def own_ranges(length: int, axis: Axis) -> list[range]:
    """Return the two token ranges of a full row that this rank holds, in order.

    Raises:
        ValueError: if the row does not divide into two chunks a rank.
    """
    chunk = chunk_length(length, axis)
    return [range(i * chunk, (i + 1) * chunk) for i in own_chunks(axis.rank, axis.size)]


def check_own_tokens(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    documents: Documents | None,
) -> None:
    """Check the shapes of this rank's q, k and v; no communication.

    Args:
        q: queries of this rank's tokens.
        k: keys of the same tokens.
        v: values of the same tokens.
        axis: context ranks.
        documents: documents of the full packed rows; None: each row is one document.

    Raises:
        ValueError: if the tokens are not two equal chunks, or do not match the documents' rows,
            or if keys and values do not fit the queries.
    """
    fits = q.shape[:2] == k.shape[:2] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"keys {list(k.shape)} and values {list(v.shape)} do not fit queries "
            f"{list(q.shape)}: all are [sequence, batch, heads, head dimension] of this rank's "
            "tokens, and the query heads a multiple of the key/value heads"
        )
    length = q.shape[0] * axis.size
    chunk_length(length, axis)
    if documents is not None:
        documents.check(q.shape[1], length)
