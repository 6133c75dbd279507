"""Ranks that must know the same, or fail together: JSON over collectives, no pickle.

A rank that raises alone leaves the others waiting in their next collective. Work that can
fail on one rank therefore runs inside ``agreed``, which ends with an exchange of what
failed on each rank.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointError
from mcore_parallel.collectives import gather_bytes, host_device, start_all_reduce, wait
from mcore_parallel.mesh import Axis


def gather_json(value: Any, axis: Axis) -> list[Any]:
    """Collect one JSON value of each rank; all-gathers over ``axis`` twice.

    Args:
        value: what ``json.dumps`` takes; need not be of one size on all ranks.
        axis: ranks that take part; all of them call it.

    Returns:
        The values in axis order, equal on all ranks; decoded from JSON, so tuples are lists
        there, on one rank too.
    """
    return [unpack(content) for content in gather_bytes(pack(value), axis)]


def pack(value: Any) -> bytes:
    """Turn a JSON value into the bytes that travel."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(content: bytes) -> Any:
    """Turn what ``pack`` gave into a JSON value again."""
    return json.loads(zlib.decompress(content))


def any_rank(flags: Sequence[bool], axis: Axis) -> list[bool]:
    """Say of each flag whether it is set on some rank; one all-reduce over ``axis``."""
    return start_any_rank(flags, axis)()


def start_any_rank(flags: Sequence[bool], axis: Axis) -> Callable[[], list[bool]]:
    """Begin ``any_rank``; the function returned waits for the answer."""
    if axis.size == 1:
        return lambda: list(flags)
    mine = torch.tensor([float(flag) for flag in flags], device=host_device(axis))
    answers = start_all_reduce(mine, axis)
    return lambda: [count > 0 for count in wait(answers).tolist()]


@contextmanager
def agreed(axis: Axis) -> Iterator[None]:
    """Run the body on every rank of ``axis``; if one rank raises, all do.

    All-gathers at the end. The body itself must not communicate.

    Raises:
        ValueError: on the ranks that are well, if the others' fault is the user's.
        CheckpointError: on them, if it is that of files or disks.
        RuntimeError: on them, if it is the program's.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    failed = None if failure is None else [_kind(failure), str(failure)]
    answers = gather_json(failed, axis)
    if failure is not None:
        raise failure
    faults = {rank: answer for rank, answer in enumerate(answers) if answer}
    if faults:
        texts = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in faults.items())
        worst = _KINDS[max(number for number, _ in faults.values())]
        raise worst(f"{len(faults)} of {axis.size} ranks failed:\n{texts}")


_KINDS = (ValueError, CheckpointError, RuntimeError)
"""Whose fault it is: the user's, that of files and disks, the program's."""


def _kind(failure: Exception) -> int:
    """Say whose fault a failure is, as a place in ``_KINDS``."""
    if isinstance(failure, ValueError):
        return 0
    return 1 if isinstance(failure, (CheckpointError, OSError)) else 2
