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


def gpt_shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shape of each kind of weight of a GPT, by its name within a layer."""
    config, moe = settings(description), expert_settings(description)
    shapes = tensor_shapes(config, description["vocab_size"], moe)
    return {
        within_layer(name).removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".dt_bias") or not name.endswith("bias")
    }


def mlp_shapes(name: str, width: int, hidden: int) -> Shapes:
    """List the shapes of one feed-forward layer, gated or not."""
    first = {f"{name}.{part}": (width, hidden) for part in ("fc1", "fc1.gate", "fc1.up")}
    return {**first, f"{name}.fc2": (hidden, width)}
