"""``ModelDescription``: config, experts, vocabulary and family of a model, as data.

A checkpoint stores a description as nested JSON, ``{"family", "vocab_size", "config",
"moe"}``; a preset or a recipe is a flat table of flags. No torch here.
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
        """Build a description from ``to_dict``'s result; missing fields get their defaults.

        Raises:
            ValueError: for an unknown family or field.
        """
        family = table.get("family", "gpt")
        if family not in families:
            raise ValueError(f"unknown model family {family!r}: use {', '.join(families)}.")
        return cls(
            config=config_from_dict(families[family].config, table["config"]),
            vocab_size=table["vocab_size"],
            moe=config_from_dict(MoEConfig, table.get("moe", {})),
            family=family,
        )

    @classmethod
    def from_flags(cls, table: Mapping[str, Any], family: str = "gpt") -> "ModelDescription":
        """Build a description from a flat table of flags with underscores.

        Args:
            table: flags of model and experts, and ``vocab_size``.
            family: name of the model's family in ``FAMILIES``.

        Raises:
            ValueError: for an unknown field.
        """
        moe_names = {f.name for f in fields(MoEConfig)}
        moe = {name: value for name, value in table.items() if name in moe_names}
        config = {name: value for name, value in table.items() if name not in moe_names}
        vocab_size = config.pop("vocab_size", 0)
        return cls(
            config=config_from_dict(FAMILIES[family].config, config),
            vocab_size=vocab_size,
            moe=config_from_dict(MoEConfig, moe),
            family=family,
        )
