"""The logical tensors of a decoder-only transformer: names and shapes, from its config.

This module is the single definition of derived sizes (widths, heads, layers with experts) and
of the list of tensors. Building, counting, checkpoints and conversion of models use it. The
standard library only: config files and mcore-ckpt import this module.

``config`` is any object with the fields of ``TransformerConfig``, ``moe`` any object with the
fields of mcore-moe's ``MoEConfig``; 0 means "derived" or "none".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from mcore_models.layer_patterns import (
    PATTERN_MIXERS,
    further_letters,
    is_local,
    pattern_layers,
    read_pattern,
)

Shape = tuple[int, ...]


def head_dim(config: Any) -> int:
    """Channels of one attention head, H; in latent attention those of queries and keys."""
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim
    return config.kv_channels or config.hidden_size // config.num_attention_heads


def value_dim(config: Any) -> int:
    """Channels of one head's values, J."""
    return config.v_head_dim if config.multi_latent_attention else head_dim(config)


def num_kv_heads(config: Any) -> int:
    """Key/value heads of a layer over all ranks, G."""
    return config.num_query_groups or config.num_attention_heads


def num_positions(config: Any) -> int:
    """Rows of the table of learned positions."""
    return config.max_position_embeddings + config.position_embedding_offset


def payload_width(config: Any) -> int:
    """Return a token's channels between pipeline stages: streams and per-layer embeddings."""
    streams = max(1, config.altup_num_inputs) * config.hidden_size
    return streams + config.num_layers * config.per_layer_embedding_size


def ffn_size(config: Any) -> int:
    """Width inside a dense feed-forward layer over all ranks, F."""
    if config.ffn_hidden_size:
        return config.ffn_hidden_size
    if is_gated(config):
        # Three matrices of two thirds of the width cost as much as two of the full width.
        return max(64, int(4 * config.hidden_size * 2 / 3) // 64 * 64)
    return 4 * config.hidden_size


def expert_size(config: Any, moe: Any) -> int:
    """Width inside one routed expert over all ranks."""
    return moe.moe_ffn_hidden_size or ffn_size(config)


def is_gated(config: Any) -> bool:
    """Whether feed-forward layers multiply two projections."""
    return config.swiglu or config.geglu or config.quick_geglu or config.exact_geglu


def has_qkv_bias(config: Any) -> bool:
    """Whether queries, keys and values have biases."""
    return has_attention_bias(config) or config.add_qkv_bias


def has_attention_bias(config: Any) -> bool:
    """Whether attention's output has a bias."""
    return config.add_bias_linear or config.add_attention_bias


def moe_layers(moe: Any, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer of a model whether it has experts."""
    if moe.num_experts == 0:
        return (False,) * num_layers
    pattern = read_pattern(moe.moe_layer_freq, "--moe-layer-freq")
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(f"--moe-layer-freq {pattern} must be 1 or more.")
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"--moe-layer-freq {moe.moe_layer_freq} must hold one 0 or 1 for each of "
            f"--num-layers {num_layers}; it holds {len(pattern)} entries."
        )
    return tuple(bool(entry) for entry in pattern)


def global_config(config: Any) -> Any:
    """Return the config of layers without a window, whose heads may differ from the others."""
    sizes = {
        "kv_channels": config.global_kv_channels or config.kv_channels,
        "num_query_groups": config.global_num_query_groups or config.num_query_groups,
    }
    return _changed(config, sizes)


def layer_config(config: Any, layer: int) -> Any:
    """Return the config of one layer, with that layer's sizes.

    In the result, ``num_kv_shared_layers`` is 0 unless the layer reads the keys of another
    layer, ``attention_k_eq_v`` is true only if the layer's values are its keys, and
    ``ffn_hidden_size`` is the layer's width. If no field differs, the result is ``config``.

    Args:
        config: of the model.
        layer: global number of the layer.
    """
    has_windows = config.window_size[0] >= 0 or config.attention_chunk_size > 0
    is_global = has_windows and not is_local(config, layer)
    shares = layer >= config.num_layers - config.num_kv_shared_layers
    base = global_config(config) if is_global else config
    width = ffn_size(config) * (1 + (config.use_double_wide_mlp and shares))
    fields = {
        "attention_k_eq_v": config.attention_k_eq_v and is_global,
        "num_kv_shared_layers": config.num_kv_shared_layers if shares else 0,
        "use_double_wide_mlp": False,
        "ffn_hidden_size": width if config.use_double_wide_mlp else config.ffn_hidden_size,
    }
    return _changed(base, fields)


def _changed(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a config with other values; the same object if no value changes."""
    changes = {name: value for name, value in fields.items() if getattr(config, name) != value}
    if not changes:
        return config
    if is_dataclass(config) and not isinstance(config, type):
        return replace(config, **changes)
    return SimpleNamespace(**{**vars(config), **changes})


def layer_mixers(config: Any, moe: Any) -> tuple[tuple[str, ...], ...]:
    """Return the mixers of each layer, in order; names of ``MIXER_SHAPES``.

    Raises:
        ValueError: if ``--moe-layer-freq`` or the pattern is invalid.
    """
    attention = "mla" if config.multi_latent_attention else "attention"
    layers = pattern_layers(config.hybrid_override_pattern)
    if layers:
        mixers = {**PATTERN_MIXERS, "*": attention}
        return tuple(tuple(mixers[letter] for letter in letters) for letters in layers)
    experts = moe_layers(moe, config.num_layers)
    last = ("layer_input",) if config.per_layer_embedding_size else ()
    return tuple((attention, "moe" if has_experts else "mlp", *last) for has_experts in experts)


def further_mixers(config: Any, moe: Any) -> tuple[str, ...]:
    """Return the mixers of a layer of multi-token prediction.

    They follow a / in the pattern of a hybrid; without a pattern they are the last layer's.
    """
    attention = "mla" if config.multi_latent_attention else "attention"
    mixers = {**PATTERN_MIXERS, "*": attention}
    letters = further_letters(config.hybrid_override_pattern)
    return tuple(mixers[letter] for letter in letters) or layer_mixers(config, moe)[-1]


def num_halves(config: Any) -> int:
    """Count the mixers of all layers; each adds its output to the residual stream."""
    layers = pattern_layers(config.hybrid_override_pattern)
    return sum(map(len, layers)) if layers else 2 * config.num_layers


def layer_norms(config: Any, mixers: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the norms before and after each mixer of a layer; empty: no norm."""
    norms = []
    for index, mixer in enumerate(mixers):
        before = MIXER_NORMS[mixer]
        if mixer == "layer_input":  # reads the stream without a norm
            norms.append(("", "layer_input_post_norm"))
            continue
        after = f"{before.removesuffix('_norm')}_post_norm"
        shares_first_norm = index > 0 and config.parallel_residual == "one_norm"
        has_before = config.norm_placement != "output" and not shares_first_norm
        has_after = config.norm_placement in ("output", "sandwich")
        norms.append((before if has_before else "", after if has_after else ""))
    return tuple(norms)


class MambaSizes(NamedTuple):
    """Widths inside a Mamba-2 layer over all ranks."""

    heads: int
    groups: int
    inner: int
    """Channels of all heads."""
    states: int
    """Rows of B, and of C: groups times the state of a channel."""


def mamba_sizes(config: Any) -> MambaSizes:
    """Return the widths inside a Mamba-2 layer."""
    heads = config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim
    groups = config.mamba_num_groups
    inner = heads * config.mamba_head_dim
    return MambaSizes(heads, groups, inner, groups * config.mamba_state_dim)


class DeltaSizes(NamedTuple):
    """Widths inside a gated delta net over all ranks."""

    key_heads: int
    value_heads: int
    keys: int
    """Channels of all key heads; queries have as many."""
    values: int
    """Channels of all value heads; output gates have as many."""


def delta_sizes(config: Any) -> DeltaSizes:
    """Return the widths inside a gated delta net."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    widths = config.linear_key_head_dim, config.linear_value_head_dim
    return DeltaSizes(keys, values, keys * widths[0], values * widths[1])


def tensor_shapes(config: Any, vocab_size: int, moe: Any) -> dict[str, Shape]:
    """List every logical tensor of a model with its global shape.

    Args:
        config: of the layers.
        vocab_size: true number of tokens; padding is not part of logical tensors.
        moe: of the experts.

    Returns:
        Shapes by the names of ``named_shards``, in the order of the layers: fused projections
            as their parts (q, k, v; gate, up), experts one by one, tied tables once.

    Raises:
        ValueError: if ``--moe-layer-freq`` or the pattern is invalid.
    """
    D = config.hidden_size
    shapes: dict[str, Shape] = {"embedding.weight": (vocab_size, D)}
    if config.position_embedding_type == "learned_absolute":
        shapes["position_embedding.weight"] = (num_positions(config), D)
    if config.embedding_layernorm:
        shapes |= _norm(config, "embedding_norm", D)
    if config.per_layer_embedding_size:
        channels = config.num_layers * config.per_layer_embedding_size
        shapes |= {
            "per_layer_embedding.table.weight": (
                config.per_layer_embedding_vocab_size or vocab_size,
                channels,
            ),
            "per_layer_embedding.proj.weight": (channels, D),
            **_norm(config, "per_layer_embedding.norm", config.per_layer_embedding_size),
        }
    for name in ("altup_projections", "altup_unembed_projections"):
        for stream in range(config.altup_num_inputs - 1):
            shapes[f"{name}.{stream}.weight"] = (D, D)
    # Layers of one kind have the same tensors: list the tensors of each kind once.
    shapes_of_kind: dict[tuple[Any, ...], dict[str, Shape]] = {}
    for layer, mixers in enumerate(layer_mixers(config, moe)):
        sizes = layer_config(config, layer)
        kind = (mixers, *(getattr(sizes, name) for name in _OF_LAYERS))
        if kind not in shapes_of_kind:
            shapes_of_kind[kind] = _layer(sizes, moe, mixers)
        tensors = shapes_of_kind[kind]
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in tensors.items()}
    shapes |= _norm(config, "final_norm", D)
    if config.untie_embeddings_and_output_weights:
        shapes["head.weight"] = (vocab_size, D)
    if config.add_output_bias:
        shapes["lm_head.bias"] = (vocab_size,)
    for depth in range(config.mtp_num_layers):
        tensors = _norm(config, "enorm", D) | _norm(config, "hnorm", D)
        tensors |= {"eh_proj.weight": (D, 2 * D)} | _norm(config, "final_norm", D)
        block = _layer(config, moe, further_mixers(config, moe))
        tensors |= {f"block.{name}": shape for name, shape in block.items()}
        shapes |= {f"mtp.{depth}.{name}": shape for name, shape in tensors.items()}
    return shapes


def _layer(config: Any, moe: Any, mixers: Sequence[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for mixer, norms in zip(mixers, layer_norms(config, mixers), strict=True):
        tensors = MIXER_SHAPES[mixer](config, moe)
        for name in filter(None, norms):
            tensors = _norm(config, name, config.hidden_size) | tensors
        shapes |= tensors
    if config.altup_num_inputs:
        shapes |= _altup(config)
    return shapes | ({"output_scale.weight": (1,)} if config.layer_output_scale else {})


_OF_LAYERS = (
    *("kv_channels", "num_query_groups", "ffn_hidden_size", "num_kv_shared_layers"),
    "attention_k_eq_v",
)
"""Fields that ``layer_config`` changes and shapes depend on."""


def norm_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of parameters of a norm: weight and bias, weight, or none."""
    if not config.norm_weight:
        return ()
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return ("weight", "bias") if has_bias else ("weight",)


def _norm(config: Any, name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.{kind}": (width,) for kind in norm_kinds(config)}


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def qkv_parts(config: Any) -> tuple[str, ...]:
    """Return the outputs of the first GEMM of an attention layer, in order.

    Args:
        config: of the layer, see ``layer_config``.
    """
    keys = () if config.num_kv_shared_layers else ("k",)
    values = () if config.num_kv_shared_layers or config.attention_k_eq_v else ("v",)
    gate = ("gate",) if config.attention_output_gate else ()
    return ("q", *keys, *values, *gate)


def _attention(config: Any, _: Any) -> dict[str, Shape]:
    D, H, shapes = config.hidden_size, head_dim(config), dict[str, Shape]()
    queries, keys = config.num_attention_heads * H, num_kv_heads(config) * H
    widths = {"q": queries, "k": keys, "v": keys, "gate": queries}
    for part in qkv_parts(config):
        shapes |= _linear(f"attention.qkv.{part}", widths[part], D, has_qkv_bias(config))
    normed_parts = [part for part in qkv_parts(config) if part in ("q", "k")]
    for part in normed_parts if config.qk_layernorm else ():
        width = widths[part]
        if config.qk_norm_width == "own_head":
            shapes[f"attention.{part}_norm.weight"] = (width // H, H)
        else:
            normed = width if config.qk_norm_width == "layer" else H
            shapes |= _norm(config, f"attention.{part}_norm", normed)
    if config.softmax_type == "learnable":
        shapes["attention.sinks"] = (config.num_attention_heads,)
    return shapes | _linear("attention.proj", D, queries, has_attention_bias(config))


def _latent_attention(config: Any, _: Any) -> dict[str, Shape]:
    D, N, H = config.hidden_size, config.num_attention_heads, head_dim(config)
    rank, rotated = config.kv_lora_rank, config.qk_pos_emb_head_dim
    shapes: dict[str, Shape] = {}
    if config.q_lora_rank:
        shapes["mla.q_down.weight"] = (config.q_lora_rank, D)
        if config.qk_layernorm:
            shapes["mla.q_norm.weight"] = (config.q_lora_rank,)
        shapes["mla.q_up.weight"] = (N * H, config.q_lora_rank)
    else:
        shapes["mla.q.weight"] = (N * H, D)
    if config.dsa_indexer_topk:
        heads, channels = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        shapes |= {
            "mla.indexer.q_up.weight": (heads * channels, config.q_lora_rank),
            "mla.indexer.k.weight": (channels, D),
            "mla.indexer.k_norm.weight": (channels,),
            "mla.indexer.k_norm.bias": (channels,),
            "mla.indexer.weights.weight": (heads, D),
        }
    shapes["mla.kv_down.weight"] = (rank + rotated, D)
    if config.qk_layernorm:
        shapes["mla.kv_norm.weight"] = (rank,)
    shapes["mla.kv_up.weight"] = (N * (config.qk_head_dim + config.v_head_dim), rank)
    return shapes | _linear("mla.proj", D, N * config.v_head_dim, config.add_bias_linear)


def _dense(config: Any, _: Any) -> dict[str, Shape]:
    width, bias = ffn_size(config), config.add_bias_linear
    shapes = _mlp("mlp", config.hidden_size, width, is_gated(config), bias)
    numbers = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()} if config.xielu else {}
    return shapes | {f"mlp.xielu.{name}": shape for name, shape in numbers.items()}


def _mlp(name: str, D: int, width: int, gated: bool, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for first in ("fc1.gate", "fc1.up") if gated else ("fc1",):
        shapes |= _linear(f"{name}.{first}", width, D, bias)
    return shapes | _linear(f"{name}.fc2", D, width, bias)


def _experts(config: Any, moe: Any) -> dict[str, Shape]:
    D, gated = config.hidden_size, is_gated(config)
    shapes: dict[str, Shape] = {"moe.router.weight": (moe.num_experts, D)}
    if moe.moe_router_bias:
        shapes["moe.router.bias"] = (moe.num_experts,)
    if moe.moe_router_enable_expert_bias:
        shapes["moe.router.expert_bias"] = (moe.num_experts,)
    latent = moe.moe_latent_size
    if latent:
        shapes |= {"moe.latent_down.weight": (latent, D), "moe.latent_up.weight": (D, latent)}
    network = _mlp("", latent or D, expert_size(config, moe), gated, config.add_bias_linear)
    for expert in range(moe.num_experts):
        shapes |= {f"moe.experts.{expert}{name}": shape for name, shape in network.items()}
    if moe.moe_shared_expert_intermediate_size:
        width = moe.moe_shared_expert_intermediate_size
        shapes |= _mlp("moe.shared", D, width, gated, bias=False)
    if moe.moe_shared_expert_gate:
        shapes["moe.shared.token_gate.weight"] = (1, D)
    return shapes


def _mamba(config: Any, _: Any) -> dict[str, Shape]:
    D, sizes = config.hidden_size, mamba_sizes(config)
    rows = {"z": sizes.inner, "x": sizes.inner, "B": sizes.states, "C": sizes.states}
    bias = config.mamba_proj_bias
    shapes: dict[str, Shape] = {}
    for name, count in (*rows.items(), ("dt", sizes.heads)):
        shapes |= _linear(f"mamba.in_proj.{name}", count, D, bias)
    for name in "xBC":
        shapes[f"mamba.conv1d.{name}.weight"] = (rows[name], 1, config.mamba_conv_kernel)
        if config.mamba_conv_bias:
            shapes[f"mamba.conv1d.{name}.bias"] = (rows[name],)
    shapes |= {f"mamba.{name}": (sizes.heads,) for name in ("dt_bias", "A_log", "D")}
    if config.mamba_norm != "none":
        shapes["mamba.norm.weight"] = (sizes.inner,)
    return shapes | _linear("mamba.out_proj", D, sizes.inner, bias)


def _delta_net(config: Any, _: Any) -> dict[str, Shape]:
    D, sizes = config.hidden_size, delta_sizes(config)
    rows = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values, "z": sizes.values}
    rows |= {"b": sizes.value_heads, "a": sizes.value_heads}
    shapes: dict[str, Shape] = {}
    for name, count in rows.items():
        shapes[f"delta_net.in_proj.{name}.weight"] = (count, D)
    for name in "qkv":
        shape = (rows[name], 1, config.linear_conv_kernel_dim)
        shapes[f"delta_net.conv1d.{name}.weight"] = shape
    shapes |= {f"delta_net.{name}": (sizes.value_heads,) for name in ("dt_bias", "A_log")}
    shapes["delta_net.norm.weight"] = (config.linear_value_head_dim,)
    return shapes | {"delta_net.out_proj.weight": (D, sizes.values)}


def _kimi_delta(config: Any, _: Any) -> dict[str, Shape]:
    D, sizes = config.hidden_size, delta_sizes(config)
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    decays = sizes.value_heads * key_width
    rows = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values}
    shapes: dict[str, Shape] = {
        f"kda.in_proj.{name}.weight": (count, D)
        for name, count in (*rows.items(), ("b", sizes.value_heads))
    }
    for name, count in rows.items():
        shapes[f"kda.conv1d.{name}.weight"] = (count, 1, config.linear_conv_kernel_dim)
    return shapes | {
        "kda.decay_down.weight": (key_width, D),
        "kda.decay_up.weight": (decays, key_width),
        "kda.gate_down.weight": (value_width, D),
        "kda.gate_up.weight": (sizes.values, value_width),
        "kda.dt_bias": (decays,),
        "kda.A_log": (1, 1, sizes.value_heads, 1),
        "kda.norm.weight": (value_width,),
        "kda.out_proj.weight": (D, sizes.values),
    }


def _short_conv(config: Any, _: Any) -> dict[str, Shape]:
    D, bias = config.hidden_size, config.short_conv_bias
    shapes: dict[str, Shape] = {}
    for name in ("B", "C", "x"):
        shapes |= _linear(f"short_conv.in_proj.{name}", D, D, bias)
    shapes["short_conv.conv1d.x.weight"] = (D, 1, config.short_conv_kernel_dim)
    if bias:
        shapes["short_conv.conv1d.x.bias"] = (D,)
    return shapes | _linear("short_conv.out_proj", D, D, bias)


def _lightning(config: Any, _: Any) -> dict[str, Shape]:
    D, width = config.hidden_size, config.num_attention_heads * head_dim(config)
    return {
        **{f"lightning.in_proj.{name}.weight": (width, D) for name in "qkvz"},
        "lightning.norm.weight": (width,),
        "lightning.out_proj.weight": (D, width),
    }


def _layer_input(config: Any, _: Any) -> dict[str, Shape]:
    D, P = config.hidden_size, config.per_layer_embedding_size
    return {"layer_input.gate.weight": (P, D), "layer_input.proj.weight": (D, P)}


def _altup(config: Any) -> dict[str, Shape]:
    """Return the shapes of a layer's tensors of AltUp and LAuReL."""
    D, n, rank = config.hidden_size, config.altup_num_inputs, config.laurel_rank
    shapes: dict[str, Shape] = {
        **_norm(config, "altup.router_norm", D),
        "altup.router.weight": (n, D),
        "altup.prediction_coefs.weight": (n * n, n),
        "altup.correction_coefs.weight": (n, n),
        "altup.gating_scale": (D,),
    }
    if rank:
        shapes |= {"laurel.left.weight": (rank, D), "laurel.right.weight": (D, rank)}
        shapes |= _norm(config, "laurel.norm", D)
    return shapes


MIXER_SHAPES: Mapping[str, Callable[[Any, Any], dict[str, Shape]]] = {
    "attention": _attention,
    "mla": _latent_attention,
    "mlp": _dense,
    "moe": _experts,
    "mamba": _mamba,
    "delta_net": _delta_net,
    "short_conv": _short_conv,
    "lightning": _lightning,
    "kda": _kimi_delta,
    "layer_input": _layer_input,
}
"""For each mixer the function from the configs of layers and experts to its tensors."""

ROW_PARALLEL = ("proj", "fc2", "out_proj")
"""Names of the linears whose inputs tensor ranks split; they split the outputs of others."""

MIXER_NORMS: Mapping[str, str] = {
    "attention": "attention_norm",
    "mla": "attention_norm",
    "mlp": "mlp_norm",
    "moe": "mlp_norm",
    "mamba": "mamba_norm",
    "delta_net": "delta_net_norm",
    "short_conv": "short_conv_norm",
    "lightning": "lightning_norm",
    "kda": "kda_norm",
    "layer_input": "layer_input_norm",
}
"""Name of the norm before each mixer."""
