"""The sizes that a model's description gives its weights, held against those in the files.

A config.json that belongs to other weights can list the very same names. Taken as it is, it
would make a checkpoint that cannot be loaded, or one that loads and computes nonsense.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families import shapes_of
from mcore_ckpt.families.common.shapes import within_layer
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import listed


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
