"""Rotary positions in a config.json: base, share of the head that rotates, and scaling.

The old spelling (``rope_theta``, ``rope_scaling``) and the new one (``rope_parameters``) are
read with the precedence of transformers 5: a ``rope_scaling`` that is not empty replaces
``rope_parameters`` completely; then base and share in the remaining table override those at
config.json's top level. Both spellings are written, with equal values.
"""

import math
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import DEFAULTS, Fields, setting

STRETCHED = (
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("yarn_correction_range_round_to_int", "rope_attention_factor"),
    *("longrope_short_factor", "longrope_long_factor"),
)
"""Our fields of rotary scaling."""

_LLAMA3 = (
    *("factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)


_REPLACED = "rope_parameters that rope_scaling replaces"


def one_rope_table(config: Mapping[str, Any], stretched_layers: str = "") -> dict[str, Any]:
    """Return a config.json with only the rotary table that transformers 5 uses.

    Args:
        config: a config.json with the old spelling, the new spelling, or both.
        stretched_layers: layer type whose table ``rope_scaling`` updates; empty: there is one
            table, which ``rope_scaling`` replaces.

    Raises:
        ValueError: if one of the tables is not an object, or has no layer types although
            ``stretched_layers`` is given.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters") or {}
    for name, table in (("rope_scaling", scaling or {}), ("rope_parameters", parameters)):
        if not isinstance(table, Mapping):
            raise ValueError(f"config.json has {name}={table!r}: it must be an object.")
    by_layer = [name for name, table in parameters.items() if isinstance(table, Mapping)]
    if stretched_layers and parameters and not by_layer:
        raise ValueError(
            f"config.json has rope_parameters={parameters!r}, which transformers ignores in "
            f"this family: state them for each kind of layer, {{{stretched_layers!r}: "
            "{...}}."
        )
    one = {name: value for name, value in config.items() if name != "rope_scaling"}
    if not scaling:
        return one
    if stretched_layers:
        default = {"rope_type": "default"}
        updated = {**(parameters.get(stretched_layers) or default), **scaling}
        return one | {"rope_parameters": {**parameters, stretched_layers: updated}}
    return one | {"rope_parameters": scaling} | ({_REPLACED: parameters} if parameters else {})


def read_rope(
    fields: Fields, limit: int, *, theta: float = 10000.0, partial: float = 1.0
) -> dict[str, Any]:
    """Return our fields for base, share and scaling of rotary positions.

    Args:
        fields: fields of the config.json, after ``one_rope_table``.
        limit: ``max_position_embeddings`` of the config.json; 0: absent.
        theta: base if config.json states none.
        partial: share of each head that rotates if config.json states none.

    Raises:
        ValueError: if a table that transformers ignores has another base or share, or the
            scaling is unknown.
    """
    parameters = dict(fields.take("rope_parameters", {}))
    parameters.setdefault("rope_theta", fields.take("rope_theta", theta))
    parameters.setdefault(
        "partial_rotary_factor", fields.take("partial_rotary_factor", partial)
    )
    ignored = fields.take(_REPLACED, {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in ignored and ignored[name] != parameters[name]:
            raise ValueError(
                f"config.json has {name}={ignored[name]!r} in rope_parameters, which "
                "transformers ignores when rope_scaling is set: it would compute with "
                f"{parameters[name]!r}. Move the fields of rope_scaling into rope_parameters, "
                f"or write the intended {name} into rope_scaling."
            )
    return read_one_rope(parameters, limit)


def read_one_rope(parameters: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return our fields for one table of rotary parameters; all its fields must be known."""
    rope = Fields(parameters)
    ours: dict[str, Any] = {
        "rotary_base": float(rope.take("rope_theta")),
        "rotary_percent": rope.take("partial_rotary_factor", 1.0),
    }
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind == "linear":
        ours["rotary_seq_len_interpolation_factor"] = float(rope.take("factor"))
    elif kind == "llama3":
        ours["use_rope_scaling"] = True
        ours |= {
            f"rope_scaling_{name}": float(rope.take(name))
            if name.endswith("factor")
            else rope.take(name)
            for name in _LLAMA3
        }
    elif kind == "dynamic":
        context, factor = limit, float(rope.take("factor"))
        rope.must_be("original_max_position_embeddings", limit)  # transformers uses the limit
        ours |= {
            "rope_type": "dynamic",
            "rotary_scaling_factor": factor,
            "original_max_position_embeddings": context,
            # transformers' limit is the context before scaling; ours is the longest sequence.
            "max_position_embeddings": int(context * factor),
        }
    elif kind == "yarn":
        ours |= _read_yarn(rope, limit)
    elif kind in ("longrope", "su"):
        ours |= _read_longrope(rope, limit)
    elif kind == "proportional":
        ours["rope_type"] = kind
    elif kind != "default":
        raise ValueError(
            f"config.json has rope_type={kind!r}, which mcore cannot represent: only default, "
            "linear, llama3, dynamic, yarn, longrope and proportional."
        )
    rope.finish()
    return ours


def _read_yarn(rope: Fields, limit: int) -> dict[str, Any]:
    factor = float(rope.take("factor"))
    scales = rope.maybe("mscale") or 0.0, rope.maybe("mscale_all_dim") or 0.0
    if scales[1] and not scales[0]:
        raise ValueError(
            "config.json has mscale_all_dim without mscale, which mcore cannot represent."
        )
    if not all(scales):  # one of them alone has no effect in YaRN
        scales = 1.0, 0.0
    attention_factor = float(rope.maybe("attention_factor") or 0.0)
    if abs(attention_factor - (0.1 * math.log(factor) + 1)) < 1e-6 and not scales[1]:
        attention_factor = 0.0  # equal to YaRN's own factor
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": rope.take(
            "original_max_position_embeddings", limit
        ),
        "beta_fast": float(rope.maybe("beta_fast") or 32.0),
        "beta_slow": float(rope.maybe("beta_slow") or 1.0),
        "mscale": float(scales[0]),
        "mscale_all_dim": float(scales[1]),
        "yarn_correction_range_round_to_int": bool(rope.maybe("truncate", True)),
        "rope_attention_factor": attention_factor,
    }


def _read_longrope(rope: Fields, limit: int) -> dict[str, Any]:
    context = rope.take("original_max_position_embeddings", limit)
    return {
        "rope_type": "longrope",
        "rotary_scaling_factor": float(rope.maybe("factor") or limit / context),
        "original_max_position_embeddings": context,
        "longrope_short_factor": [float(x) for x in rope.take("short_factor")],
        "longrope_long_factor": [float(x) for x in rope.take("long_factor")],
        "rope_attention_factor": float(rope.maybe("attention_factor") or 0.0),
    }


def write_rope(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields of a config.json in both spellings.

    Raises:
        ValueError: if two kinds of scaling are set.
    """
    base = setting(description, "rotary_base")
    scaling = rope_scaling(description)
    percent = setting(description, "rotary_percent")
    partial = {"partial_rotary_factor": percent} if percent != 1.0 else {}
    parameters = {"rope_type": "default", **scaling, "rope_theta": base, **partial}
    fields = {
        **partial,
        "rope_theta": base,
        "rope_scaling": scaling or None,
        "rope_parameters": parameters,
    }
    if setting(description, "rope_type") == "dynamic":
        context = setting(description, "original_max_position_embeddings")
        fields["max_position_embeddings"] = context
    return fields


def rope_scaling(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary scaling of a description; empty: none.

    Raises:
        ValueError: if two kinds of scaling are set.
    """
    factor = setting(description, "rotary_seq_len_interpolation_factor")
    kind = setting(description, "rope_type")
    if setting(description, "use_rope_scaling"):
        if factor != 1.0:
            raise ValueError(
                "it cannot express --use-rope-scaling and "
                f"--rotary-seq-len-interpolation-factor {factor} together"
            )
        names = {name: setting(description, f"rope_scaling_{name}") for name in _LLAMA3}
        return {"rope_type": "llama3"} | names
    if factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "rope":
        return {}
    if kind == "proportional":
        return {"rope_type": kind}
    stretch = setting(description, "rotary_scaling_factor")
    common = {"rope_type": kind, "factor": stretch}
    if kind == "dynamic":
        return common
    common["original_max_position_embeddings"] = setting(
        description, "original_max_position_embeddings"
    )
    if explicit := setting(description, "rope_attention_factor"):
        common["attention_factor"] = explicit
    if kind == "longrope":
        for length in ("short", "long"):
            factors = setting(description, f"longrope_{length}_factor")
            common[f"{length}_factor"] = list(factors)
        return common
    names = [n for n in ("beta_fast", "beta_slow") if setting(description, n) != DEFAULTS[n]]
    if setting(description, "mscale_all_dim"):
        names += ["mscale", "mscale_all_dim"]
    elif setting(description, "mscale") != 1.0 and not explicit:
        scale = setting(description, "mscale")
        common["attention_factor"] = 0.1 * scale * math.log(stretch) + 1.0
    common |= {name: setting(description, name) for name in names}
    if not setting(description, "yarn_correction_range_round_to_int"):
        common["truncate"] = False
    return common
