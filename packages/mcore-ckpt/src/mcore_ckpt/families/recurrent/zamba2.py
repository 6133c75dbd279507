"""Zamba-2: Mamba-2 layers, some of which read what one of a few shared blocks says.

The weights of a shared block, and all that its uses add to its projections, stand below the
first layer that uses it; folders that repeat them below the other uses must repeat the same.
"""

import math
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import Decoder, Description, FieldRule, Theirs
from mcore_ckpt.families.common.decoder_rules import around, tied_copies
from mcore_ckpt.families.common.defaults import HYBRID, SHARED
from mcore_ckpt.families.common.fields import Fields, read_pairs, require, setting, settings
from mcore_ckpt.families.recurrent.mamba_parts import expansion, mamba_rules, renamed_norm
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.layer_patterns import join_layers, pattern_layers
from mcore_parallel.logical_tensors import mamba_sizes, shared_layers

_PAIRS = (
    ("mamba_num_heads", "n_mamba_heads", 8),
    ("mamba_num_groups", "mamba_ngroups", 1),
    ("mamba_state_dim", "mamba_d_state", 64),
    ("mamba_conv_kernel", "mamba_d_conv", 4),
    ("mamba_chunk_size", "chunk_size", 256),
    ("mamba_conv_bias", "use_conv_bias", True),
    ("mamba_dt_min", "time_step_min", 0.001),
    ("mamba_dt_max", "time_step_max", 0.1),
    ("mamba_dt_init_floor", "time_step_floor", 1e-4),
    ("num_shared_blocks", "num_mem_blocks", 1),
    ("shared_adapter_rank", "adapter_rank", 128),
    ("shared_attention_adapters", "use_shared_attention_adapter", False),
)
_WORDS = {"linear_attention": "M", "mamba": "M", "hybrid": "SM"}
_EPSILON = 1e-5
"""Of gated norms, whatever its config.json says of the others."""
_BLOCK = {
    "attention_norm": "input_layernorm",
    **{f"attention.qkv.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.proj": "self_attn.o_proj",
    "mlp_norm": "pre_ff_layernorm",
    "mlp.fc2": "feed_forward.down_proj",
}


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Heads are as wide as stream and embeddings together, whatever is said.
    width = 2 * config.get("hidden_size", 2560) // config.get("num_attention_heads", 32)
    return {**config, "head_dim": width}


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    kinds = fields.take("layers_block_type")
    if unknown := sorted(set(kinds) - _WORDS.keys()):
        raise ValueError(f"config.json has layers_block_type {unknown[0]!r}: not known here.")
    if ours["norm_epsilon"] != _EPSILON:
        raise ValueError(
            f"config.json has rms_norm_eps={ours['norm_epsilon']}, which gated norms do not "
            f"heed: only {_EPSILON}."
        )
    found = read_pairs(fields, _PAIRS)
    inner = fields.take("mamba_expand", 2) * ours["hidden_size"]
    return {
        **found,
        "hybrid_override_pattern": join_layers(_WORDS[kind] for kind in kinds),
        "mamba_head_dim": inner // found["mamba_num_heads"],
        # transformers' mixer takes no other limit than the smallest initial step.
        "mamba_dt_limit": [found["mamba_dt_min"], 0.0],
        "softmax_scale": (ours["kv_channels"] / 2) ** -0.5,
    }


def _write_layers(description: Description, theirs: Theirs) -> Theirs:
    config = settings(description)
    words = {letters: word for word, letters in reversed(_WORDS.items())}
    limit, scale = tuple(config.mamba_dt_limit), (theirs["head_dim"] / 2) ** -0.5
    if limit != (config.mamba_dt_min, 0.0):
        raise ValueError(
            f"it cannot express --mamba-dt-limit {limit[0]} {limit[1]}: only --mamba-dt-min "
            f"({config.mamba_dt_min}) and 0"
        )
    require(description, norm_epsilon=_EPSILON)
    if theirs["head_dim"] * theirs["num_attention_heads"] != 2 * theirs["hidden_size"]:
        raise ValueError("it cannot express --kv-channels: only 2 x hidden size / heads")
    if not math.isclose(config.softmax_scale, scale):
        raise ValueError(f"it cannot express --softmax-scale other than {scale}")
    return {
        **{there: getattr(config, ours) for ours, there, _ in _PAIRS},
        "layers_block_type": [
            words[letters] for letters in pattern_layers(config.hybrid_override_pattern)
        ],
        "n_mamba_heads": mamba_sizes(config).heads,
        "mamba_expand": expansion(description),
    }


def _read_positions(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    is_rotated = fields.take("use_mem_rope", False)
    return {} if is_rotated else {"position_embedding_type": "none"}


def _write_positions(description: Description, _: Theirs) -> Theirs:
    kind = setting(description, "position_embedding_type")
    if kind not in ("rope", "none"):
        raise ValueError(f"it cannot express --position-embedding-type {kind}")
    return {"use_mem_rope": kind == "rope"}


def _table(description: Description) -> Table:
    config = settings(description)
    uses = shared_layers(config)
    owners = uses[: config.num_shared_blocks]
    layers = _layer_rules(description, uses)
    shared = {owner: _block_rules(owner) for owner in owners}
    for place, layer in enumerate(uses):
        owner = owners[place % len(owners)]
        shared[owner] += _adapter_rules(config, place, layer, owner)
    copies = {
        f"{_at(layer)}{rule.theirs.removeprefix(_at(owners[place % len(owners)]))}": rule.theirs
        for place, layer in enumerate(uses[len(owners) :])
        for rule in shared[owners[place % len(owners)]]
    }
    rules = around(description, [*layers, *(rule for each in shared.values() for rule in each)])
    return Table(
        renamed_norm(rules, "final_layernorm"),
        config.num_layers,
        copies=tied_copies(description) | copies,
    )


def _at(layer: int) -> str:
    return f"model.layers.{layer}.shared_transformer."


def _layer_rules(description: Description, uses: tuple[int, ...]) -> list[Rule]:
    """Rules of what every layer has alone."""
    config = settings(description)
    alone = tuple(layer for layer in range(config.num_layers) if layer not in uses)
    rules = []
    for at, layers in (("", alone), ("mamba_decoder.", uses)):
        there = f"model.layers.*.{at}"
        norm = f"{there}input_layernorm.weight"
        rules.append(Rule("blocks.*.mamba_norm.weight", norm, layers=layers))
        rules += mamba_rules(description, f"{there}mamba.", layers=layers)
    owners = uses[: config.num_shared_blocks]
    again = uses[config.num_shared_blocks :]
    linear = "model.layers.*.linear.weight"
    rules.append(Rule("blocks.*.shared.linear.weight", linear, layers=owners))
    rules.append(Rule("blocks.*.shared_again.linear.weight", linear, layers=again))
    return rules


def _block_rules(owner: int) -> list[Rule]:
    """Rules of a shared block, by the layer that owns it."""
    ours, there = f"blocks.{owner}.shared.block.", _at(owner)
    first = tuple(f"{ours}mlp.fc1.{part}.weight" for part in ("gate", "up"))
    return [
        *(
            Rule(f"{ours}{mine}.weight", f"{there}{name}.weight")
            for mine, name in _BLOCK.items()
        ),
        Rule(first, f"{there}feed_forward.gate_up_proj.weight"),
    ]


def _adapter_rules(config: Any, place: int, layer: int, owner: int) -> list[Rule]:
    """Rules of what one use adds to its block; ``place`` counts the uses of all blocks."""
    ours = f"blocks.{layer}.{'shared' if layer == owner else 'shared_again'}."
    lists = {"fc1": "feed_forward.gate_up_proj_adapter_list"}
    if config.shared_attention_adapters:
        lists |= {part: f"self_attn.linear_{part}_adapter_list" for part in "qkv"}
    rules = []
    for mine, name in lists.items():
        ups = (".gate", ".up") if mine == "fc1" else ("",)
        up = tuple(f"{ours}{mine}_adapter.up{part}.weight" for part in ups)
        there = f"{_at(owner)}{name}.{place}."
        rules += [
            Rule(f"{ours}{mine}_adapter.down.weight", f"{there}0.weight"),
            Rule(up, f"{there}1.weight"),
        ]
    return rules


FAMILY = Decoder(
    model_type="zamba2",
    architecture="Zamba2ForCausalLM",
    fixed={"swiglu": False, "exact_geglu": True},
    absent={
        "tie_word_embeddings": True,
        "rms_norm_eps": _EPSILON,
        "max_position_embeddings": 4096,
    },
    words={"head_dim": "attention_head_dim"},
    refused={"add_bias_linear": False, "use_long_context": False},
    unread=(
        *("num_logits_to_keep", "use_mamba_kernels", "use_mem_eff_path", "hybrid_layer_ids"),
        *("attention_hidden_size", "mamba_headdim", "kv_channels", "num_query_groups"),
    ),
    parts=(
        FieldRule(
            says=(*HYBRID, *SHARED, "softmax_scale"), read=_read_layers, write=_write_layers
        ),
        FieldRule(
            says=("position_embedding_type",), read=_read_positions, write=_write_positions
        ),
    ),
    layers=("M", "SM"),
    activation=("hidden_act", "gelu"),
    stated=_stated,
    weights=_table,
)
