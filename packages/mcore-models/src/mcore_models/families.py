"""The table of model families: how each is built, counted and checked.

A family is one file with its model and one entry here. Training, generation and verification
know a model only as a ``TrainableModel`` and its family only as an entry, so a family may also
be defined outside of this package and given to them. No torch here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_models.flops import flops_per_token
from mcore_models.layout_checks import layout_problems

if TYPE_CHECKING:
    from mcore_models.protocol import TrainableModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture."""

    name: str
    """What a checkpoint calls it."""

    model: "str | Callable[..., TrainableModel]"
    """Builds it, with the arguments of ``GPT``: a class or function, or ``module:name`` of
    one, which is imported when the first model is built."""

    flops_per_token: Callable[..., float]
    """Cost of training, with the arguments of ``flops.flops_per_token``."""

    layout_problems: Callable[..., list[str]]
    """What keeps a model from being split, with the arguments of
    ``layout_checks.layout_problems``."""

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

FAMILIES: Mapping[str, Family] = {family.name: family for family in (GPT_FAMILY,)}
"""Families by name."""
