"""Exchange of JSON between ranks without pickle, and errors that are raised on all ranks.

If one rank raises alone, the others wait in their next collective. Work that can fail on one
rank therefore runs inside ``raise_on_all_ranks``, which ends with an exchange of all
ranks' errors.
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
    """Collect a JSON value from each rank; all-gathers over ``axis`` twice.

    Args:
        value: any JSON value; its size may differ between ranks.
        axis: ranks that call it together.

    Returns:
        The values in axis order, equal on all ranks; decoded from JSON, so that tuples become
        lists, on one rank too.
    """
    return [unpack(content) for content in gather_bytes(pack(value), axis)]


def pack(value: Any) -> bytes:
    """Encode a JSON value as bytes to send."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(content: bytes) -> Any:
    """Inverse of ``pack``."""
    return json.loads(zlib.decompress(content))


def any_rank(flags: Sequence[bool], axis: Axis) -> list[bool]:
    """Return for each flag whether any rank has set it; one all-reduce over ``axis``."""
    return start_any_rank(flags, axis)()


def start_any_rank(flags: Sequence[bool], axis: Axis) -> Callable[[], list[bool]]:
    """Start ``any_rank``; the returned function waits for its result."""
    if axis.size == 1:
        return lambda: list(flags)
    own_flags = torch.tensor([float(flag) for flag in flags], device=host_device(axis))
    answers = start_all_reduce(own_flags, axis)
    return lambda: [count > 0 for count in wait(answers).tolist()]


@contextmanager
def raise_on_all_ranks(axis: Axis) -> Iterator[None]:
    """Run the body on every rank of ``axis``; if it raises on one rank, raise on all.

    All-gathers at the end. The body itself must not communicate.

    Raises:
        ValueError: on healthy ranks, if another rank received bad input.
        CheckpointError: on healthy ranks, if another rank met damaged files or disks.
        RuntimeError: on healthy ranks, if another rank has a bug.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks have the error
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
"""Kinds of errors: bad input, files and disks, bugs."""


def _kind(failure: Exception) -> int:
    """Return the kind of an error as an index of ``_KINDS``."""
    if isinstance(failure, ValueError):
        return 0
    return 1 if isinstance(failure, (CheckpointError, OSError)) else 2
