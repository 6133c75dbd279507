"""The optimizer's state in Megatron's distributed format, read and written.

Read are the forms that name each weight: ``fully_reshardable``, that of an optimizer that is
not distributed, and the flat ranges of ``fully_sharded_model_space``, which megatron-core no
longer writes. The others hold the memory of one layout, byte after byte without a name in it,
and are refused. Written is ``fully_reshardable``.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt.dcp import DcpFolder
from mcore_ckpt.files import Item, Reader
from mcore_ckpt.index import DTYPE_BYTES, Chunk, TensorEntry
from mcore_ckpt.optimizer_state import (
    MAIN,
    MOMENTS,
    OptimizerState,
    Part,
    check_parts,
    has_state,
    turned,
    wants_main,
)
from mcore_ckpt.pickles import Record
from mcore_ckpt.rules import Link, Table, expand, match_theirs, unstacked
from mcore_ckpt.streams import Rows, Source, compare_copy, row_groups, same_bits
from mcore_ckpt.torch_files import FileTensor
from mcore_ckpt.views import their_items
from mcore_parallel.sharding import flat_boxes

_PREFIX = "optimizer.state."
_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<word>\w+)\.(?P<weight>.+)")
"""Older releases number the optimizers, experts have one of their own; names tell enough."""

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
"""Megatron's word for each of our schedule's; both count sequences, though it says steps."""


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
    """Find the optimizer's state.

    Args:
        folder: of the step.
        reader: of its files.
        table: of the weights.
        weights: under Megatron's names and under ours, uncut.
        common: what Megatron stores once.
        common_file: holds the tensors in ``common``.

    Raises:
        ValueError: if there is none, it is in a form without names, or it is not that of the
            weights.
    """
    table = state_table(table)
    parts, count = {}, 0
    for kind in (MAIN, *MOMENTS):
        named = _named(folder, kind)
        if not named and kind != MAIN:
            raise ValueError(_refusal(folder))
        entries = _entries(folder, table, named)
        parts[kind] = _part(kind, entries, reader, table, weights[0])
        count += len(named)
    check_parts(parts, weights[1])
    kept = {kind: part for kind, part in parts.items() if part.links}
    return OptimizerState(kept, _progress(folder.path, common, common_file), count)


def _refusal(folder: DcpFolder) -> str:
    buckets = any(".gbuf_idx_" in name for name in (*folder.tensors, *folder.objects))
    what = (
        "it is in buckets (dp_reshardable, dp_zero_gather_scatter), which have no names and "
        "fit the layout alone that saved them. Load and save the run once in Megatron with "
        "--dist-ckpt-optim-fully-reshardable"
        if buckets
        else "it was saved without, or in a form that names no weights"
    )
    return (
        f"{folder.path} holds no optimizer state that can be converted: {what}, or leave "
        "--optimizer out to convert the weights."
    )


def _named(folder: DcpFolder, kind: str) -> dict[str, str]:
    """List the tensors of one kind of state, by the name of the weight that each belongs to."""
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
    """Find one kind of state under the weights' names, one entry a layer and expert."""
    found = {}
    for weight, name in named.items():
        like = folder.tensors.get(weight)
        entry = folder.locate([name])[name]
        is_flat = like is not None and entry.shape != like.shape
        found[weight] = unflattened(name, entry, like.shape) if is_flat and like else entry
    return unstacked(found, expand(table))


def unflattened(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Read a tensor of flat ranges as one of boxes.

    It was cut by a grid into equal blocks; its leading dimensions say which block, the last
    one is the block's elements in order.

    Args:
        name: for messages.
        entry: as the directory lists it.
        shape: of the weight that it belongs to.

    Raises:
        ValueError: if the one is no such form of the other.
    """
    *grid, size = entry.shape or (0,)
    block = [length // max(1, count) for length, count in zip(shape, grid, strict=False)]
    whole = [length * count for length, count in zip(block, grid, strict=False)]
    if len(grid) != len(shape) or tuple(whole) != shape or prod(block) != size:
        raise ValueError(
            f"{name} of shape {list(entry.shape)} is no flat form of its weight of shape "
            f"{list(shape)}."
        )
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        chunks += _boxed(chunk, block, DTYPE_BYTES[entry.dtype])
    return TensorEntry(shape, entry.dtype, tuple(chunks))


def _boxed(chunk: Chunk, block: list[int], item_bytes: int) -> Iterator[Chunk]:
    """Give the boxes that a chunk of one block's, or of several blocks', elements holds."""
    *grid, first = chunk.offsets
    *blocks, count = chunk.lengths
    if prod(blocks) != 1:
        raise ValueError(f"{chunk.file} holds several blocks of a flat tensor in one chunk.")
    origin = [number * length for number, length in zip(grid, block, strict=True)]
    done = 0
    for offsets, lengths in flat_boxes(tuple(block), first, first + count):
        where = tuple(o + b for o, b in zip(offsets, origin, strict=True))
        yield Chunk(chunk.file, chunk.offset + done * item_bytes, where, lengths)
        done += prod(lengths)


def _part(
    kind: str, entries: Mapping[str, TensorEntry], reader: Reader, table: Table, weights: Rows
) -> Part:
    """Match one kind of state with the weights' table, and turn it."""
    links = expand(table)
    theirs = Source(reader, entries)
    if kind == MAIN and not entries:
        links = []
    else:
        for name in match_theirs(table, links, entries):
            compare_copy(theirs, name, table.copies[name])
    if kind != MAIN:
        return turned(links, theirs)
    # Weights of 32 bits are their own main weights here, and equal copies of them there.
    for link in links:
        if not wants_main(weights.dtype(link.theirs)):
            _check_own_main(link, theirs, weights)
    return turned([k for k in links if wants_main(weights.dtype(k.theirs))], theirs)


def _check_own_main(link: Link, mains: Rows, weights: Rows) -> None:
    name = link.theirs
    for rows in row_groups(weights.entries[name].shape):
        if not same_bits(mains.rows(name, *rows), weights.rows(name, *rows)):
            raise ValueError(
                f"the optimizer's main weight of {name} is not the weight, though both are of "
                "32 bits: which of the two the run goes on with cannot be told."
            )


def _progress(step: Path, common: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Read how far a run is."""
    arguments = common.get("args")
    arguments = arguments.fields() if isinstance(arguments, Record) else {}
    scheduler = common.get("opt_param_scheduler")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    steps = set(_steps(common.get("optimizer"), file))
    if len(steps) != 1:
        told = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"{step} must say one number of updates for all weights, and says {told}."
        )
    numbers = {"iteration": common.get("iteration")}
    numbers["consumed_train_samples"] = arguments.get("consumed_train_samples")
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(
                f"{step} does not say {name}, so a run cannot go on from it: leave --optimizer "
                "out to convert the weights."
            )
    samples = scheduler.get("num_steps", numbers["consumed_train_samples"])
    schedule = {ours: scheduler[word] for ours, word in _SCHEDULE.items() if word in scheduler}
    progress = {**numbers, "num_steps": steps.pop(), "schedule_samples": samples}
    return {**progress, "schedule": schedule}


def _steps(tree: Any, file: Path) -> Iterator[int]:
    """Find every count of updates in the state of one optimizer or of several."""
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
    """Read a number that may be a tensor, which then lies in ``file``."""
    if not isinstance(value, FileTensor):
        return float(value)
    form = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}[value.dtype]
    with file.open("rb") as content:
        content.seek(value.offset)
        return float(struct.unpack(form, content.read(struct.calcsize(form)))[0])


def to_common(progress: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Write how far a run is as Megatron stores it.

    Args:
        progress: of an ``OptimizerState``.
        arguments: get the place in the data.

    Returns:
        Entries beside the arguments.
    """
    schedule = progress.get("schedule") or {}
    recipe = progress.get("recipe") or {}
    arguments["consumed_train_samples"] = progress["consumed_train_samples"]
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
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    groups = [{**group, "wd_mult": wd_mult} for wd_mult in (1.0, 0.0)]
    common: dict[str, Any] = {
        "iteration": progress["iteration"],
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        },
    }
    if schedule:
        common["opt_param_scheduler"] = {
            **{word: schedule[ours] for ours, word in _SCHEDULE.items() if ours in schedule},
            "num_steps": progress["schedule_samples"],
        }
    return common


def state_items(table: Table, state: OptimizerState, weights: Rows) -> list[Item]:
    """List the state as the tensors of a distributed optimizer, ready to be written.

    Weights of 32 bits, which are their own main weights here, are listed as such there.

    Args:
        table: of the weights.
        state: ours.
        weights: ours.

    Raises:
        ValueError: if the model has experts, whose state Megatron may keep in an optimizer of
            its own.
    """
    if table.num_experts:
        raise ValueError(
            "the optimizer's state of a model with experts cannot be written for Megatron, "
            "which keeps theirs apart: leave --optimizer out to convert the weights."
        )
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
