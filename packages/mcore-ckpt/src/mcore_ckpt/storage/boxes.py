"""Rectangular regions of a tensor, as plain integers: intersection, cover, spans of bytes."""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a rectangular region."""


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    begin = tuple(map(max, a[0], b[0]))
    lengths = tuple(
        min(x + n, y + m) - start
        for x, n, y, m, start in zip(a[0], a[1], b[0], b[1], begin, strict=True)
    )
    return None if any(length <= 0 for length in lengths) else (begin, lengths)


def shift_box(box: Box, origin: Sequence[int]) -> Box:
    """Return the box relative to ``origin``."""
    return tuple(b - o for b, o in zip(box[0], origin, strict=True)), box[1]


def cover_problems(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return the reasons why boxes do not cover a tensor exactly: bounds, overlap, holes.

    Boxes within bounds, without overlap and with the tensor's volume cover it.

    Returns:
        One message for each problem; empty if every element is in exactly one box.
    """
    for offsets, lengths in boxes:
        if len(offsets) != len(shape) or len(lengths) != len(shape):
            return [f"box {box_text((offsets, lengths))} must have {len(shape)} dimensions"]
        inside = all(
            o >= 0 and n > 0 and o + n <= s
            for o, n, s in zip(offsets, lengths, shape, strict=True)
        )
        if not inside:
            return [f"box {box_text((offsets, lengths))} is not inside {tuple(shape)}"]
    problems = []
    pair = _overlap(boxes)
    if pair is not None:
        problems.append(f"boxes {box_text(pair[0])} and {box_text(pair[1])} overlap")
    volume = sum(prod(lengths) for _, lengths in boxes)
    if volume != prod(shape) and not problems:
        problems.append(f"{prod(shape) - volume} of {prod(shape)} elements are in no box")
    return problems


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two overlapping boxes, or None.

    Sweeps along dimension 0 and compares each box with those that reach its first row.
    """
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        start = box[0][0] if box[0] else 0
        open_boxes = [b for b in open_boxes if not b[0] or b[0][0] + b[1][0] > start]
        for other in open_boxes:
            if intersect(box, other) is not None:
                return other, box
        open_boxes.append(box)
    return None


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the first and one-past-last flat element of a box of a row-major tensor."""
    steps = strides(shape)
    first = sum(o * s for o, s in zip(box[0], steps, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(*box, steps, strict=True))
    return first, last + 1


def small_spans(shape: Sequence[int], box: Box, limit: int) -> Iterator[Box]:
    """Yield the parts of a box, each spanning at most ``limit`` flat elements of the tensor.

    A box that is contiguous in memory is also split, into groups of rows.
    """
    first, stop = span(shape, box)
    # Split along the first dimension of more than one index: the parts are as long as
    # possible in memory.
    dim = next((i for i, n in enumerate(box[1]) if n > 1), None)
    if stop - first <= limit or dim is None:
        yield box
        return
    offsets, lengths = box
    rows = max(1, limit // prod(shape[dim + 1 :]))
    for row in range(0, lengths[dim], rows):
        count = min(rows, lengths[dim] - row)
        part = (
            (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]),
            (*lengths[:dim], count, *lengths[dim + 1 :]),
        )
        if count == lengths[dim]:
            yield part
        else:
            yield from small_spans(shape, part, limit)


def box_text(box: Box) -> str:
    """Return a box as text in the form of slices: ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*box, strict=False)) + "]"
