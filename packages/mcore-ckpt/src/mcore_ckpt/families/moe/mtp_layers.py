"""Rules of multi-token prediction (MTP) layers, as DeepSeek-V3 and GLM-4.5 store them.

MTP layers follow the last layer: ``model.layers.61.*`` of DeepSeek-V3 is a normal layer,
preceded by two norms and a projection, and followed by a norm. Copies of embedding and head are
accepted if they equal the model's, and not written.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import pair
from mcore_ckpt.families.common.fields import expert_setting, setting
from mcore_ckpt.mapping.rules import Rule

_AROUND = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_norm": "shared_head.norm",
}


MTP = pair("mtp_num_layers", "num_nextn_predict_layers", 0)
"""Rule of the number of MTP layers."""


def without_absent(description: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove MTP layers from the description if the folder has none."""
    if any(f"{there}eh_proj.weight" in names for there in _places(description)):
        return description
    fields = {name: v for name, v in description["config"].items() if name != "mtp_num_layers"}
    return {**description, "config": fields}


def mtp_rules(description: Mapping[str, Any], layer_rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules of MTP layers, derived from those of a normal layer.

    Args:
        description: description of the model.
        layer_rules: rules of the model's layers.
    """
    last = setting(description, "num_layers") - 1
    block = [rule for rule in layer_rules if rule.layers is None or last in rule.layers]
    rules: list[Rule] = []
    for number, there in enumerate(_places(description)):
        here = f"mtp.{number}."
        rules += [Rule(f"{here}{a}.weight", f"{there}{b}.weight") for a, b in _AROUND.items()]
        for rule in block:
            a = str(rule.ours).replace("blocks.*.", f"{here}block.", 1)
            b = rule.theirs.replace("model.layers.*.", there, 1)
            experts = expert_setting(description, "num_experts") if "*" in b else 1
            rules += [
                replace(rule, ours=a.replace("*", e), theirs=b.replace("*", e), layers=None)
                for e in map(str, range(experts))
            ]
    return rules


def mtp_copies(description: Mapping[str, Any]) -> dict[str, str]:
    """Return the original name for each MTP layer's copies of embedding and head."""
    tied = not setting(description, "untie_embeddings_and_output_weights")
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    copies: dict[str, str] = {}
    for there in _places(description):
        copies[f"{there}embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"{there}shared_head.head.weight"] = head
    return copies


def _places(description: Mapping[str, Any]) -> list[str]:
    """Return the prefix of each MTP layer in the folder."""
    count, number = (setting(description, n) for n in ("num_layers", "mtp_num_layers"))
    return [f"model.layers.{count + depth}." for depth in range(number)]
