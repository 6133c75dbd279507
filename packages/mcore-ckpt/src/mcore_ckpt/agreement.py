"""Ranks that must know the same, or fail together: JSON over collectives, no pickle.

A rank that raises alone leaves the others waiting in their next collective. Work that can
fail on one rank therefore runs inside ``agreed``, which ends with every rank telling every
other whether it is well.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel.collectives import all_gather
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
    content = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
    if axis.size == 1:
        return [json.loads(zlib.decompress(content))]
    device = _device(axis)
    sizes = all_gather(torch.tensor([len(content)], device=device), axis).tolist()
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = all_gather(mine.to(device), axis).cpu().view(axis.size, -1)
    return [
        json.loads(zlib.decompress(row[:size].numpy().tobytes()))
        for row, size in zip(rows, sizes, strict=True)
    ]


@contextmanager
def agreed(axis: Axis) -> Iterator[None]:
    """Run the body on every rank of ``axis``; if one rank raises, all do.

    All-gathers at the end. The body itself must not communicate.

    Raises:
        ValueError: on the ranks that are well, if the others' fault is the user's.
        RuntimeError: on the ranks that are well, with what the others said.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    told = None if failure is None else [isinstance(failure, ValueError), str(failure)]
    answers = gather_json(told, axis)
    if failure is not None:
        raise failure
    faults = {rank: answer for rank, answer in enumerate(answers) if answer}
    if faults:
        texts = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in faults.items())
        kind = ValueError if all(mine for mine, _ in faults.values()) else RuntimeError
        raise kind(f"{len(faults)} of {axis.size} ranks failed:\n{texts}")


def _device(axis: Axis) -> torch.device:
    """Return where tensors must live to travel over the axis."""
    if "cpu" in str(dist.get_backend_config(axis.group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
