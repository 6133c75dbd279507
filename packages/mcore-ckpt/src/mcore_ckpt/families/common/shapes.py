"""Compares the shapes of weights in files with those that a model's description requires.

A config.json of another model may have the same names of weights. Without this check the
checkpoint could not be loaded, or would be loaded and compute nonsense. ``gpt_shapes`` has the
shapes of most families; the other families define ``shapes`` in their modules.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_ckpt.families.common.fields import expert_settings, settings
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import list_problems
from mcore_models.logical_tensors import layer_config, tensor_shapes

Shapes = dict[str, tuple[int, ...]]
"""Shapes by name, without the numbers of layer and expert and without ``.weight``; the shape of
a bias is the first size of its weight. If layers differ, also shapes by complete names."""

_COUNT = re.compile(r"n_layers?|(\w+_)?(num|n)_(\w+_)?(layers?|experts|blocks)")
"""Fields of any format that count layers or experts, and so determine lengths of lists."""
_LAYER = re.compile(r"^(?:(?:encoder\.|decoder\.)?(?:blocks\.\d+\.)?|mtp\.\d+\.(?:block\.)?)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_counts(
    fields: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: str
) -> None:
    """Check that a foreign config has no more layers and experts than tensors allow.

    Each layer or expert has a separate tensor, or an index in a stack of matrices. Call it
    before building lists of that length, as a damaged number would fill the memory.

    Args:
        fields: flat fields of a foreign file.
        shapes: shapes of the tensors of the checkpoint.
        where: the file, for messages.

    Raises:
        ValueError: with the field, its value and the largest number that the tensors allow.
    """
    limit = 0
    all_shapes = list(shapes)
    for shape in all_shapes:
        limit = max(limit, *shape[:-2]) if len(shape) > 2 else limit
    limit = max(limit, len(all_shapes))
    for name, value in fields.items():
        if isinstance(value, int) and value > limit and _COUNT.fullmatch(name):
            raise ValueError(
                f"{where} has {name}={value}, but the checkpoint has {len(all_shapes)} "
                f"tensors, enough for {limit} at most: it is damaged, or of another model."
            )


def check_description(
    description: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: str
) -> None:
    """Compare a description's numbers of layers and experts; see ``check_counts``."""
    parts = [description.get(name) for name in ("config", "moe")]
    tables = [part for part in parts if isinstance(part, Mapping)]
    all_shapes = list(shapes)
    for table in tables:
        check_counts(table, all_shapes, where)


def check_shapes(description: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
    """Compare the shapes of weights with those that their description requires.

    Args:
        description: description of the model; unknown families are not checked.
        entries: weights by logical name; the names are not checked.

    Raises:
        ValueError: with all weights whose shapes differ.
    """
    shapes = shapes_of(description)
    problems = []
    for name, entry in entries.items():
        shape = expected_shape(name, shapes)
        if shape is not None and entry.shape != shape:
            problems.append(
                f"{name}: {list(entry.shape)} in the file, {list(shape)} by config.json"
            )
    if problems:
        raise ValueError(
            f"weight shapes do not match config.json: give the config.json of these weights. "
            f"{list_problems(problems)}"
        )


def shapes_of(description: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights as ``Shapes``; empty for an unknown family."""
    name = description.get("family", "")
    if name == "gpt":
        return gpt_shapes(description)
    model_types = {model_type.replace("-", "_"): model_type for model_type in MODEL_TYPES}
    if name not in model_types:
        return {}
    return find_family(model_types[name]).shapes(description)


def expected_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of a weight in ``shapes``; None if ``shapes`` does not have it."""
    if name in shapes:
        return shapes[name]
    pattern = within_layer(name)
    stem, _, kind = pattern.rpartition(".")
    if stem not in shapes:
        return shapes.get(pattern)
    # A bias, also a router's bias for experts, has one number for each row of its weight.
    return shapes[stem] if kind == "weight" else shapes[stem][:1]


def within_layer(name: str) -> str:
    """Return a weight's name without the numbers of its layer and its expert."""
    return _EXPERT.sub(".experts.*.", _LAYER.sub("", name))


def shapes_within_layer(shapes: Shapes) -> Shapes:
    """Return shapes by names without the numbers of layer and expert."""
    return {within_layer(name).removesuffix(".weight"): shape for name, shape in shapes.items()}


def gpt_shapes(description: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a GPT's weights, as ``Shapes``."""
    config, moe = settings(description), expert_settings(description)
    shapes = tensor_shapes(config, description["vocab_size"], moe)
    are_alike = all(layer_config(config, layer) is config for layer in range(config.num_layers))
    return shapes_within_layer(shapes) | ({} if are_alike else shapes)
