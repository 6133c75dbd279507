"""Steps that are also Hugging Face folders: weights are stored once, as complete tensors.

Weights go to ``model-*.safetensors`` under their Hugging Face ("foreign") names, and the index
of the step points into these files; optimizer state and other tensors stay in the rank files.
Each foreign tensor is assembled on one rank from the boxes of all ranks, in rounds of bounded
size; each rank writes the file of the tensors that it owns, about its share of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_base.atomic_files import write_durably
from mcore_ckpt.families import family_for, find_family
from mcore_ckpt.formats.hf_folder import small_files
from mcore_ckpt.formats.json_files import json_bytes
from mcore_ckpt.mapping.rules import Link, expand, match_ours, split_index
from mcore_ckpt.save_load.tensor_exchange import Move, exchange
from mcore_ckpt.storage.boxes import Box
from mcore_ckpt.storage.files import DTYPES, narrow_to_box
from mcore_ckpt.storage.index import DTYPE_BYTES, TensorEntry
from mcore_ckpt.storage.shard_plans import Claim, PlannedTensor, Write
from mcore_parallel.mesh import Axis

HF_INDEX = "model.safetensors.index.json"
"""Index of the files of foreign tensors."""

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class HFView:
    """A model's config and tensor names in a Hugging Face folder."""

    config: Mapping[str, Any]
    """Fields of config.json, without the dtype."""
    links: tuple[Link, ...]
    """Each foreign tensor with the logical tensors that it holds."""


def hf_view(
    description: dict[str, Any],
    model_type: str = "",
    carried: Mapping[str, Any] = MappingProxyType({}),
) -> HFView:
    """Return the config and the tensor names of a model in a Hugging Face folder.

    Args:
        description: description of the model, as in mcore checkpoints.
        model_type: family to write; empty: the first that can express the model.
        carried: fields of the model's config.json that do not affect its outputs.

    Raises:
        ValueError: if no family can express the model, or the family stores rows transposed,
            interleaved or padded, so that its bytes differ from the logical tensors'.
    """
    model_type = model_type or family_for(description)
    family = find_family(model_type)
    config = {**carried, **family.to_theirs(description)}
    links = tuple(expand(family.table(description)))
    reordered = [
        link.theirs
        for link in links
        if not link.is_plain or link.padding or split_index(link.theirs)[1]
    ]
    if reordered:
        raise ValueError(
            f"--save-hf cannot write {model_type}, which stores rows in another order "
            f"({reordered[0]}): leave it out, and use mcore-ckpt convert mcore-to-hf."
        )
    return HFView(config, links)


@dataclass(frozen=True, slots=True)
class HFPlan:
    """The rank that assembles each foreign tensor; equal on all ranks."""

    entries: list[list[PlannedTensor]]
    """Each rank's foreign tensors in file order."""
    moves: list[Move[Write]]
    """Boxes to move, in an order that keeps all ranks busy."""
    rest: list[list[Write]]
    """Writes of each rank to its own file."""
    names: list[str]
    """File name of each rank's weights; empty for a rank without weights."""

    def small_files(self, config: Mapping[str, Any]) -> dict[str, bytes]:
        """Return config.json and the index of weight files."""
        sizes: dict[str, int] = {}
        file_names = {}
        for name, entries in zip(self.names, self.entries, strict=True):
            for entry in entries:
                file_names[entry.key] = name
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
        dtype_name = str(DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]).removeprefix(
            "torch."
        )
        files = {
            "config.json": json_bytes(
                {**config, "torch_dtype": dtype_name, "dtype": dtype_name}
            )
        }
        if len(set(file_names.values())) > 1:
            table = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": dict(sorted(file_names.items())),
            }
            files[HF_INDEX] = json_bytes(table)
        return files


def plan_hf(
    links: Sequence[Link], claims: Sequence[Mapping[str, Claim]], writes: Sequence[list[Write]]
) -> HFPlan:
    """Assign each foreign tensor to the rank that writes all of it, else by bytes. Pure.

    Args:
        links: each foreign tensor with the logical tensors that it holds.
        claims: claims of each rank.
        writes: boxes that each rank would write, from ``plan_writes``.

    Raises:
        ValueError: if the ranks' weights are not the logical tensors of the links.
    """
    ours = {
        name.removeprefix(_PREFIX): TensorEntry(claim.shape, claim.dtype, ())
        for mine in claims
        for name, claim in mine.items()
        if name.startswith(_PREFIX)
    }
    match_ours(links, ours)
    boxes: dict[str, list[tuple[int, Box]]] = {}
    rest: list[list[Write]] = [[] for _ in writes]
    for rank, mine in enumerate(writes):
        for one in mine:
            name = one.name.removeprefix(_PREFIX)
            if name != one.name:
                boxes.setdefault(name, []).append((rank, one.box))
            else:
                rest[rank].append(one)
    owners = _owners(links, ours, boxes, len(writes))
    entries: list[list[PlannedTensor]] = [[] for _ in writes]
    positioned_moves: list[tuple[int, int, Move[Write]]] = []
    load = [0] * len(writes)
    for number, (link, owner) in enumerate(zip(links, owners, strict=True)):
        entry = _entry(link, ours)
        entries[owner].append(entry)
        for name in link.ours:
            size = DTYPE_BYTES[entry.dtype]
            for source, box in boxes.get(name, []):
                move = Move(source, owner, prod(box[1]) * size, Write(_PREFIX + name, box))
                positioned_moves.append((load[owner], number, move))
        load[owner] += entry.num_bytes
    for mine in entries:
        mine.sort(key=lambda entry: -DTYPE_BYTES[entry.dtype])
    # Sorted by position in the owner's file, so that all owners receive in every round.
    moves = [move for _, _, move in sorted(positioned_moves, key=lambda one: one[:2])]
    return HFPlan(entries, moves, rest, _names(entries))


def assemble(
    plan: HFPlan, live: Mapping[Write, Tensor], *, world: Axis, device: torch.device
) -> list[Tensor]:
    """Assemble this rank's foreign tensors; all ranks of ``world`` call it.

    Args:
        plan: plan of all ranks.
        live: memory of each box that this rank holds.
        world: the ranks that save together.
        device: device of the communication.

    Returns:
        The memory of each section of this rank's entries: boxes that this rank holds completely
        are not copied, others are on the host.
    """
    sections = [
        (one, DTYPES[entry.dtype])
        for entry in plan.entries[world.rank]
        for one in entry.sections
    ]
    pinned = device.type == "cuda"
    host = {
        one.name: torch.empty(one.box[1], dtype=dtype, pin_memory=pinned)
        for one, dtype in sections
        if one not in live
    }

    def take(one: Write, data: Tensor) -> None:
        view = narrow_to_box(host[one.name], one.box)
        view.copy_(data.view(view.dtype).view(one.box[1]), non_blocking=True)

    # A complete tensor on its own rank stays in place.
    whole = {one for mine in plan.entries for entry in mine for one in entry.sections}
    moves = [m for m in plan.moves if not (m.source == m.target and m.key in whole)]
    exchange(moves, lambda one: live[one], take, world=world, device=device)
    if pinned:
        torch.cuda.current_stream().synchronize()
    return [live[one] if one in live else host[one.name] for one, _ in sections]


def put_tokenizer_at_root(step: Path) -> None:
    """Copy the tokenizer of a step folder to its root, where transformers expects it."""
    files, _ = small_files(step / "tokenizer")
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        files["tokenizer_config.json"] = json_bytes(
            {"tokenizer_class": "PreTrainedTokenizerFast"}
        )
    for name, content in files.items():
        (step / name).parent.mkdir(exist_ok=True)
        write_durably(step / name, content)


def _entry(link: Link, ours: Mapping[str, TensorEntry]) -> PlannedTensor:
    shapes = [ours[name].shape for name in link.ours]
    stacked = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
    sections = tuple(
        Write(_PREFIX + name, ((0,) * len(shape), shape))
        for name, shape in zip(link.ours, shapes, strict=True)
    )
    return PlannedTensor(link.theirs, ours[link.ours[0]].dtype, stacked, sections)


def _owners(
    links: Sequence[Link],
    ours: Mapping[str, TensorEntry],
    boxes: Mapping[str, list[tuple[int, Box]]],
    num_ranks: int,
) -> list[int]:
    load = [0] * num_ranks
    owners = [-1] * len(links)
    sizes = [sum(ours[name].num_bytes for name in link.ours) for link in links]
    for number, link in enumerate(links):
        writers = {rank for name in link.ours for rank, _ in boxes.get(name, [])}
        if len(writers) == 1:
            owners[number] = writers.pop()
            load[owners[number]] += sizes[number]
    for number in sorted(range(len(links)), key=lambda n: (-sizes[n], n)):
        if owners[number] < 0:
            owners[number] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
            load[owners[number]] += sizes[number]
    return owners


def _names(entries: Sequence[Sequence[PlannedTensor]]) -> list[str]:
    total = sum(bool(mine) for mine in entries)
    if total == 1:
        return ["model.safetensors" if mine else "" for mine in entries]
    names, number = [], 0
    for mine in entries:
        number += bool(mine)
        names.append(f"model-{number:05d}-of-{total:05d}.safetensors" if mine else "")
    return names
