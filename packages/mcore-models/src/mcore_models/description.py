"""A complete model as data: as checkpoints store it and as presets define it.

In a checkpoint it is nested JSON, ``{"family", "vocab_size", "config", "moe"}``; as a preset
or a recipe it is one flat table of flags. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mcore_models.config import TransformerConfig, config_from_dict, config_to_dict
from mcore_models.families import FAMILIES, Family
from mcore_moe.config import MoEConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """Everything needed to build a model, except its layout and its weights."""

    config: TransformerConfig
    """Shape and numerics of the layers."""

    vocab_size: int
    """True number of tokens."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts; none by default."""

    family: str = "gpt"
    """Name of the architecture in ``FAMILIES``."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to nested JSON types."""
        return {
            "family": self.family,
            "vocab_size": self.vocab_size,
            "config": config_to_dict(self.config),
            "moe": config_to_dict(self.moe),
        }

    @classmethod
    def from_dict(
        cls, table: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES
    ) -> "ModelDescription":
        """Build from ``to_dict``'s result; missing fields get their defaults.

        Raises:
            ValueError: for another family or an unknown field.
        """
        family = table.get("family", "gpt")
        if family not in families:
            known = ", ".join(families)
            raise ValueError(f"the model family {family!r} is not known here: use {known}.")
        return cls(
            config=config_from_dict(families[family].config, table["config"]),
            vocab_size=table["vocab_size"],
            moe=config_from_dict(MoEConfig, table.get("moe", {})),
            family=family,
        )

    @classmethod
    def from_flags(cls, table: Mapping[str, Any], family: str = "gpt") -> "ModelDescription":
        """Build from a flat table of flags with underscores.

        Args:
            table: flags of model and experts, and the vocabulary's size.
            family: of the model, by its name in ``FAMILIES``.

        Raises:
            ValueError: for an unknown field.
        """
        names = {f.name for f in fields(MoEConfig)}
        moe = {name: value for name, value in table.items() if name in names}
        rest = {name: value for name, value in table.items() if name not in names}
        vocab_size = rest.pop("vocab_size", 0)
        return cls(
            config=config_from_dict(FAMILIES[family].config, rest),
            vocab_size=vocab_size,
            moe=config_from_dict(MoEConfig, moe),
            family=family,
        )
