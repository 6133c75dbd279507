"""Worker processes that encode blocks; results are returned in the order of the blocks.

Each worker gets its next block before it has finished the current one, so that it does not wait
while the main process writes. Tokens are returned in anonymous shared memory that is mapped
before the fork, so that no file remains if a process is killed; the rest of a result is small
and is sent through a pipe. If processes cannot be forked, or a result is larger than its slot
of shared memory, the tokens are sent through the pipe too.
"""

import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from mcore_data.preprocessing.blocks import Block
from mcore_data.preprocessing.encoding import EncodedBlock, Encoder

Task = tuple[int, Block]
"""A source's number and a block of it."""
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_AHEAD = 2
_SLOTS = 4
_SLOT_BYTES_PER_BYTE = 5


@dataclass(slots=True)
class _Worker:
    """A worker process, its pipe, and its slots of shared memory."""

    process: Any
    pipe: Connection
    slots: list[mmap]
    free: deque[int] = field(default_factory=lambda: deque(range(_SLOTS)))
    num_blocks: int = 0


def encode_all(
    encoder: Encoder,
    tasks: Iterator[Task],
    *,
    num_workers: int,
    block_bytes: int,
    start_method: str = START_METHOD,
) -> Generator[tuple[Task, EncodedBlock], None, None]:
    """Encode blocks in worker processes; yield results in the order of the blocks.

    At most four blocks for each worker are in memory. The tokens of a result are valid until
    the next result is requested.

    Args:
        encoder: encodes the blocks; inherited by the fork, or pickled.
        tasks: the blocks.
        num_workers: number of processes; 1 encodes in this process.
        block_bytes: usual size of a block, from which shared memory is sized.
        start_method: start method of multiprocessing; only ``fork`` shares memory.

    Raises:
        RuntimeError: if a worker died.
        Exception: the exception of a worker, when the result of its block is due.
    """
    if num_workers == 1:
        for task in tasks:
            yield task, encoder.encode_block(task[1])
        return
    slot_bytes = block_bytes * _SLOT_BYTES_PER_BYTE if start_method == "fork" else 0
    workers = _start(encoder, num_workers, slot_bytes, start_method)
    try:
        yield from _schedule(workers, tasks)
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def max_workers(num_cores: int) -> int:
    """Return the limit of workers: four per core, since some wait for files, at least eight."""
    return max(8, 4 * num_cores)


def start_daemon(context: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Start and return a daemon process, which ends with this process."""
    process = context.Process(target=work, args=arguments, daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in a process with threads; the child runs only ``work``.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _schedule(
    workers: list[_Worker], tasks: Iterator[Task]
) -> Iterator[tuple[Task, EncodedBlock]]:
    """Send tasks to all workers, and yield the results in the order of the tasks."""
    waiting: deque[tuple[Task, _Worker, int]] = deque()
    done: dict[tuple[int, int], Any] = {}  # by number of the worker and of its slot
    worker_numbers = {id(worker): number for number, worker in enumerate(workers)}
    task: Task | None = None
    has_tasks = True
    while True:
        # Send tasks while a worker can accept one, to the worker with the fewest blocks.
        while has_tasks and any(map(_can_accept, workers)):
            task = task or next(tasks, None)
            has_tasks = task is not None
            ready = [worker for worker in workers if _can_accept(worker, task)]
            if not task or not ready:
                break
            worker = min(ready, key=lambda worker: worker.num_blocks)
            slot = worker.free.popleft()
            _send(worker, (slot, task[1]))
            worker.num_blocks += 1
            waiting.append((task, worker, slot))
            task = None
        if not waiting:
            return
        # Receive all finished results; wait for one only if the next in order is missing.
        head, worker, slot = waiting[0]
        first = (worker_numbers[id(worker)], slot)
        busy = {other.pipe: other for other in workers if other.num_blocks}
        for pipe in wait(list(busy), 0 if first in done else None):
            other = busy[pipe]  # pyrefly: ignore
            number, answer = _receive(other)
            done[worker_numbers[id(other)], number] = answer
            other.num_blocks -= 1
        if first in done:
            waiting.popleft()
            answer = done.pop(first)
            if isinstance(answer, BaseException):
                raise answer
            yield head, _with_tokens(answer, worker.slots[slot] if worker.slots else None)
            worker.free.append(slot)


def _can_accept(worker: _Worker, task: Task | None = None) -> bool:
    """Whether a task can be sent to a worker without a deadlock.

    A task that holds its bytes may fill the pipe, and then sending waits until the worker
    reads. If the worker were sending a result at the same time, both would wait forever, so
    such a task is sent to an idle worker only.
    """
    holds_bytes = task is not None and task[1].data is not None
    return bool(worker.free) and worker.num_blocks < (1 if holds_bytes else _AHEAD)


def _start(
    encoder: Encoder, num_workers: int, slot_bytes: int, start_method: str
) -> list[_Worker]:
    context = get_context(start_method)
    workers: list[_Worker] = []
    for _ in range(num_workers):
        parent_pipe, child_pipe = context.Pipe()
        slots = [mmap(-1, slot_bytes) for _ in range(_SLOTS)] if slot_bytes else []
        # A forked child inherits the parent's ends of all pipes. It closes them, since a
        # worker gets no end of file at the parent's death while another process has the
        # parent's end open.
        inherited = [worker.pipe for worker in workers] + [parent_pipe] if slot_bytes else []
        process = start_daemon(context, _work, (encoder, child_pipe, slots, inherited))
        child_pipe.close()
        workers.append(_Worker(process, parent_pipe, slots))
    return workers


def _work(
    encoder: Encoder, pipe: Connection, slots: list[mmap], inherited: list[Connection]
) -> None:
    """Encode received blocks until the parent ends; runs in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends its workers
    for other in inherited:
        other.close()
    while True:
        try:
            slot, block = pipe.recv()
        except (EOFError, ConnectionError):  # a reset if the parent left an answer unread
            return
        answer: Any
        try:
            result = encoder.encode_block(block)
            answer = _without_tokens(result, slots[slot]) if slots else result
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note("in a worker process:\n" + traceback.format_exc())
            answer = error
        try:
            pipe.send((slot, answer))
        except ConnectionError:
            return


def _without_tokens(result: EncodedBlock, slot: mmap) -> EncodedBlock:
    """Move tokens to the slot while they fit; ``_with_tokens`` finds them by their lengths."""
    offset = 0
    keys = {}
    for key, part in result.keys.items():
        size = part.tokens.nbytes
        if offset + size > len(slot):
            keys[key] = part
            continue
        if size:
            np.frombuffer(slot, np.uint8, size, offset)[:] = part.tokens.view(np.uint8)
        stub = np.empty(0, part.tokens.dtype)
        keys[key] = replace(part, tokens=stub)
        offset += size
    return replace(result, keys=keys)


def _with_tokens(result: EncodedBlock, slot: mmap | None) -> EncodedBlock:
    """Return the block with the tokens that its worker wrote to the slot."""
    if slot is None:
        return result
    offset = 0
    keys = {}
    for key, part in result.keys.items():
        count = int(part.lengths.sum(dtype=np.int64))
        if count == len(part.tokens):
            keys[key] = part
            continue
        tokens = np.frombuffer(slot, part.tokens.dtype, count, offset)
        keys[key] = replace(part, tokens=tokens)
        offset += tokens.nbytes
    return replace(result, keys=keys)


def _send(worker: _Worker, message: Any) -> None:
    try:
        worker.pipe.send(message)
    except (BrokenPipeError, ConnectionResetError):
        raise _death(worker) from None


def _receive(worker: _Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _death(worker) from None


def _death(worker: _Worker) -> RuntimeError:
    worker.process.join(1)
    return RuntimeError(
        f"a worker process died (exit code {worker.process.exitcode}), most likely because "
        "memory ran out. Repeat the command with fewer --workers to continue the run."
    )
