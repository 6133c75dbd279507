"""Maps Megatron's names and arguments of a GPT to logical tensors and description fields.

In Megatron's distributed format a tensor holds all layers along its first dimension and all
experts along the next, unless layers differ: then the layer's number is in the name. Queries,
keys and values are stored group by group in one matrix, gates before ups in another. The
vocabulary is padded with rows without meaning.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import (
    USUAL,
    expert_layers,
    expert_setting,
    refuse_variants,
    require,
    require_routing,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table, expand, split_index
from mcore_models.layer_patterns import read_pattern
from mcore_models.logical_tensors import ffn_size, head_dim, is_gated, num_kv_heads

CHECKPOINT_VERSION = 3.0
"""Version that determines the order of rows of queries, keys and values; this one is
written."""

_REFUSED = (
    *("mtp_num_layers", "is_hybrid_model", "attention_output_gate"),
    *("hybrid_override_pattern", "num_shared_experts", "moe_use_legacy_grouped_gemm"),
    *("moe_latent_size", "softmax_type", "use_rotary_position_embeddings_2d"),
    *("no_rope_freq", "qk_l2_norm", "moe_apply_probs_on_input"),
    *("apply_residual_connection_post_layernorm", "heterogeneous_layers_config_path"),
    *("activation_func_clamp_value", "glu_linear_offset", "experimental_attention_variant"),
)
_EXPERTS = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_latent_size"),
    *("moe_layer_freq", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_group_score_topk", "moe_router_enable_expert_bias", "moe_router_bias"),
    *("moe_apply_probs_on_input", "moe_router_dtype", "moe_aux_loss_coeff"),
    *("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_expert_capacity_factor"),
)
"""Arguments of experts with the same names as fields of a description."""
_POSITIONS = ("rope", "learned_absolute", "none")
_OFF = (None, False, 0, "", "vanilla")
_EMPTY_IS_NONE = (
    *("num_experts", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size"),
    *("moe_expert_capacity_factor", "moe_input_jitter_eps", "moe_router_dtype"),
    *("window_attn_skip_freq", "moe_ffn_hidden_size", "moe_z_loss_coeff"),
    *("max_position_embeddings", "q_lora_rank"),
)
LATENT_ROPE = (
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
"""Arguments of rotary positions in latent attention, named like fields of a description."""
_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors in mcore-models and DeepSeek's models; in Megatron all
norms have one epsilon."""


def table(
    description: Mapping[str, Any],
    padded_vocab_size: int,
    *,
    transformer_impl: str = "transformer_engine",
    is_numbered: bool = False,
    version: float = CHECKPOINT_VERSION,
) -> Table:
    """Return the rules of the weights under the names of Megatron's distributed format.

    Args:
        description: description of a model of the family ``gpt``.
        padded_vocab_size: rows of embedding and head in the files.
        transformer_impl: Megatron's flag; ``local`` names the norm before experts like the norm
            before a dense MLP.
        is_numbered: put layer numbers into names even if all layers are equal.
        version: version of the checkpoint; determines the order of queries, keys and values.

    Raises:
        ValueError: if Megatron cannot express the model, or the vocabulary does not fit.
    """
    if description.get("family") != "gpt":
        raise ValueError(f"Megatron's format has no table for {description.get('family')!r}.")
    is_latent = setting(description, "multi_latent_attention")
    refuse_variants(description, *(LATENT_ROPE if is_latent else ()))
    _check_routing(description)
    if is_latent:
        check_latent(description)
    pattern = expert_layers(description) if _has_experts(description) else []
    is_mixed = len(set(pattern)) > 1 or is_numbered
    # Equal layers are one tensor, with the layer as an index instead of a part of the name.
    prefix, index = ("decoder.layers.*.", "") if is_mixed else ("decoder.layers.", "[*]")
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    count = setting(description, "num_layers")
    dense = tuple(layer for layer in range(count) if layer not in sparse)
    is_fused = transformer_impl == "transformer_engine"
    fused_norm, separate_norm = (
        f"{prefix}mlp.linear_fc1.layer_norm_",
        f"{prefix}pre_mlp_layernorm.",
    )
    # Local layers have one name for the norm before either kind of network.
    dense_norm = separate_norm if is_latent and not is_fused else fused_norm
    sparse_norm = separate_norm if is_latent or is_fused else fused_norm
    attention = (
        latent_rules(description, prefix, index, is_fused=is_fused)
        if is_latent
        else attention_rules(description, prefix, index, version)
    )
    layers = [
        *attention,
        *_norms("mlp_norm", dense_norm, index, description, dense),
        *_norms("mlp_norm", sparse_norm, index, description, sparse),
        *mlp_rules("mlp.", description, f"{prefix}mlp.", index, dense),
        *(_experts(description, prefix, is_mixed, sparse) if sparse else []),
    ]
    is_tied = not setting(description, "untie_embeddings_and_output_weights")
    return Table(
        _around(description, layers, padded_vocab_size),
        count,
        expert_setting(description, "num_experts"),
        # The last pipeline stage saves its copy of a tied embedding.
        copies={"output_layer.weight": "embedding.word_embeddings.weight"} if is_tied else {},
    )


def extra_states(table: Table) -> list[str]:
    """Return the names of the ``_extra_state`` objects that Megatron's linear layers load.

    Layers of Transformer Engine store fp8 scales in them, other layers nothing; each layer and
    each expert requires an object.
    """
    names = []
    for link in expand(table):
        name, index = split_index(link.theirs)
        stem, kind = name.rsplit(".", 1)
        if kind != "weight" or ".linear_" not in stem:
            continue
        sizes: tuple[int, ...] = (table.num_layers, table.num_experts)[: len(index)] or (1,)
        if len(index) == 1 and ".experts." in stem:
            sizes = (table.num_experts,)
        shard = "_".join(".".join(map(str, numbers)) for numbers in (index or (0,), sizes))
        names.append(f"{stem}._extra_state/shard_{shard}")
    return names


def _around(
    description: Mapping[str, Any], layers: list[Rule], padded_vocab_size: int
) -> tuple[Rule, ...]:
    padding = padded_vocab_size - description["vocab_size"]
    if padding < 0:
        raise ValueError(
            f"the files have {padded_vocab_size} rows of vocabulary, fewer than the "
            f"{description['vocab_size']} tokens of the model: give --vocab-size."
        )
    rules = [Rule("embedding.weight", "embedding.word_embeddings.weight", padding=padding)]
    if setting(description, "position_embedding_type") == "learned_absolute":
        foreign_name = "embedding.position_embeddings.weight"
        rules.append(Rule("position_embedding.weight", foreign_name))
    rules += layers
    rules += _norms("final_norm", "decoder.final_layernorm.", "", description, None)
    if setting(description, "untie_embeddings_and_output_weights"):
        rules.append(Rule("head.weight", "output_layer.weight", padding=padding))
    return tuple(rules)


def _norms(
    ours: str,
    theirs: str,
    index: str,
    description: Mapping[str, Any],
    layers: tuple[int, ...] | None,
) -> list[Rule]:
    ours = ours if ours == "final_norm" else f"blocks.*.{ours}"
    has_bias = setting(description, "normalization") == "LayerNorm"
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return [Rule(f"{ours}.{k}", f"{theirs}{k}{index}", layers=layers) for k in kinds]


def attention_rules(
    description: Mapping[str, Any], prefix: str, index: str, version: float
) -> list[Rule]:
    """Return the rules of a layer's attention and of the norm before it."""
    module = f"{prefix}self_attention."
    rules = _norms(
        "attention_norm", f"{module}linear_qkv.layer_norm_", index, description, None
    )
    biased = setting(description, "add_bias_linear")
    config = settings(description)
    head, groups = head_dim(config), num_kv_heads(config)
    widths = (config.num_attention_heads * head, groups * head, groups * head)
    # Version 0 stored all queries, then keys, then values; version 1 interleaved single rows.
    blocks = groups if version >= 2 else groups * head if version >= 1 else 1
    for kind in ("weight", "bias"):
        if kind == "weight" or biased or setting(description, "add_qkv_bias"):
            qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
            foreign_name = f"{module}linear_qkv.{kind}{index}"
            rules.append(Rule(qkv, foreign_name, sizes=widths, groups=blocks))
        if kind == "weight" or biased:
            foreign_name = f"{module}linear_proj.{kind}{index}"
            rules.append(Rule(f"blocks.*.attention.proj.{kind}", foreign_name))
    if setting(description, "qk_layernorm"):
        for part in "qk":
            foreign_name = f"{module}{part}_layernorm."
            rules += _norms(f"attention.{part}_norm", foreign_name, index, description, None)
    return rules


def check_latent(description: Mapping[str, Any]) -> None:
    """Raise ValueError for latent attention that Megatron computes differently."""
    require(description, rotary_interleaved=True, position_embedding_type="rope")
    require(description, add_bias_linear=False, add_qkv_bias=False, normalization="RMSNorm")
    if setting(description, "rope_type") not in ("rope", "yarn"):
        require(description, rope_type="yarn")
    if setting(description, "qk_layernorm"):
        require(description, norm_epsilon=_LATENT_EPSILON)


def _check_routing(description: Mapping[str, Any]) -> None:
    """Raise ValueError for routing that Megatron computes differently."""
    require_routing(description, {"moe_router_norm_topk_prob": True})
    if expert_setting(description, "moe_router_score_function") == "sparsemixer":
        raise ValueError("it cannot express --moe-router-score-function sparsemixer")
    kept = expert_setting(description, "moe_router_group_topk")
    scored = expert_setting(description, "moe_router_group_score_topk")
    # In Megatron a group's score is the sum over topk / group_topk of its experts.
    if kept and scored:
        most = expert_setting(description, "moe_router_topk") // kept
        require_routing(description, {"moe_router_group_score_topk": most})


def latent_rules(
    description: Mapping[str, Any], prefix: str, index: str, *, is_fused: bool
) -> list[Rule]:
    """Return the rules of a layer's latent attention and of the norm before it.

    Args:
        description: description of the model.
        prefix: prefix of the names in a layer.
        index: index of the layer, at the end of a name.
        is_fused: whether norms of latent vectors belong to the linears that follow them, as in
            layers of Transformer Engine.
    """
    module = f"{prefix}self_attention."
    names = {
        "kv_down": "linear_kv_down_proj.weight",
        "kv_up": "linear_kv_up_proj.weight",
        "proj": "linear_proj.weight",
    }
    norms = {"kv_norm": "linear_kv_up_proj.layer_norm_" if is_fused else "kv_layernorm."}
    if setting(description, "q_lora_rank"):
        names |= {"q_down": "linear_q_down_proj.weight", "q_up": "linear_q_up_proj.weight"}
        norms["q_norm"] = "linear_q_up_proj.layer_norm_" if is_fused else "q_layernorm."
    else:
        names["q"] = "linear_q_proj.weight"
    if setting(description, "qk_layernorm"):
        names |= {ours: f"{theirs}weight" for ours, theirs in norms.items()}
    return [
        *_norms("attention_norm", f"{prefix}input_layernorm.", index, description, None),
        *(
            Rule(f"blocks.*.mla.{ours}.weight", f"{module}{theirs}{index}")
            for ours, theirs in names.items()
        ),
    ]


def mlp_rules(
    ours: str,
    description: Mapping[str, Any],
    theirs: str,
    index: str,
    layers: tuple[int, ...],
    *,
    biased: bool | None = None,
) -> list[Rule]:
    """Return the rules of one feed-forward layer, or of experts."""
    gated = is_gated(settings(description))
    biased = setting(description, "add_bias_linear") if biased is None else biased
    rules = []
    for kind in ("weight", "bias") if biased else ("weight",):
        fc1 = tuple(f"blocks.*.{ours}fc1.{part}.{kind}" for part in ("gate", "up"))
        our_names = fc1 if gated else f"blocks.*.{ours}fc1.{kind}"
        rules.append(Rule(our_names, f"{theirs}linear_fc1.{kind}{index}", layers=layers))
        foreign_name = f"{theirs}linear_fc2.{kind}{index}"
        rules.append(Rule(f"blocks.*.{ours}fc2.{kind}", foreign_name, layers=layers))
    return rules


def _experts(
    description: Mapping[str, Any], prefix: str, is_mixed: bool, layers: tuple[int, ...]
) -> list[Rule]:
    module, index = f"{prefix}mlp.", "" if is_mixed else "[*]"
    expert = "[*]" if is_mixed else "[*,*]"
    rules = [Rule("blocks.*.moe.router.weight", f"{module}router.weight{index}", layers=layers)]
    if expert_setting(description, "moe_router_enable_expert_bias"):
        foreign_name = f"{module}router.expert_bias{index}"
        rules.append(Rule("blocks.*.moe.router.expert_bias", foreign_name, layers=layers))
    rules += mlp_rules(
        "moe.experts.*.", description, f"{module}experts.experts.", expert, layers
    )
    if expert_setting(description, "moe_shared_expert_intermediate_size"):
        foreign_name = f"{module}shared_experts."
        rules += mlp_rules(
            "moe.shared.", description, foreign_name, index, layers, biased=False
        )
        if expert_setting(description, "moe_shared_expert_gate"):
            gate = f"{foreign_name}gate_weight{index}"
            rules.append(Rule("blocks.*.moe.shared.token_gate.weight", gate, layers=layers))
    return rules


def _has_experts(description: Mapping[str, Any]) -> bool:
    return bool(expert_setting(description, "num_experts"))


def to_arguments(description: Mapping[str, Any], padded_vocab_size: int) -> dict[str, Any]:
    """Convert a description to the arguments that Megatron stores with weights."""
    values = {name: setting(description, name) for name in USUAL}
    skipped = values["window_attn_skip_freq"]
    values["window_attn_skip_freq"] = read_pattern(skipped, "--window-attn-skip-freq")
    values |= {name: expert_setting(description, name) for name in _EXPERTS}
    values |= {
        name: setting(description, name)
        for name in ("num_layers", "hidden_size", "num_attention_heads")
    }
    sizes = settings(description)
    window = values["window_size"]
    values |= {
        "group_query_attention": num_kv_heads(sizes) != sizes.num_attention_heads,
        "num_query_groups": num_kv_heads(sizes),
        "kv_channels": head_dim(sizes),
        "ffn_hidden_size": ffn_size(sizes),
        "window_size": None if tuple(window) == (-1, 0) else tuple(window),
        "add_position_embedding": values["position_embedding_type"] == "learned_absolute",
        "moe_layer_freq": expert_layers(description) if _has_experts(description) else 1,
        "vocab_size": description["vocab_size"],
        "padded_vocab_size": padded_vocab_size,
        "bias_gelu_fusion": values["openai_gelu"],
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    if values["multi_latent_attention"]:
        values |= {name: setting(description, name) for name in LATENT_ROPE}
        values["rotary_interleaved"] = (
            False  # latent attention rotates neighbouring pairs regardless
        )
        if values["rope_type"] == "rope":
            values["rotary_scaling_factor"] = 1.0
    values |= {name: None for name in _EMPTY_IS_NONE if values.get(name) in (0, 0.0, "")}
    return values


def from_arguments(arguments: Mapping[str, Any], vocab_size: int = 0) -> dict[str, Any]:
    """Convert the arguments that Megatron stored to a description.

    Args:
        arguments: Megatron's namespace of arguments, as a dictionary.
        vocab_size: tokens without padding; 0: as in the arguments.

    Raises:
        ValueError: if an argument cannot be represented or is missing.
    """
    for name in _REFUSED:
        if arguments.get(name) not in _OFF:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"the checkpoint was trained with {flag} {arguments[name]!r}, which cannot be "
                "converted."
            )
    for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"):
        if not arguments.get(name):
            raise ValueError(f"the arguments in the checkpoint lack {name}: give --config.")
    sizes = ("num_layers", "hidden_size", "num_attention_heads")
    config = {
        name: arguments[name] for name in (*sizes, *USUAL) if arguments.get(name) is not None
    }
    if not arguments.get("group_query_attention", True):
        config["num_query_groups"] = config["num_attention_heads"]
    if arguments.get("window_size") is not None:
        config["window_size"] = list(arguments["window_size"])
    if "window_attn_skip_freq" in config:
        config["window_attn_skip_freq"] = str(config["window_attn_skip_freq"]).replace(" ", "")
    # Files older than these flags were trained with Megatron's defaults, not with ours.
    config.setdefault("normalization", "LayerNorm")
    config.setdefault("position_embedding_type", "learned_absolute")
    config.setdefault("swiglu", False)
    config.setdefault("add_bias_linear", True)
    if config["position_embedding_type"] not in _POSITIONS:
        raise ValueError(
            "the checkpoint was trained with --position-embedding-type "
            f"{config['position_embedding_type']}, which cannot be converted."
        )
    # Megatron's fused bias and GELU is the tanh approximation, even without a flag.
    is_plain = not any(config.get(n) for n in ("swiglu", "squared_relu", "quick_geglu"))
    if is_plain and config["add_bias_linear"] and arguments.get("bias_gelu_fusion", True):
        config["openai_gelu"] = True
    if config.get("multi_latent_attention"):
        for name in ("kv_channels", "num_query_groups"):
            config.pop(name, None)
        config |= {name: arguments[name] for name in LATENT_ROPE if arguments.get(name)}
        config["rotary_interleaved"] = True
    config.setdefault("rotary_base", 10000.0)
    config["rotary_base"] = float(config["rotary_base"])
    moe: dict[str, Any] = {}
    if arguments.get("num_experts"):
        moe = {n: arguments[n] for n in _EXPERTS if arguments.get(n) is not None}
        freq = moe.get("moe_layer_freq", 1)
        moe["moe_layer_freq"] = str(freq).replace(" ", "")
        if isinstance(freq, list) and all(freq):
            moe["moe_layer_freq"] = "1"
    vocab_size = vocab_size or arguments.get("vocab_size") or arguments["padded_vocab_size"]
    return {"family": "gpt", "vocab_size": vocab_size, "config": config, "moe": moe}
