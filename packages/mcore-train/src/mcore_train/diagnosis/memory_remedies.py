"""Collects facts about a run out of GPU memory from its logs; names the cheapest remedy.

The trainer logs a record with the error (``RECORD`` and JSON). For logs without a record, facts
come from torch's message, the traceback and the run's header.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcore_train.diagnosis.continue_command import recorded_command, value_of
from mcore_train.diagnosis.log_reader import LogFile

RECORD = "out of memory record: "
"""Beginning of the line with the record."""
LARGE_SHARE = 0.1
"""Share of the device's memory, reserved but unallocated, that indicates fragmentation."""

_SIZES = {
    "requested_gib": r"Tried to allocate ([\d.]+) ([KMGT]i)B",
    "capacity_gib": r"total capacity of ([\d.]+) ([KMGT]i)B",
    "free_gib": r"of which ([\d.]+) ([KMGT]i)B is free",
    "allocated_gib": r"memory ([\d.]+) ([KMGT]i)B is allocated by PyTorch",
    "unused_gib": r"and ([\d.]+) ([KMGT]i)B is reserved by PyTorch but unallocated",
}
_UNITS = {"Ki": 2**-20, "Mi": 2**-10, "Gi": 1.0, "Ti": 2**10}
_PHASES = {
    "optimizer": r"optim\w*[./]|^optimizer_step$",
    "loss": r":(?:cross_entropy\w*|losses|loss_\w+)$",
    "save": r":save\w*$",
    "load": r":load\w*$",
    "validation": r":(?:evaluate|validate)$",
    "forward": r":(?:forward|run_stage)$",
    "setup": r":(?:assemble|_?build\w*)$",
    "backward": r":\w*backward$",
}
"""Phase of a step by file and function of a stack frame."""
_BACKWARD = re.compile(r":(?:_engine_run_backward|run_backward)$", re.M)
_FRAME = re.compile(r'File "([^"]*)", line \d+, in (\S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord:
    """Memory of a rank at an out-of-memory error."""

    rank: int | None = None
    phase: str = ""
    """Phase: forward, loss, backward, optimizer, save, load, validation or setup."""
    step: int | None = None
    micro_batch_size: int | None = None
    seq_length: int | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    """Degree by axis."""
    sharding: str = ""
    recompute: str = ""
    """``--recompute-granularity`` of the run."""
    requested_gib: float | None = None
    capacity_gib: float | None = None
    free_gib: float | None = None
    allocated_gib: float | None = None
    unused_gib: float | None = None
    """Memory reserved by torch in blocks that are too small for the request."""
    peak_gib: float | None = None
    classes_gib: Mapping[str, float] = field(default_factory=dict)
    """GiB by class of tensors, the largest first; empty if the trainer recorded none."""

    def lines(self) -> list[str]:
        """Return the record as lines of the report."""
        layout = ", ".join(f"{name} {degree}" for name, degree in self.layout.items())
        known = {
            "rank": self.rank,
            "phase": self.phase,
            "step": self.step,
            "micro-batch": self.micro_batch_size,
            "sequence": self.seq_length,
            "layout": layout,
            "sharding": self.sharding,
            "recompute": self.recompute,
        }
        sizes = {
            name.removesuffix("_gib"): getattr(self, name)
            for name in (*_SIZES, "peak_gib")
            if getattr(self, name) is not None
        }
        lines = [
            "memory: " + "; ".join(f"{k} {v}" for k, v in known.items() if v not in (None, ""))
        ]
        if sizes:
            lines.append("  GiB: " + ", ".join(f"{k} {v:.2f}" for k, v in sizes.items()))
        if self.classes_gib:
            parts = ", ".join(f"{k} {v:.2f}" for k, v in self.classes_gib.items())
            lines.append(f"  GiB by class: {parts}")
        return lines

    @classmethod
    def of_message(cls, message: str, **known: Any) -> "MemoryRecord":
        """Build a record from the sizes in torch's message and other known fields."""
        sizes: dict[str, Any] = {}
        for name, pattern in _SIZES.items():
            if match := re.search(pattern, message):
                sizes[name] = round(float(match[1]) * _UNITS[match[2]], 3)
        return cls(**known, **sizes)

    def to_line(self) -> str:
        """Return the record as the log line that ``memory_record`` reads."""
        return RECORD + json.dumps(asdict(self))


def memory_record(
    file: Path, offset: int, message: str, rank: int | None, logs: Sequence[LogFile]
) -> MemoryRecord:
    """Collect the facts of the logs about a rank that was out of memory.

    Args:
        file: log with torch's message.
        offset: byte offset of the message in the log.
        message: torch's message.
        rank: rank that wrote the message.
        logs: logs of all ranks; one of them has the run's header.
    """
    with file.open("rb") as opened:
        opened.seek(max(0, offset - (1 << 15)))
        text = opened.read(1 << 16).decode(errors="replace")
    if RECORD in text:
        record = text[text.index(RECORD) + len(RECORD) :].split("\n", 1)[0]
        try:
            return MemoryRecord(**json.loads(record))
        except (ValueError, TypeError):  # the line was truncated
            pass
    stack = text[: text.find("Tried to allocate")]
    phase = phase_of(stack[max(0, stack.rfind("Traceback")) :])
    steps = [log.last_step for log in logs if log.last_step is not None]
    step = max(steps, default=None)
    return MemoryRecord.of_message(message, rank=rank, phase=phase, step=step, **_header(logs))


def phase_of(stack: str) -> str:
    """Return the phase of a step in which a traceback ends; "" if it is not known."""
    frames = [f"{file}:{function}" for file, function in _FRAME.findall(stack)]
    if _BACKWARD.search("\n".join(frames)):
        return "backward"  # also during recomputation, whose inner frames are of a forward
    for frame in reversed(frames):
        for name, pattern in _PHASES.items():
            if re.search(pattern, frame):
                return name
    return ""


def _header(logs: Sequence[LogFile]) -> dict[str, Any]:
    """Return layout and sizes from the first lines of a run's log, as fields of a record."""
    facts: dict[str, Any] = {}
    if words := recorded_command(logs):
        facts["micro_batch_size"] = int(value_of(words, "--micro-batch-size") or 1)
        facts["recompute"] = value_of(words, "--recompute-granularity")
    for log in logs:
        with log.path.open("rb") as file:
            head = file.read(1 << 15).decode(errors="replace")
        layout = re.search(r"layout: \d+ ranks?: (.*), sharding (\w+)", head)
        if layout is None:
            continue
        degrees = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", layout[1])}
        facts |= {"layout": degrees, "sharding": layout[2]}
        if sizes := re.search(r"steps: \d+ to \d+ of \d+ x (\d+) tokens", head):
            facts["seq_length"] = int(sizes[1])
        break
    return facts


def cheapest_remedy(record: MemoryRecord) -> str:
    """Return the option that saves memory at the least cost in time, and the reason."""
    capacity, unused = record.capacity_gib or 0.0, record.unused_gib or 0.0
    data = record.layout.get("data", 0)
    is_sharded = record.sharding not in ("", "no_shard")
    if unused > max(LARGE_SHARE * capacity, record.requested_gib or 0.0):
        return (
            f"PYTORCH_ALLOC_CONF=expandable_segments:True: {unused:.1f} GiB are reserved in "
            "blocks that are too small; costs no time."
        )
    if data > 1 and not is_sharded:
        return (
            f"--use-distributed-optimizer: shards the optimizer's state over {data} data ranks "
            "and costs no time."
        )
    size = record.micro_batch_size
    if record.phase == "loss" and size != 1:
        half = f"--micro-batch-size {size // 2}" if size else "half the --micro-batch-size"
        return (
            f"{half}: the logits of a micro-batch do not fit; or a larger "
            "--tensor-model-parallel-size, which splits the logits by vocabulary."
        )
    if record.phase in ("save", "validation"):
        return (
            "half the --micro-batch-size of validation, or --no-async-save, which copies less."
        )
    if record.recompute in ("", "none"):
        activation = "moe_act" if "expert" in record.layout else "mlp_act"
        return (
            f"--recompute-granularity selective --recompute-modules layernorm {activation}: "
            "recomputes norms and activations, a few per cent of the step; if that is not "
            "enough, full (about a third more time)."
        )
    if size and size > 1:
        return f"--micro-batch-size {size // 2}: halves the activations."
    if record.recompute == "selective":
        return "--recompute-granularity full: stores only the input of each layer."
    return (
        "more tensor or pipeline ranks, --cpu-offloading or --optimizer-cpu-offload; "
        "mcore-models count estimates the bytes."
    )
