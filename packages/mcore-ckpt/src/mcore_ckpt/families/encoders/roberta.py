"""RoBERTa and XLM-RoBERTa: BERT without the sentence task, with positions counted from 2.

The first two rows of the table of positions are unused and padding.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt.families.encoders import bert, megatron_bert
from mcore_ckpt.families.encoders.megatron_bert import read, write
from mcore_ckpt.mapping.rules import Table

_OFFSET = 2
_NAMES = {
    "cls.predictions.transform.dense.": "lm_head.dense.",
    "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
    "cls.predictions.decoder.": "lm_head.decoder.",
    "cls.predictions.": "lm_head.",
    "bert.": "roberta.",
}
"""RoBERTa's prefix for each prefix of BERT's names."""


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next((old for old in names if name.startswith(old)), "")
    return names[old] + name.removeprefix(old) if old else name


@dataclass(frozen=True, slots=True)
class Roberta:
    """A family like RoBERTa; see ``families``."""

    model_type: str
    """``model_type`` in config.json."""
    architecture: str
    """Prefix of the names of the family's classes."""

    def to_ours(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Read a config.json as a description."""
        if (padding := config.get("pad_token_id", 1)) != _OFFSET - 1:
            raise ValueError(
                f"config.json has pad_token_id={padding!r}, from which positions are counted; "
                f"mcore cannot represent it here: only {_OFFSET - 1}."
            )
        named = {"architectures": [f"{self.architecture}ForMaskedLM"], **config}
        description = read(named, self.architecture, post_layer_norm=True)
        ours = description["config"]
        ours["position_embedding_offset"] = _OFFSET
        ours["max_position_embeddings"] -= _OFFSET
        return description

    def to_theirs(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Write a description as a config.json."""
        theirs = write(
            description,
            self.model_type,
            self.architecture,
            post_layer_norm=True,
            position_offset=_OFFSET,
        )
        if "binary" in description["config"]["bert_heads"]:
            raise ValueError("it cannot express --bert-heads binary")
        theirs["max_position_embeddings"] += _OFFSET
        return theirs | {"pad_token_id": _OFFSET - 1}

    def table(self, description: Mapping[str, Any]) -> Table:
        """List the weights."""
        table = bert.table(description)
        return replace(
            table,
            rules=tuple(replace(r, theirs=_renamed(r.theirs, _NAMES)) for r in table.rules),
            droppable=tuple(_renamed(name, _NAMES) for name in table.droppable),
            copies={
                _renamed(copy, _NAMES): _renamed(origin, _NAMES)
                for copy, origin in table.copies.items()
            },
        )

    def as_stored(self, description: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Return a description with the heads that the tensors show, such as a pooler."""
        back = {new: old for old, new in _NAMES.items()}
        return megatron_bert.as_stored(description, {_renamed(name, back) for name in names})

    shapes = staticmethod(megatron_bert.shapes)


FAMILIES = {
    "roberta": Roberta("roberta", "Roberta"),
    "xlm-roberta": Roberta("xlm-roberta", "XLMRoberta"),
}
"""Families by ``model_type``."""
