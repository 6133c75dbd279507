"""Reads and writes the optimizer's state in Megatron's distributed format.

This module reads the formats with named weights: ``fully_reshardable``, that of an optimizer
that is not distributed, and the flat ranges of ``fully_sharded_model_space``, which
megatron-core no longer writes. ``buckets`` reads ``dp_reshardable``, the unnamed memory of one
layout. This module writes ``fully_reshardable``.
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
    remap_state,
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
"""Name of a state tensor. Older releases number optimizers; names are unique without
numbers."""

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
"""Megatron's name of each schedule field of mcore-train; both count sequences."""


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
    """Return the optimizer's state of a directory.

    Args:
        folder: directory of the step.
        reader: reader of the directory's files.
        table: rules of the weights.
        weights: weights under foreign names, and under logical names.
        common: state that Megatron stores once.
        common_file: file with the tensors of ``common``.

    Raises:
        ValueError: if the directory has no state, a state without names of weights, or the
            state of other weights.
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
    present = {kind: part for kind, part in parts.items() if part.links}
    trees = [(common.get("optimizer"), common_file), *_objects(folder)]
    return OptimizerState(present, _progress(folder.path, common, trees), count)


def _refusal(folder: DcpFolder) -> str:
    return (
        f"{folder.path} holds no optimizer state that can be converted: it was saved without "
        "state, or in a format without names of weights (dp_zero_gather_scatter). Load and "
        "save the run once in Megatron with --dist-ckpt-optim-fully-reshardable, or leave "
        "--optimizer out to convert the weights."
    )


def _objects(folder: DcpFolder) -> Iterator[tuple[Any, Path]]:
    """Yield the objects that distributed optimizers store in addition to their buckets."""
    for name, place in folder.objects.items():
        if _GROUPS.fullmatch(name):
            yield folder.read_object(name), folder.path / place.file


def _named(folder: DcpFolder, kind: str) -> dict[str, str]:
    """Return the tensors of one kind of state, by weight."""
    words = _MAIN_WORDS if kind == MAIN else (kind,)
    name_of_weight = {}
    for name in folder.tensors:
        match = _NAME.fullmatch(name)
        if match is not None and match["word"] in words:
            name_of_weight[match["weight"]] = name
    return name_of_weight


def _entries(
    folder: DcpFolder, table: Table, named: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Return entries of one kind of state by weight, one for each layer and expert."""
    entries = {}
    for weight, name in named.items():
        like = folder.tensors.get(weight)
        entry = folder.locate([name])[name]
        is_flat = like is not None and entry.shape != like.shape
        entries[weight] = unflattened(name, entry, like.shape) if is_flat and like else entry
    return unstacked(entries, expand(table))


def unflattened(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry of a tensor stored as flat ranges, converted to boxes.

    A grid divides the tensor into equal blocks. The leading dimensions of the stored tensor
    index the block, the last dimension holds the elements of the block in order.
    """
    *grid, size = entry.shape or (0,)
    block = [length // max(1, count) for length, count in zip(shape, grid, strict=False)]
    covered = [length * count for length, count in zip(block, grid, strict=False)]
    if len(grid) != len(shape) or tuple(covered) != shape or prod(block) != size:
        raise ValueError(
            f"{name} of shape {list(entry.shape)} does not fit its weight of shape "
            f"{list(shape)}: the checkpoint is damaged."
        )
    chunks: list[StoredBox] = []
    for chunk in entry.chunks:
        chunks += _boxed(chunk, block, DTYPE_BYTES[entry.dtype])
    return TensorEntry(shape, entry.dtype, tuple(chunks))


def _boxed(chunk: StoredBox, block: list[int], item_bytes: int) -> Iterator[StoredBox]:
    """Yield the boxes of the weight that a chunk of elements of one block covers."""
    *grid, first = chunk.offsets
    *blocks, count = chunk.lengths
    if prod(blocks) != 1:
        raise ValueError(
            f"{chunk.file} holds several blocks of a flat tensor in one chunk, which is not "
            "supported."
        )
    origin = [number * length for number, length in zip(grid, block, strict=True)]
    done = 0
    for offsets, lengths in flat_boxes(tuple(block), first, first + count):
        offsets_in_weight = tuple(o + b for o, b in zip(offsets, origin, strict=True))
        yield StoredBox(
            chunk.file, chunk.offset + done * item_bytes, offsets_in_weight, lengths
        )
        done += prod(lengths)


def _part(
    kind: str, entries: Mapping[str, TensorEntry], reader: Reader, table: Table
) -> StateKind:
    """Return one kind of state, matched with the weights' table."""
    links = expand(table) if entries or kind != MAIN else []
    theirs = Source(reader, entries)
    for name in match_theirs(table, links, entries):
        compare_copy(theirs, name, table.copies[name])
    return remap_state(links, theirs)


def _main_part(
    entries: Mapping[str, TensorEntry],
    reader: Reader,
    table: Table,
    weights: Rows,
    is_proven: bool,
) -> StateKind:
    """Compare main weights with the weights; return the main weights that are needed."""
    part = _part(MAIN, entries, reader, table)
    for link in () if is_proven else part.links:
        if not is_main(part.theirs, weights, link.theirs):
            raise ValueError(
                f"the optimizer's main weight of {link.theirs}, rounded, differs from the "
                "weight: the state belongs to other weights, or is displaced (megatron-core "
                "0.19 displaces it with --dist-ckpt-optim-fully-reshardable if buckets are "
                "padded, with a warning). Save the run in Megatron without that flag, or leave "
                "--optimizer out to convert the weights."
            )
    # In mcore float32 weights have no main weights; Megatron stores equal copies.
    needed = [link for link in part.links if wants_main(weights.entries[link.theirs].dtype)]
    return remap_state(needed, part.theirs)


def _arguments(common: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = common.get("args")
    return arguments.fields() if isinstance(arguments, Record) else {}


def _progress(
    step: Path, common: Mapping[str, Any], trees: Iterable[tuple[Any, Path]]
) -> dict[str, Any]:
    """Return iteration and schedule; ``trees`` are optimizer states, each with its file."""
    arguments = _arguments(common)
    scheduler = common.get("opt_param_scheduler")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    steps = {count for tree, file in trees for count in _steps(tree, file)}
    if len(steps) != 1:
        counts = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"{step} must have the same number of updates for all weights, but has {counts}."
        )
    numbers = {"iteration": common.get("iteration")}
    numbers["consumed_train_samples"] = arguments.get("consumed_train_samples")
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(
                f"{step} lacks {name}, which a run needs to resume: leave --optimizer out to "
                "convert the weights."
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
    struct_format = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}[value.dtype]
    with file.open("rb") as content:
        content.seek(value.offset)
        return float(
            struct.unpack(struct_format, content.read(struct.calcsize(struct_format)))[0]
        )


def to_common(
    progress: Mapping[str, Any], arguments: dict[str, Any], *, experts_apart: bool = False
) -> dict[str, Any]:
    """Return a run's progress as the entries that Megatron stores, without the arguments.

    Args:
        progress: progress of an ``OptimizerState``.
        arguments: Megatron's arguments; the position in the data is added.
        experts_apart: write a separate optimizer for experts, as runs of Megatron with expert
            parallelism have.
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
    """Return the state as items of a distributed optimizer.

    float32 weights, which have no main weights in mcore, are written as main weights.
    """
    links = expand(state_table(table))
    items = []
    for kind in (MAIN, *MOMENTS):
        part = state.parts.get(kind)
        word = "param" if kind == MAIN else kind
        for link in links:
            has_state_of_weight = part is not None and link.ours[0] in part.ours.entries
            rows = part.ours if has_state_of_weight and part is not None else weights
            items += [
                replace(item, name=f"{_PREFIX}{word}.{item.name}")
                for item in their_items([link], rows)
            ]
    return items
