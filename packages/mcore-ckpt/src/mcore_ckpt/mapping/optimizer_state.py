"""Maps Adam's state of each weight between formats, so that a run can resume from the result.

Moments and main weights have the names and shapes of their weights, so that the weights' table
converts them too, kind by kind. Step, number of sequences read and position in the schedule are
also converted. Random streams belong to a layout and are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.mapping.row_streams import Rows, Source, row_groups, same_bits
from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.mapping.views import RenamedRows
from mcore_ckpt.storage.files import DTYPES, Reader
from mcore_ckpt.storage.index import Index, TensorEntry
from mcore_ckpt.storage.shard_plans import list_problems, name_problems

MAIN = "main"
"""Kind of the main weights, the float32 copies of 16-bit weights that Adam updates."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of Adam's moments (Kingma and Ba 2015, arXiv:1412.6980)."""

NUMBERS = ("iteration", "num_steps", "consumed_train_samples", "schedule_samples")
"""Required keys of ``extra`` in an mcore index that record a run's progress."""

_PREFIX = "optimizer."
_BUFFERS = (".router.expert_bias",)


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of state of all weights, under the names of the weights."""

    links: tuple[Link, ...]
    """Mapping of foreign to logical tensors."""
    theirs: Rows
    """Tensors of the state under the weights' foreign names."""
    ours: Rows
    """Tensors of the state under the weights' logical names."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State and progress that a run needs to resume, in addition to the weights."""

    parts: Mapping[str, StateKind]
    """State by kind: ``main`` if any weight has a main weight, and each of ``MOMENTS``."""
    progress: Mapping[str, Any]
    """``NUMBERS``, and ``schedule`` if it is known, as in ``extra`` of an mcore index."""
    num_entries: int = 0
    """Number of tensors in the checkpoint that hold the state."""


def wants_main(dtype: str) -> bool:
    """Whether weights of a dtype have main weights: dtypes of 16 bits and fewer."""
    return DTYPES[dtype].itemsize < 4


def is_main(mains: Rows, weights: Rows, name: str) -> bool:
    """Whether a main weight, rounded, equals the weight bit by bit."""
    dtype = DTYPES[weights.entries[name].dtype]
    return all(
        same_bits(mains.rows(name, *rows).to(dtype), weights.rows(name, *rows))
        for rows in row_groups(weights.entries[name].shape)
    )


def has_state(name: str) -> bool:
    """Whether Adam updates a weight: all but the routers' bias for load balancing."""
    return not name.endswith(_BUFFERS)


def native_name(kind: str, name: str) -> str:
    """Return the name of an optimizer tensor in an mcore checkpoint."""
    return f"{_PREFIX}{kind}.{name}"


def read_native(index: Index, reader: Reader, weights: Rows, where: str) -> OptimizerState:
    """Return the optimizer's state of an mcore checkpoint; ``where`` names it in errors.

    Raises:
        ValueError: if there is no state, or it does not match the weights.
    """
    missing = [name for name in NUMBERS if not isinstance(index.extra.get(name), int)]
    if missing:
        raise ValueError(
            f"{where} holds no optimizer state ({', '.join(missing)} not in its index), such "
            "as a release. Leave --optimizer out to convert the weights."
        )
    parts = {}
    for kind in (MAIN, *MOMENTS):
        prefix = native_name(kind, "")
        entries = {
            name.removeprefix(prefix): entry
            for name, entry in index.tensors.items()
            if name.startswith(prefix)
        }
        state = Source(reader, entries)
        parts[kind] = StateKind(tuple(Link((name,), name) for name in entries), state, state)
    check_parts(parts, weights)
    names = (*NUMBERS, "schedule", "recipe")
    progress = {name: index.extra[name] for name in names if name in index.extra}
    count = sum(len(part.links) for part in parts.values())
    present = {kind: part for kind, part in parts.items() if part.links}
    return OptimizerState(present, progress, count)


def remap_state(links: list[Link], theirs: Rows) -> StateKind:
    """Return one kind of foreign state, mapped by the links of its weights."""
    return StateKind(tuple(links), theirs, RenamedRows(links, theirs))


def check_parts(parts: Mapping[str, StateKind], weights: Rows) -> None:
    """Raise ValueError unless each kind of state has the names and shapes of the weights."""
    problems = []
    for kind, part in parts.items():
        wanted: dict[str, TensorEntry] = {
            name: entry
            for name, entry in weights.entries.items()
            if has_state(name) and (kind != MAIN or wants_main(weights.entries[name].dtype))
        }
        stored = part.ours.entries
        missing, extra = name_problems(wanted, stored)
        problems += [f"{kind} is missing for {text}" for text in missing]
        problems += [f"{kind} belongs to no weight: {name}" for name in extra]
        problems += [
            f"{kind} of {name}: {list(stored[name].shape)}, its weight {list(entry.shape)}"
            for name, entry in wanted.items()
            if name in stored and stored[name].shape != entry.shape
        ]
    if problems:
        raise ValueError(
            f"the optimizer's state does not match the weights: {list_problems(problems)}"
        )
