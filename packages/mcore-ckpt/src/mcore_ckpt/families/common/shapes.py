"""The sizes that a model's description gives its weights, by their names within a layer.

``gpt`` is what most families have; those that differ say so in their own file.
"""

import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.experts import expert_settings
from mcore_ckpt.families.common.fields import settings
from mcore_models.logical_tensors import tensor_shapes

Shapes = dict[str, tuple[int, ...]]
"""By name without number of layer or expert and without ``.weight``; of a bias, the first
number counts."""

_LAYER = re.compile(r"^(?:(?:encoder\.|decoder\.)?(?:blocks\.\d+\.)?|mtp\.\d+\.(?:block\.)?)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def within_layer(name: str) -> str:
    """Return a weight's name without the numbers of its layer and its expert."""
    return _EXPERT.sub(".experts.*.", _LAYER.sub("", name))


def shapes_within_layer(shapes: Shapes) -> Shapes:
    """Return the shapes of logical tensors by their names without layer and expert."""
    return {within_layer(name).removesuffix(".weight"): shape for name, shape in shapes.items()}


def gpt_shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shape of each kind of weight of a GPT, by its name within a layer."""
    config, moe = settings(description), expert_settings(description)
    return shapes_within_layer(tensor_shapes(config, description["vocab_size"], moe))
