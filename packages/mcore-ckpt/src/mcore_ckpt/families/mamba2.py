"""Mamba-2: state-space layers; five matrices share one input projection.

No model here runs it yet: the fields that have no flag keep the family's own names.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.fields import REQUIRED, Fields, read_pairs, require_family, write_pairs
from mcore_ckpt.families.shapes import Shapes
from mcore_ckpt.mapping.rules import Rule, Table

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("norm_epsilon", "layer_norm_epsilon", 1e-5),
    ("mamba_num_heads", "num_heads", 128),
    ("mamba_head_dim", "head_dim", 64),
    ("mamba_state_dim", "state_size", 128),
    ("mamba_num_groups", "n_groups", 8),
    ("conv_kernel", "conv_kernel", 4),
    ("expand", "expand", 2),
    ("chunk_size", "chunk_size", 256),
    ("use_conv_bias", "use_conv_bias", True),
    ("residual_in_fp32", "residual_in_fp32", True),
    ("init_method_std", "initializer_range", 0.1),
    ("rescale_prenorm_residual", "rescale_prenorm_residual", False),
    ("time_step_rank", "time_step_rank", "auto"),
    ("time_step_min", "time_step_min", 0.001),
    ("time_step_max", "time_step_max", 0.1),
    ("time_step_floor", "time_step_floor", 1e-4),
    ("time_step_limit", "time_step_limit", None),
)


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    fields.must_be("hidden_act", "silu")
    fields.must_be("use_bias", False)
    fields.must_be("rms_norm", True)
    fields.must_be("norm_before_gate", True, False)
    ours = read_pairs(fields, PAIRS)
    tied = fields.take("tie_word_embeddings", False)
    ours["untie_embeddings_and_output_weights"] = not tied
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "mamba2", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    require_family(description, "mamba2")
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "hidden_act": "silu",
        "use_bias": False,
        "rms_norm": True,
        "tie_word_embeddings": _is_tied(description),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    config = description["config"]
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    states = config["mamba_num_groups"] * config["mamba_state_dim"]
    here, there = "blocks.*.mixer.", "backbone.layers.*.mixer."
    parts = tuple(f"{here}in_proj.{name}.weight" for name in ("z", "x", "B", "C", "dt"))
    sizes = (inner, inner, states, states, heads)
    rules = [
        Rule("embedding.weight", "backbone.embeddings.weight"),
        Rule("blocks.*.mixer_norm.weight", "backbone.layers.*.norm.weight"),
        Rule(parts, f"{there}in_proj.weight", sizes=sizes),
        *(Rule(f"{here}{name}", f"{there}{name}") for name in ("dt_bias", "A_log", "D")),
        Rule(f"{here}norm.weight", f"{there}norm.weight"),
        Rule(f"{here}out_proj.weight", f"{there}out_proj.weight"),
    ]
    for kind in ("weight", "bias") if config["use_conv_bias"] else ("weight",):
        ours = tuple(f"{here}conv1d.{name}.{kind}" for name in ("x", "B", "C"))
        rules.append(Rule(ours, f"{there}conv1d.{kind}", sizes=(inner, states, states)))
    rules.append(Rule("final_norm.weight", "backbone.norm_f.weight"))
    if not _is_tied(description):
        rules.append(Rule("head.weight", "lm_head.weight"))
    copies = {"lm_head.weight": "backbone.embeddings.weight"} if _is_tied(description) else {}
    return Table(tuple(rules), config["num_layers"], copies=copies)


def _is_tied(description: Mapping[str, Any]) -> bool:
    return not description["config"]["untie_embeddings_and_output_weights"]


def shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shapes of the weights, see ``families.shapes``."""
    config, vocab = description["config"], description["vocab_size"]
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    states = config["mamba_num_groups"] * config["mamba_state_dim"]
    rows = {"z": inner, "x": inner, "B": states, "C": states, "dt": heads}
    kernel = (1, config["conv_kernel"])
    return {
        "embedding": (vocab, hidden),
        "head": (vocab, hidden),
        "final_norm": (hidden,),
        "mixer_norm": (hidden,),
        "mixer.norm": (inner,),
        "mixer.out_proj": (hidden, inner),
        **{f"mixer.in_proj.{name}": (count, hidden) for name, count in rows.items()},
        **{f"mixer.conv1d.{name}": (rows[name], *kernel) for name in "xBC"},
        **{f"mixer.{name}": (heads,) for name in ("dt_bias", "A_log", "D")},
    }
