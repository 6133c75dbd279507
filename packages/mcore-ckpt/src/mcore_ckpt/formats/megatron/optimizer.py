"""Reads and writes the optimizer's state in Megatron's distributed format.

Forms with named weights are read here: ``fully_reshardable``, that of an optimizer that is not
distributed, and the flat ranges of ``fully_sharded_model_space``, which megatron-core no longer
writes. ``dp_reshardable``, the unnamed memory of one layout, is read by ``buckets``.
``fully_reshardable`` is written.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt.formats.dcp import DcpFolder
from mcore_ckpt.formats.megatron.buckets import has_buckets, read_buckets
from mcore_ckpt.formats.safe_pickle import Record
from mcore_ckpt.formats.torch_files import FileTensor
from mcore_ckpt.mapping.optimizer_state import (
    MAIN,
    MOMENTS,
    OptimizerState,
    StateKind,
    check_parts,
    has_state,
    is_main,
    turned,
    wants_main,
)
from mcore_ckpt.mapping.row_streams import Rows, Source, compare_copy
from mcore_ckpt.mapping.rules import Table, expand, match_theirs, unstacked
from mcore_ckpt.mapping.views import their_items
from mcore_ckpt.storage.files import Item, Reader
from mcore_ckpt.storage.index import DTYPE_BYTES, StoredBox, TensorEntry
from mcore_parallel.sharding import flat_boxes

_PREFIX = "optimizer.state."
_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<word>\w+)\.(?P<weight>.+)")
"""Older releases number their optimizers and give experts one; the names are unique without."""

_GROUPS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.\w+\.optimizer/shard_.*")
_MAIN_WORDS = ("param", "fp32_param")
_SCHEDULE = {
    "max_lr": "max_lr",
    "min_lr": "min_lr",
    "warmup_samples": "lr_warmup_steps",
    "decay_samples": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "start_weight_decay": "start_wd",
    "end_weight_decay": "end_wd",
    "weight_decay_samples": "wd_incr_steps",
    "weight_decay_style": "wd_incr_style",
}
"""Megatron's name of each of our schedule's fields; both count sequences."""


def state_table(table: Table) -> Table:
    """Return the rules of the weights that an optimizer updates."""
    rules = tuple(
        rule
        for rule in table.rules
        if all(has_state(n) for n in ([rule.ours] if isinstance(rule.ours, str) else rule.ours))
    )
    return replace(table, rules=rules)


def read_megatron(
    folder: DcpFolder,
    reader: Reader,
    table: Table,
    weights: tuple[Rows, Rows],
    common: Mapping[str, Any],
    common_file: Path,
) -> OptimizerState:
    """Read the optimizer's state.

    Raises:
        ValueError: if there is none, it is in a form without names, or it belongs to other
            weights.
    """
    table = state_table(table)
    kinds = (MAIN, *MOMENTS)
    is_proven = has_buckets(folder)
    if is_proven:
        arguments = _arguments(common)
        entries, count = read_buckets(folder, reader, table, weights[0], arguments)
    else:
        named = {kind: _named(folder, kind) for kind in kinds}
        if not all(named[kind] for kind in MOMENTS):
            raise ValueError(_refusal(folder))
        entries = {kind: _entries(folder, table, named[kind]) for kind in kinds}
        count = sum(map(len, named.values()))
    parts = {kind: _part(kind, entries[kind], reader, table) for kind in MOMENTS}
    parts = {MAIN: _main_part(entries[MAIN], reader, table, weights[0], is_proven), **parts}
    check_parts(parts, weights[1])
    kept = {kind: part for kind, part in parts.items() if part.links}
    trees = [(common.get("optimizer"), common_file), *_objects(folder)]
    return OptimizerState(kept, _progress(folder.path, common, trees), count)


def _refusal(folder: DcpFolder) -> str:
    return (
        f"{folder.path} holds no optimizer state that can be converted: it was saved without, "
        "or in a form that names no weights (dp_zero_gather_scatter). Load and save the run "
        "once in Megatron with --dist-ckpt-optim-fully-reshardable, or leave --optimizer out "
        "to convert the weights."
    )


def _objects(folder: DcpFolder) -> Iterator[tuple[Any, Path]]:
    """Read the objects that rank-dependent optimizers store besides their buckets."""
    for name, place in folder.objects.items():
        if _GROUPS.fullmatch(name):
            yield folder.read_object(name), folder.path / place.file


def _named(folder: DcpFolder, kind: str) -> dict[str, str]:
    """Return the tensors of one kind of state, by weight."""
    words = _MAIN_WORDS if kind == MAIN else (kind,)
    found = {}
    for name in folder.tensors:
        match = _NAME.fullmatch(name)
        if match is not None and match["word"] in words:
            found[match["weight"]] = name
    return found


def _entries(
    folder: DcpFolder, table: Table, named: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Return entries of one kind of state by weight, one for each layer and expert."""
    found = {}
    for weight, name in named.items():
        like = folder.tensors.get(weight)
        entry = folder.locate([name])[name]
        is_flat = like is not None and entry.shape != like.shape
        found[weight] = unflattened(name, entry, like.shape) if is_flat and like else entry
    return unstacked(found, expand(table))


def unflattened(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Convert the entry of a tensor stored as flat ranges to one with boxes.

    A grid cut the tensor into equal blocks; the leading dimensions index the block, the last
    one holds its elements in order.
    """
    *grid, size = entry.shape or (0,)
    block = [length // max(1, count) for length, count in zip(shape, grid, strict=False)]
    whole = [length * count for length, count in zip(block, grid, strict=False)]
    if len(grid) != len(shape) or tuple(whole) != shape or prod(block) != size:
        raise ValueError(
            f"{name} of shape {list(entry.shape)} is no flat form of its weight of shape "
            f"{list(shape)}."
        )
    chunks: list[StoredBox] = []
    for chunk in entry.chunks:
        chunks += _boxed(chunk, block, DTYPE_BYTES[entry.dtype])
    return TensorEntry(shape, entry.dtype, tuple(chunks))


def _boxed(chunk: StoredBox, block: list[int], item_bytes: int) -> Iterator[StoredBox]:
    """Yield the boxes that a chunk of elements of one block, or of whole blocks, covers."""
    *grid, first = chunk.offsets
    *blocks, count = chunk.lengths
    if prod(blocks) != 1:
        raise ValueError(f"{chunk.file} holds several blocks of a flat tensor in one chunk.")
    origin = [number * length for number, length in zip(grid, block, strict=True)]
    done = 0
    for offsets, lengths in flat_boxes(tuple(block), first, first + count):
        where = tuple(o + b for o, b in zip(offsets, origin, strict=True))
        yield StoredBox(chunk.file, chunk.offset + done * item_bytes, where, lengths)
        done += prod(lengths)


def _part(
    kind: str, entries: Mapping[str, TensorEntry], reader: Reader, table: Table
) -> StateKind:
    """Match one kind of state with the weights' table, and return its rows."""
    links = expand(table) if entries or kind != MAIN else []
    theirs = Source(reader, entries)
    for name in match_theirs(table, links, entries):
        compare_copy(theirs, name, table.copies[name])
    return turned(links, theirs)


def _main_part(
    entries: Mapping[str, TensorEntry],
    reader: Reader,
    table: Table,
    weights: Rows,
    is_proven: bool,
) -> StateKind:
    """Check main weights against the weights; return the rows of those that are needed."""
    part = _part(MAIN, entries, reader, table)
    for link in () if is_proven else part.links:
        if not is_main(part.theirs, weights, link.theirs):
            raise ValueError(
                f"the optimizer's main weight of {link.theirs}, rounded, is not the weight: "
                "the state belongs to other weights, or is displaced (megatron-core 0.19 "
                "displaces it with --dist-ckpt-optim-fully-reshardable where buckets are "
                "padded, and warns of it). Save the run in Megatron without that flag, or "
                "leave --optimizer out to convert the weights."
            )
    # float32 weights are their own main weights here; Megatron stores equal copies.
    needed = [link for link in part.links if wants_main(weights.entries[link.theirs].dtype)]
    return turned(needed, part.theirs)


def _arguments(common: Mapping[str, Any]) -> Mapping[str, Any]:
    found = common.get("args")
    return found.fields() if isinstance(found, Record) else {}


def _progress(
    step: Path, common: Mapping[str, Any], trees: Iterable[tuple[Any, Path]]
) -> dict[str, Any]:
    """Read iteration and schedule; ``trees`` are optimizer states, each with its file."""
    arguments = _arguments(common)
    scheduler = common.get("opt_param_scheduler")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    steps = {count for tree, file in trees for count in _steps(tree, file)}
    if len(steps) != 1:
        found = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"{step} must have one number of updates for all weights, but has {found}."
        )
    numbers = {"iteration": common.get("iteration")}
    numbers["consumed_train_samples"] = arguments.get("consumed_train_samples")
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(
                f"{step} lacks {name}, so a run cannot resume from it: leave --optimizer "
                "out to convert the weights."
            )
    samples = scheduler.get("num_steps", numbers["consumed_train_samples"])
    schedule = {ours: scheduler[word] for ours, word in _SCHEDULE.items() if word in scheduler}
    progress = {**numbers, "num_steps": steps.pop(), "schedule_samples": samples}
    return {**progress, "schedule": schedule}


def _steps(tree: Any, file: Path) -> Iterator[int]:
    """Yield every count of updates in the state of one optimizer or of several."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key in ("step", "common_step") and not isinstance(value, Mapping):
                yield int(_number(value, file))
            else:
                yield from _steps(value, file)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _steps(value, file)


def _number(value: Any, file: Path) -> float:
    """Read a number that may be stored as a tensor in ``file``."""
    if not isinstance(value, FileTensor):
        return float(value)
    form = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}[value.dtype]
    with file.open("rb") as content:
        content.seek(value.offset)
        return float(struct.unpack(form, content.read(struct.calcsize(form)))[0])


def to_common(
    progress: Mapping[str, Any], arguments: dict[str, Any], *, experts_apart: bool = False
) -> dict[str, Any]:
    """Convert a run's progress to the entries that Megatron stores.

    Args:
        progress: of an ``OptimizerState``.
        arguments: receive the position in the data.
        experts_apart: experts have an optimizer of their own: where a run of Megatron's
            spreads them over ranks.

    Returns:
        Entries besides the arguments.
    """
    schedule = progress.get("schedule") or {}
    arguments["consumed_train_samples"] = progress["consumed_train_samples"]
    optimizer: dict[Any, Any] = _groups(progress, is_of_experts=False)
    if experts_apart:
        optimizer = {0: optimizer, 1: _groups(progress, is_of_experts=True)}
    common: dict[str, Any] = {"iteration": progress["iteration"], "optimizer": optimizer}
    if schedule:
        common["opt_param_scheduler"] = {
            **{word: schedule[ours] for ours, word in _SCHEDULE.items() if ours in schedule},
            "num_steps": progress["schedule_samples"],
        }
    return common


def _groups(progress: Mapping[str, Any], *, is_of_experts: bool) -> dict[Any, Any]:
    """Return an optimizer's parameter groups: weights with and without weight decay."""
    schedule = progress.get("schedule") or {}
    recipe = progress.get("recipe") or {}
    group = {
        "lr": schedule.get("max_lr", 0.0),
        "max_lr": schedule.get("max_lr"),
        "min_lr": schedule.get("min_lr"),
        "betas": (recipe.get("adam_beta1", 0.9), recipe.get("adam_beta2", 0.999)),
        "eps": recipe.get("adam_eps", 1e-8),
        "weight_decay": schedule.get("end_weight_decay", 0.0),
        "step": progress["num_steps"],
        "bias_correction": True,
        "lr_mult": 1.0,
        "is_expert_parallel": is_of_experts,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    return {
        "optimizer": {
            "param_groups": [{**group, "wd_mult": wd_mult} for wd_mult in (1.0, 0.0)]
        },
        "param_state_sharding_type": "fully_reshardable",
    }


def state_items(table: Table, state: OptimizerState, weights: Rows) -> list[Item]:
    """List the state as items of a distributed optimizer.

    float32 weights, which are their own main weights here, are listed as main weights.
    """
    links = expand(state_table(table))
    items = []
    for kind in (MAIN, *MOMENTS):
        part = state.parts.get(kind)
        word = "param" if kind == MAIN else kind
        for link in links:
            held = part is not None and link.ours[0] in part.ours.entries
            rows = part.ours if held and part is not None else weights
            items += [
                replace(item, name=f"{_PREFIX}{word}.{item.name}")
                for item in their_items([link], rows)
            ]
    return items
