"""Sorts the GPU memory of a rank into tensor classes, and compares them with the plan.

When memory is exhausted, ``MemoryHistory`` logs a record that ``triage`` reads. With
``--record-memory-history`` it also writes torch's snapshot, which pytorch.org/memory_viz opens,
and a file with the addresses of weights, gradients and optimizer state and the plan's estimate.
``read_snapshot`` sorts the blocks of a snapshot into classes: by these addresses, else by the
source line that allocated the block.
"""

import json
import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from mcore_ckpt.formats.safe_pickle import load_inert
from mcore_train.assembly import Run
from mcore_train.config import MemoryConfig
from mcore_train.diagnosis.memory_remedies import MemoryRecord, phase_of
from mcore_train.pipeline_choice import estimate_memory
from mcore_train.resolution import Plan, layout_degrees

log = logging.getLogger(__name__)

GIB = 2**30
TRACED = 100_000
"""Number of allocations in the history of a snapshot."""
PLANNED = ("weights", "gradients", "optimizer", "activations")
"""Classes that the plan estimates; it does not estimate buffers, workspace and free memory."""
_LINES = {
    "workspace": r"cublas|cudnn|workspace|triton/|flash_attn|transformer_engine",
    "optimizer": r"mcore_parallel/optimizers/|torch/optim/|"
    r"/(?:distributed_optimizer|optimizer_segments)\.py",
    "gradients": r"/data_parallel/(?:buckets|ddp|grads|fully_sharded)\.py",
    "buffers": r"torch/distributed/|"
    r"/(?:collectives|p2p|dispatch\w*)\.py",
    "activations": r"mcore_models/|mcore_moe/|mcore_parallel/|torch/nn/|torch/autograd/|"
    r"mcore_train/(?:step|losses)\.py",
}
"""Class of a block by the source lines on its stack; the first matching row counts."""
_MODULE = re.compile(r"(?:mcore_models|mcore_moe)/(?:.*/)?(\w+)\.py|mcore_train/(losses)\.py")


@dataclass(kw_only=True, slots=True)
class MemoryTable:
    """Bytes of one rank by class."""

    classes: Counter[str] = field(default_factory=Counter)
    modules: Counter[str] = field(default_factory=Counter)
    """Bytes of activations by the module that allocated them."""
    planned: Mapping[str, int] = field(default_factory=dict)
    free: int = 0
    """Bytes reserved by torch and not in use."""
    largest_free: int = 0
    """Largest free block."""
    largest: list[tuple[int, str]] = field(default_factory=list)
    """Largest blocks in use, and the lines that allocated them."""

    def to_json(self) -> str:
        """Return the table as JSON, in bytes."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)})

    def page(self) -> str:
        """Return the table as text, in GiB."""
        lines = [f"{'class':<12} {'GiB':>9} {'planned':>9}"]
        names = [*PLANNED, *sorted(set(self.classes) - set(PLANNED))]
        for name in names:
            planned = (
                f"{self.planned[name] / GIB:9.3f}" if name in self.planned else f"{'-':>9}"
            )
            lines.append(f"{name:<12} {self.classes[name] / GIB:9.3f} {planned}")
        total = sum(self.classes.values())
        lines.append(
            f"{'in use':<12} {total / GIB:9.3f} {sum(self.planned.values()) / GIB:9.3f}"
        )
        lines.append(
            f"{'free':<12} {self.free / GIB:9.3f}{'':>10} largest piece "
            f"{self.largest_free / GIB:.3f}"
        )
        if self.modules:
            lines.append("activations by module:")
            lines += [f"  {n:<20} {b / GIB:9.3f}" for n, b in self.modules.most_common(10)]
        if self.largest:
            lines.append("largest blocks:")
            lines += [f"  {size / GIB:9.3f}  {place}" for size, place in self.largest[:5]]
        return "\n".join(lines)


class MemoryHistory:
    """Context manager that records memory while a run trains."""

    def __init__(self, run: Run, config: MemoryConfig) -> None:
        """Check the options; recording begins in ``__enter__``.

        Raises:
            ValueError: if a history is requested on the CPU.
        """
        self.run, self.config = run, config
        if config.record_memory_history and run.ctx.device.type != "cuda":
            raise ValueError(
                "--record-memory-history records GPU memory, and this run is on the CPU: leave "
                "it out."
            )

    def __enter__(self) -> Self:
        if self.config.record_memory_history:
            torch.cuda.memory._record_memory_history(max_entries=TRACED, stacks="python")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            log.error("%s", record_of(self.run, error).to_line())
            if self.config.record_memory_history:
                self.write()
        if self.config.record_memory_history:
            torch.cuda.memory._record_memory_history(enabled=None)

    def after_step(self, iteration: int) -> None:
        """Write the snapshot after the step of ``--memory-snapshot-step``."""
        if iteration == self.config.memory_snapshot_step:
            self.write()

    def write(self) -> None:
        """Write this rank's snapshot and, next to it, the addresses of its tensor classes."""
        path = rank_path(self.config.memory_snapshot_path, self.run.ctx.world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        places_file(path).write_text(json.dumps(places_of(self.run)))
        log.warning("rank %d wrote %s", self.run.ctx.world.rank, path)


def rank_path(path: str, rank: int) -> Path:
    """Return the file of one rank: ``snapshot.rank3.pickle`` for ``snapshot.pickle``."""
    base = Path(path)
    return base.with_name(f"{base.stem}.rank{rank}{base.suffix}")


def places_file(path: Path) -> Path:
    """Return the file with the addresses of tensor classes that belongs to a snapshot."""
    return path.with_suffix(".classes.json")


def places_of(run: Run) -> dict[str, Any]:
    """Return addresses and sizes of each tensor class on this rank, and the plan's estimate."""
    return {
        "places": {
            name: sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})
            for name, storages in _storages(run).items()
        },
        "planned": planned_bytes(run.plan),
    }


def _storages(run: Run) -> dict[str, list[torch.UntypedStorage]]:
    """Collect the storages of this rank's weights, gradients and optimizer state."""
    units = list(run.data_parallel.units)
    weights = [p for chunk in run.chunks for p in chunk.parameters()]
    gradients: list[Tensor] = [unit.own_grads() for unit in units]
    gradients += [p.grad for p in weights if p.grad is not None]
    weights += [unit.own_weights() for unit in units]
    state: list[Tensor] = [main for unit in units if (main := unit.own_main()) is not None]
    for shard in run.optimizer.named_shards().values():
        state += [piece.data for piece in shard.pieces]
    seen: set[int] = set()
    by_class = {}
    for name, tensors in (("weights", weights), ("gradients", gradients), ("optimizer", state)):
        storages = {}
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            storage = local.untyped_storage()
            if local.device.type == run.ctx.device.type and storage.data_ptr() not in seen:
                storages[storage.data_ptr()] = storage
        seen |= set(storages)
        by_class[name] = list(storages.values())
    return by_class


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Return the plan's bytes by class for the rank with the most; empty with adapters."""
    config = plan.config
    if config.peft.peft != "none":
        return {}
    estimate = estimate_memory(
        config, plan.family, plan.world_size, plan.vocab_size, plan.num_microbatches
    )
    return {name: getattr(estimate, name) for name in PLANNED}


def record_of(run: Run, error: BaseException) -> MemoryRecord:
    """Describe the memory of a rank that is out of memory, without communication."""
    config, device = run.plan.config, run.ctx.device
    classes = {
        name: sum(storage.nbytes() for storage in storages) / GIB
        for name, storages in _storages(run).items()
    }
    peak = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / GIB
        classes["activations"] = max(0.0, peak - sum(classes.values()))
    ordered = sorted(classes.items(), key=lambda item: -item[1])
    return MemoryRecord.of_message(
        str(error),
        rank=run.ctx.world.rank,
        phase=phase_of("".join(traceback.format_exception(error))),
        step=run.progress.iteration + 1,
        micro_batch_size=config.batch.micro_batch_size,
        seq_length=config.batch.seq_length,
        layout=layout_degrees(run.plan),
        sharding=config.data_parallelism.sharding,
        recompute=config.recomputation.recompute_granularity,
        peak_gib=peak,
        classes_gib=dict(ordered),
    )


def read_snapshot(path: Path) -> MemoryTable:
    """Sort the blocks of a snapshot of torch's allocator into classes.

    Raises:
        FileNotFoundError: if the file does not exist.
        CheckpointError: if the file is damaged.
        ValueError: if the file is not a memory snapshot.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a snapshot of torch's allocator.")
    snapshot = load_inert(path.read_bytes(), str(path))
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise ValueError(
            f"{path} is not a snapshot of torch's allocator: it has no segments. Give a file "
            "that --record-memory-history wrote."
        )
    places: dict[str, Any] = {}
    if places_file(path).is_file():
        places = json.loads(places_file(path).read_text())
    return sort_blocks(snapshot, places)


def sort_blocks(snapshot: Mapping[str, Any], places: Mapping[str, Any]) -> MemoryTable:
    """Sort the blocks of a snapshot by the addresses that its run recorded, else by line."""
    table = MemoryTable(planned=places.get("planned", {}))
    class_of_address = {
        address: name
        for name, ranges in places.get("places", {}).items()
        for address, _ in ranges
    }
    blocks: list[tuple[int, str]] = []
    for address, block in _blocks(snapshot):
        if not str(block["state"]).startswith("active"):
            table.free += block["size"]
            table.largest_free = max(table.largest_free, block["size"])
            continue
        frames = [f"{f['filename']}:{f['line']} ({f['name']})" for f in block.get("frames", ())]
        name = class_of_address.get(address) or class_of_frames(frames)
        table.classes[name] += block["size"]
        if name == "activations":
            table.modules[_module_of(frames)] += block["size"]
        blocks.append((block["size"], f"{name}: {_caller_line(frames)}"))
    table.largest = sorted(blocks, reverse=True)[:5]
    return table


def _blocks(snapshot: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            yield block.get("address", address), block
            address += block["size"]


def class_of_frames(frames: list[str]) -> str:
    """Return the class of a block by the source lines of its stack, innermost first.

    A block without lines was allocated before recording began; its class is ``unrecorded``.
    """
    if not frames:
        return "unrecorded"
    for name, pattern in _LINES.items():
        if any(re.search(pattern, frame) for frame in frames):
            return name
    return "other"


def _module_of(frames: list[str]) -> str:
    for frame in frames:
        if match := _MODULE.search(frame):
            return match[1] or match[2]
    return "other"


def _caller_line(frames: list[str]) -> str:
    """Return the innermost line outside of torch, else the innermost line."""
    callers = [frame for frame in frames if "/torch/" not in frame]
    return (callers or frames or ["no line was recorded"])[0]
