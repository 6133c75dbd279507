"""Shapes that a model's description gives its weights, compared with those in the files.

The config.json of other weights may list the same names. Without this check it would give a
checkpoint that cannot be loaded, or one that loads and computes nonsense. ``gpt_shapes`` serves
most families; the others define ``shapes`` in their own module.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_ckpt.families.common.fields import expert_settings, settings
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import listed
from mcore_models.logical_tensors import layer_config, tensor_shapes

Shapes = dict[str, tuple[int, ...]]
"""Shape by name, without the numbers of layer and expert and without ``.weight``; a bias has
the first of its weight's sizes. If layers differ, shapes by complete names too."""

_COUNT = re.compile(r"n_layers?|(\w+_)?(num|n)_(\w+_)?(layers?|experts|blocks)")
"""Fields of any format that count layers or experts, and so determine lengths of lists."""
_LAYER = re.compile(r"^(?:(?:encoder\.|decoder\.)?(?:blocks\.\d+\.)?|mtp\.\d+\.(?:block\.)?)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_counts(
    fields: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: str
) -> None:
    """Compare the numbers of layers and experts in a foreign config with its tensors.

    A layer or an expert has a tensor of its own, or an index in a stack of matrices. Called
    before lists of that length are built: a damaged number would fill the memory.

    Args:
        fields: flat fields of a foreign file.
        shapes: shapes of the tensors of the checkpoint.
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
    """Compare the shapes of weights with those that their description requires.

    Args:
        description: of the model; families without shapes here are not checked.
        entries: weights by logical name; names are checked elsewhere.
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
    """Return the shape of a weight by its family's shapes; None if they do not list it."""
    if name in shapes:
        return shapes[name]
    pattern = within_layer(name)
    stem, _, kind = pattern.rpartition(".")
    if stem not in shapes:
        return shapes.get(pattern)
    # A bias has one number a row of its weight, also that of a router for its experts.
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
