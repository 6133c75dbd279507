"""The table of model families: for each the model, its tensors, costs and layout checks.

A family is one file with the model and one ``Family`` entry. Training, generation and
verification use models only through ``TrainableModel`` and ``Family``, so a family may also be
defined outside of this package and passed to them. No torch here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from mcore_models.building.encoder_layouts import encoder_layout_problems, t5_layout_problems
from mcore_models.building.layouts import layout_problems
from mcore_models.config import TransformerConfig
from mcore_models.encoder_config import BertConfig, T5Config, num_stack_layers
from mcore_models.encoder_shapes import (
    bert_flops_per_token,
    bert_shapes,
    t5_flops_per_token,
    t5_shapes,
)
from mcore_models.flops import flops_per_token
from mcore_models.logical_tensors import tensor_shapes

if TYPE_CHECKING:
    from mcore_models.protocol import TrainableModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture."""

    name: str
    """Name of the family in checkpoints."""

    model: "str | Callable[..., TrainableModel]"
    """Builds the model, with the arguments of ``GPT``: a class or function, or its
    ``module:name``, which is imported when the first model is built."""

    flops_per_token: Callable[..., float]
    """FLOPs of training, with the arguments of ``flops.flops_per_token``."""

    layout_problems: Callable[..., list[str]]
    """Returns the errors of a layout, with the arguments of
    ``building.layouts.layout_problems``."""

    config: type[TransformerConfig] = TransformerConfig
    """Config class of the model's layers."""

    tensor_shapes: Callable[..., dict[str, tuple[int, ...]]] = tensor_shapes
    """Lists the logical tensors, with the arguments of ``logical_tensors.tensor_shapes``."""

    num_layers: Callable[..., int] = attrgetter("num_layers")
    """Number of layers that pipeline stages share."""

    dataset: Literal["gpt", "bert", "t5"] = "gpt"
    """Kind of training samples."""

    def build(self, *arguments: Any, **options: Any) -> "TrainableModel":
        """Build a model, or one pipeline stage of it; see ``GPT`` for the arguments."""
        model = self.model
        if isinstance(model, str):
            module, _, name = model.partition(":")
            model = getattr(import_module(module), name)
        return model(*arguments, **options)


GPT_FAMILY = Family(
    name="gpt",
    model="mcore_models.gpt:GPT",
    flops_per_token=flops_per_token,
    layout_problems=layout_problems,
)

BERT_FAMILY = Family(
    name="bert",
    model="mcore_models.bert:BERT",
    flops_per_token=bert_flops_per_token,
    layout_problems=encoder_layout_problems,
    config=BertConfig,
    tensor_shapes=bert_shapes,
    dataset="bert",
)

T5_FAMILY = Family(
    name="t5",
    model="mcore_models.t5:T5",
    flops_per_token=t5_flops_per_token,
    layout_problems=t5_layout_problems,
    config=T5Config,
    tensor_shapes=t5_shapes,
    num_layers=num_stack_layers,
    dataset="t5",
)

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (GPT_FAMILY, BERT_FAMILY, T5_FAMILY)
}
"""Families by name."""
