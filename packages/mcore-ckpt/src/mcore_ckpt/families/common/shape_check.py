"""The sizes that a model's description gives its weights, held against those in the files.

A config.json that belongs to other weights can list the very same names. Taken as it is, it
would make a checkpoint that cannot be loaded, or one that loads and computes nonsense.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_ckpt.families import shapes_of
from mcore_ckpt.families.common.shapes import within_layer
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import listed

_COUNT = re.compile(r"n_layers?|(\w+_)?(num|n)_(\w+_)?(layers?|experts|blocks)")
"""Fields that count layers or experts, of which code makes lists, in any format."""


def check_counts(
    fields: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: str
) -> None:
    """Compare a model's numbers of layers and experts with the tensors that there are.

    A layer or an expert has a tensor of its own, or an index of a stack of matrices. Call it
    before the fields are read: lists as long as the fields say would fill the memory.

    Args:
        fields: of a foreign file, flat.
        shapes: of the tensors of the checkpoint.
        where: the file, for messages.

    Raises:
        ValueError: naming the field, its value and the most that the tensors allow.
    """
    most = 0
    listed = list(shapes)
    for shape in listed:
        most = max(most, *shape[:-2]) if len(shape) > 2 else most
    most = max(most, len(listed))
    for name, value in fields.items():
        if isinstance(value, int) and value > most and _COUNT.fullmatch(name):
            raise ValueError(
                f"{where} says {name}={value}, and the checkpoint has {len(listed)} tensors, "
                f"enough for {most} at most: it is damaged, or another model's."
            )


def check_description(
    description: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: str
) -> None:
    """Compare a description's numbers of layers and experts; see ``check_counts``."""
    parts = [description.get(name) for name in ("config", "moe")]
    tables = [part for part in parts if isinstance(part, Mapping)]
    listed = list(shapes)
    for table in tables:
        check_counts(table, listed, where)


def check_shapes(description: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
    """Compare weights with what their model's description says.

    Args:
        description: of the model; one of a family that is not known here says nothing.
        entries: its weights by logical name. Names are another check's matter.
    """
    shapes = shapes_of(description)
    problems = []
    for name, entry in entries.items():
        shape = expected_shape(name, shapes)
        if shape is not None and entry.shape != shape:
            problems.append(f"{name}: {list(entry.shape)} there, {list(shape)} by the config")
    if problems:
        raise ValueError(
            f"weight shapes do not match config.json; is it another model's? {listed(problems)}"
        )


def expected_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Find a weight's shape among those of its family; None if it says nothing of it."""
    pattern = within_layer(name)
    stem, _, kind = pattern.rpartition(".")
    if stem not in shapes:
        return shapes.get(pattern)
    # A bias, also the router's for each expert: a number a row.
    return shapes[stem] if kind == "weight" else shapes[stem][:1]
