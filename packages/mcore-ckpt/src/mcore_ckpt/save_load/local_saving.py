"""Fast checkpoints on the local disks of hosts, through nvidia-resiliency-ext, for one layout.

Each rank saves its shards to a disk of its host, and copies of shards of ranks on other hosts,
so that a job that lost a host resumes from a few minutes before. The package decides which
iteration is complete, which rank keeps which copy and what is deleted. This module replaces the
package's pickle files by an index and safetensors, and its retrieval of copies, which needs
GPUs. Local checkpoints are not resharded; those of ``save`` are.

Reference:
    https://nvidia.github.io/nvidia-resiliency-ext (local checkpointing)
"""

import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_base.atomic_files import write_durably
from mcore_ckpt.config import LocalConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.claims import build_claims, piece_box
from mcore_ckpt.save_load.loading import num_file_threads
from mcore_ckpt.save_load.rank_agreement import gather_json, raise_on_all_ranks
from mcore_ckpt.save_load.tensor_exchange import Move, exchange
from mcore_ckpt.storage.checksums import check_files, finalize_index
from mcore_ckpt.storage.files import DTYPES, Item, Reader, cut_slabs, write_file
from mcore_ckpt.storage.index import Index, StoredBox, TensorEntry, read_index
from mcore_ckpt.storage.paths import INDEX, is_complete, remove
from mcore_parallel.collectives import host_device
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

_PACKAGE = "nvidia_resiliency_ext.checkpointing.local"

Id = tuple[int, int, str]
"""Iteration, owner's rank and session: the package's id of one rank's checkpoint."""


class LocalSaver:
    """Saves to and loads from local disks; all ranks call every method together."""

    def __init__(self, config: LocalConfig, world: Axis) -> None:
        """Open this rank's folder; create process groups for copies if ``config`` has copies.

        Args:
            config: folder, and number of copies.
            world: all ranks of the job; torch.distributed must be initialized.

        Raises:
            ValueError: if nvidia-resiliency-ext is not installed, if there is no process
                group, or the ranks cannot be split into groups of copies.
        """
        if not dist.is_initialized() or world.size != dist.get_world_size(world.group):
            raise ValueError(
                "local checkpoints need torch.distributed over all ranks: start with torchrun."
            )
        if config.replication:
            step = config.replication_jump * config.replication_factor
            if world.size % step:
                raise ValueError(
                    f"{world.size} ranks cannot keep copies with --replication-jump "
                    f"{config.replication_jump} and --replication-factor "
                    f"{config.replication_factor}: the number of ranks must be a multiple of "
                    f"{step}."
                )
        self._world = world
        self._files = _Files(Path(config.non_persistent_local_ckpt_dir), world.rank)
        self._manager = _manager(self._files, config)

    def latest(self) -> int | None:
        """Return the newest step that all ranks can load, or None."""
        step = self._manager.find_latest()
        return None if step < 0 else step

    def save(
        self, step: int, shards: Mapping[str, Shard], extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save this rank's pieces; returns when they and all copies are on disks.

        The previous step is deleted once this one is complete. Copies are sent over the
        package's groups.

        Args:
            step: iteration, above the newest saved one.
            shards: logical name to this rank's shards.
            extra: JSON to save with the shards.

        Raises:
            ValueError: if the step is not newer, or shards contradict their pieces.
            CheckpointError: on all ranks, if one rank could not write; the previous step stays.
        """
        started_s = time.monotonic()
        newest = self.latest()
        with raise_on_all_ranks(self._world):
            build_claims(shards)
            if newest is not None and step <= newest:
                raise ValueError(
                    f"local step {newest} exists: step {step} is not newer. Use a later step."
                )
        self._files.failures, manager_error = [], ""
        try:
            self._manager.save(_State.of(shards, extra or {}), step)
        except Exception as error:  # noqa: BLE001 - an error of the package, raised again below
            manager_error = str(error)
        reports = gather_json(self._files.failures, self._world)
        faults = "; ".join(
            f"rank {rank}: {text}" for rank, texts in enumerate(reports) for text in texts
        )
        if manager_error:
            raise CheckpointError(f"local step {step} was not saved: {faults or manager_error}")
        if faults:
            log.warning(
                "local step %s is complete, but some copies are missing: %s", step, faults
            )
        duration_s = time.monotonic() - started_s
        log.info("saved local step %s to %s in %.1f s", step, self._files.folder, duration_s)

    def load(self, shards: Mapping[str, Shard]) -> Mapping[str, Any]:
        """Fill this rank's pieces from the newest step, read from any host that has a copy.

        A copy on another host is sent to this rank in rounds of bounded size, over gloo if the
        world has a gloo group.

        Args:
            shards: shards with the same pieces on the same ranks as when they were saved.

        Returns:
            ``extra`` as saved.

        Raises:
            ValueError: if there is no step, or it was saved under another layout.
            CheckpointError: if files are damaged; the shards may then be partly filled.
        """
        started_s = time.monotonic()
        newest = self.latest()
        if newest is None:
            raise ValueError(
                f"{self._files.folder} holds no local checkpoint that is complete on all "
                "ranks: load a checkpoint of --save instead."
            )
        own_state = _State.of(shards, {})
        state = self._fetch(newest, own_state)
        with raise_on_all_ranks(self._world):
            own_state.check_same(state.keys)
            if state is not own_state:
                for target, source in zip(own_state.tensors, state.tensors, strict=True):
                    target.copy_(source)
        duration_s = time.monotonic() - started_s
        log.info("read local step %s from %s in %.1f s", newest, self._files.folder, duration_s)
        return state.extra

    def _fetch(self, step: int, mine: "_State") -> "_State":
        """Read this rank's state into its shards, or receive it; send copies to other ranks.

        Returns:
            ``mine``, filled, or the state that another rank sent.
        """
        world = self._world
        held = gather_json(self._files.owners(step), world)
        # The first rank with a copy sends the copy to an owner whose disk does not have it.
        ranks = range(world.size)
        holders = [[rank for rank in ranks if owner in held[rank]] for owner in ranks]
        senders = [owner if owner in holders[owner] else holders[owner][0] for owner in ranks]
        with raise_on_all_ranks(world):
            owners = [owner for owner, sender in enumerate(senders) if sender == world.rank]
            states = {
                owner: self._files.read(step, owner, mine if owner == world.rank else None)
                for owner in owners
            }
        headers = {o: [s.keys, s.extra] for o, s in states.items() if o != world.rank}
        reports = {
            int(o): what for each in gather_json(headers, world) for o, what in each.items()
        }
        if world.rank not in states:
            mine = _State.empty(*reports[world.rank])
        tensors = {owner: list(state.tensors) for owner, state in states.items()}
        tensors[world.rank] = list(mine.tensors)
        moves = [
            Move(senders[owner], owner, num_bytes, (owner, number))
            for owner, (keys, _) in sorted(reports.items())
            for number, num_bytes in enumerate(_State.sizes(keys))
            if num_bytes
        ]
        exchange(
            moves,
            lambda key: tensors[key[0]][key[1]],
            lambda key, box: _put(box, tensors[key[0]][key[1]]),
            world=world,
            device=host_device(world),
        )
        return mine


def _put(box: Tensor, target: Tensor) -> None:
    target.reshape(-1).view(torch.uint8).copy_(box)


class _State:
    """One rank's pieces as the package's state dict: structure and tensors separated.

    The package sends the structure ("hollow" state dict) as an object and tensors as tensors.
    """

    def __init__(
        self, keys: Sequence[Sequence[Any]], tensors: Iterable[Tensor], extra: Mapping[str, Any]
    ) -> None:
        self.keys = list(keys)
        """Name, global shape, dtype, offsets and lengths of each piece."""
        self.extra = dict(extra)
        self.is_hollow = False
        self._tensors = list(tensors)

    @classmethod
    def empty(cls, keys: Sequence[Sequence[Any]], extra: Mapping[str, Any]) -> "_State":
        """Return a state with new memory for pieces that another rank describes."""
        typed_keys = [(n, tuple(s), dtype, tuple(o), tuple(k)) for n, s, dtype, o, k in keys]
        state = cls(typed_keys, [], extra)
        state.init_tensors()
        return state

    @staticmethod
    def sizes(keys: Sequence[Sequence[Any]]) -> list[int]:
        """Return the bytes of each piece."""
        kinds = {str(dtype): dtype.itemsize for dtype in DTYPES.values()}
        return [prod(lengths) * kinds[dtype] for _, _, dtype, _, lengths in keys]

    @classmethod
    def of(cls, shards: Mapping[str, Shard], extra: Mapping[str, Any]) -> "_State":
        pieces = [(n, s, p) for n, s in sorted(shards.items()) for p in s.pieces]
        keys = [(n, tuple(s.shape), str(s.dtype), *piece_box(p)) for n, s, p in pieces]
        return cls(keys, [p.data.detach() for _, _, p in pieces], extra)

    @property
    def tensors(self) -> Iterable[Tensor]:
        return iter(self._tensors)

    def pop_tensors(self) -> list[Tensor]:
        # The package sends these tensors next, which requires them to be contiguous.
        tensors = [tensor.contiguous() for tensor in self._tensors]
        self._tensors, self.is_hollow = [], True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[Tensor]) -> None:
        self._tensors, self.is_hollow = list(tensor_data), False

    def init_tensors(self) -> None:
        kinds = {str(dtype): dtype for dtype in DTYPES.values()}
        self.insert_tensors(
            torch.empty(lengths, dtype=kinds[dtype]) for _, _, dtype, _, lengths in self.keys
        )

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: ARG002
        # The threads that write the files copy slab by slab, each on its stream.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: ARG002
        # Tensors were read to their final device.
        assert not self.is_hollow

    def check_same(self, keys: Sequence[Sequence[Any]]) -> None:
        """Raise ValueError unless ``keys`` describe the pieces of this state."""
        if self.keys != list(keys):
            raise ValueError(
                "the local checkpoint was saved under another layout or of another model, and "
                "cannot be resharded: leave --non-persistent-local-ckpt-dir out, or start with "
                "the ranks and parallel sizes of that run."
            )


class _Files:
    """One rank's folder: a subfolder for each iteration and owner, an index written last."""

    def __init__(self, root: Path, rank: int) -> None:
        self.folder = root / f"rank_{rank:05d}"
        self.failures: list[str] = []
        """Errors of the current save, of this rank's pieces and of its copies of others'."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def where(self, iteration: int, rank: int) -> Path:
        return self.folder / f"iter_{iteration:07d}_of_{rank:05d}"

    def all(self) -> list[tuple[int, int, Path]]:
        """List iteration, owner and folder of each checkpoint, complete or not."""
        parts = [(path.name.split("_"), path) for path in self.folder.glob("iter_*_of_*")]
        return [(int(words[1]), int(words[3]), path) for words, path in parts]

    def owners(self, iteration: int) -> list[int]:
        """List the owners of complete checkpoints of an iteration."""
        return [
            owner for step, owner, path in self.all() if step == iteration and is_complete(path)
        ]

    def write(self, state: _State, iteration: int, rank: int) -> None:
        """Write one checkpoint; an error is added to ``failures``.

        nvidia-resiliency-ext waits for all ranks: if one rank raised, the others would hang.
        """
        folder = self.where(iteration, rank)
        try:
            remove(folder)
            folder.mkdir(parents=True)
            _write(folder, state)
        except Exception as error:  # noqa: BLE001 - raised by all ranks in LocalSaver.save
            self.failures.append(str(error) or repr(error))

    def read(self, iteration: int, rank: int, target: _State | None = None) -> _State:
        """Read one checkpoint into the tensors of ``target``, or of a new state on the CPU."""
        folder = self.where(iteration, rank)
        index = read_index(folder)
        check_files(folder, index)
        kinds = {name: str(dtype) for name, dtype in DTYPES.items()}
        jobs = [
            (name, entry, chunk, (chunk.offsets, chunk.lengths))
            for name, entry in index.tensors.items()
            for chunk in entry.chunks
        ]
        keys = [(name, e.shape, kinds[e.dtype], *box) for name, e, _, box in jobs]
        if target is None:
            target = _State.empty(keys, index.extra)
        target.check_same(keys)
        target.extra = dict(index.extra)
        pairs = zip(jobs, target.tensors, strict=True)
        # The largest tensors first, so that all threads end at about the same time.
        largest = sorted(pairs, key=lambda pair: -pair[1].nbytes)
        with Reader(folder) as reader, ThreadPoolExecutor(num_file_threads()) as pool:
            reads = [
                pool.submit(reader.read, *job, tensor)
                for job, tensor in largest
                if tensor.numel()
            ]
            for each in reads:
                each.result()
        return target

    def delete(self, iterations: Container[int]) -> None:
        for iteration, _, folder in self.all():
            if iteration in iterations:
                remove(folder)


def _write(folder: Path, state: _State) -> None:
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    items = [
        Item(f"{number}", names[dtype], tuple(lengths), partial(cut_slabs, tensor))
        for number, ((_, _, dtype, _, lengths), tensor) in enumerate(
            zip(state.keys, state.tensors, strict=True)
        )
    ]
    # One thread writes each file. Pieces, the largest first, go to the file with the fewest
    # bytes so far.
    num_files = num_file_threads()
    contents: list[list[int]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for number in sorted(range(len(items)), key=lambda number: -items[number].num_bytes):
        smallest = sizes.index(min(sizes))
        contents[smallest].append(number)
        sizes[smallest] += items[number].num_bytes
    files = [f"pieces-{number}.safetensors" for number in range(num_files)]
    with ThreadPoolExecutor(num_files) as pool:
        written = pool.map(
            lambda file, numbers: write_file(folder / file, [items[n] for n in numbers]),
            *(files, contents),
        )
        entries, sections = {}, {}
        for file, numbers, result in zip(files, contents, written, strict=True):
            entries[file] = result.entry
            sections |= {n: (file, s) for n, s in zip(numbers, result.sections, strict=True)}
    chunks: dict[str, tuple[TensorEntry, list[StoredBox]]] = {}
    for number, (name, shape, dtype, offsets, lengths) in enumerate(state.keys):
        file, section = sections[number]
        entry = TensorEntry(tuple(shape), names[dtype], ())
        chunk = StoredBox(
            file, section.offset, tuple(offsets), tuple(lengths), section.checksums
        )
        chunks.setdefault(name, (entry, []))[1].append(chunk)
    tensors = {
        name: TensorEntry(entry.shape, entry.dtype, tuple(mine))
        for name, (entry, mine) in chunks.items()
    }
    index = Index(tensors, state.extra, entries)
    write_durably(folder / INDEX, finalize_index(index, folder))


def _manager(files: _Files, config: LocalConfig) -> Any:
    """Return the package's manager, with its file operations done by ``files``.

    Raises:
        ValueError: if the package is missing.
    """
    try:
        managers = import_module(f"{_PACKAGE}.ckpt_managers.base_manager")
        strategies = import_module(f"{_PACKAGE}.replication.strategies")
    except ImportError as error:
        raise ValueError(
            f"local checkpoints need nvidia-resiliency-ext ({error}): install "
            "mcore-ckpt[resiliency], on Linux with glibc 2.39 and Python up to 3.12."
        ) from None
    strategy = None
    if config.replication:
        strategy = strategies.CliqueReplicationStrategy.from_replication_params(
            config.replication_jump, config.replication_factor
        )

    class Manager(managers.BaseCheckpointManager):
        """Checkpoint manager of the package that reads and writes by ``files``."""

        def _my_ckpt_ids(self) -> list[Id]:
            whole = [(step, rank) for step, rank, path in files.all() if is_complete(path)]
            return [(step, rank, self.session_id) for step, rank in whole]

        def _load(self, ckpt_id: Id) -> _State:
            return files.read(*ckpt_id[:2])

        def _save(self, state_dict: _State, ckpt_id: Id) -> None:
            files.write(state_dict, *ckpt_id[:2])

        def _cleanup(self, iteration: int) -> None:
            files.delete(range(iteration))

        def _cleanup_failed_save(self, iteration: int) -> None:
            files.delete([iteration])

    return Manager("", strategy)
