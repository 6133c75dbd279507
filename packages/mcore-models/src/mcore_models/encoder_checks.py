"""Whether a model with an encoder fits a layout, what it costs, and what tensors it has.

Pure questions about configs; no torch here.
"""

from dataclasses import fields, replace
from math import prod
from typing import Any

from mcore_models.config import TransformerConfig
from mcore_models.encoder_config import (
    BertConfig,
    T5Config,
    decoder_layers,
    encoder_layers,
    feed_forward,
    num_stack_layers,
)
from mcore_models.layout_checks import layout_problems
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.logical_tensors import ffn_size, head_dim, num_kv_heads, tensor_shapes

_NO_EXPERTS = MoEConfig()

_DEFAULTS = {field.name: field.default for field in fields(TransformerConfig)}
_DECODERS_ALONE = (
    *("norm_placement", "parallel_residual", "qk_l2_norm", "softmax_scale"),
    *("attn_logit_softcapping", "softmax_type", "attention_chunk_size"),
    "attention_output_gate",
    *("embedding_multiplier", "residual_multiplier", "logits_multiplier", "use_mup"),
    *("final_logit_softcapping", "multi_latent_attention", "hybrid_override_pattern"),
    "mtp_num_layers",
)
"""Fields that layers of an encoder, and of a decoder beside one, do not read."""

Shape = tuple[int, ...]


def encoder_layout_problems(
    config: TransformerConfig,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> list[str]:
    """Say what keeps a model with an encoder from being split; see ``layout_problems``."""
    problems = layout_problems(config, parallel, moe, seq_length)
    if moe.num_experts:
        problems.append("--num-experts: models with an encoder have none here; leave it out.")
    if config.window_size[0] >= 0:
        problems.append("--window-size: an encoder sees whole rows; leave it out.")
    if config.qk_layernorm:
        problems.append("--qk-layernorm: models with an encoder have none; leave it out.")
    for name in _DECODERS_ALONE:
        if getattr(config, name) != _DEFAULTS[name]:
            flag = "--" + name.replace("_", "-")
            problems.append(f"{flag}: models with an encoder compute without it; leave it out.")
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type in ("p2p", "a2a"):
        problems.append(
            f"--cp-comm-type {parallel.cp_comm_type} works for causal models alone: leave it "
            "out (keys and values are gathered)."
        )
    return problems


def bert_shapes(
    config: BertConfig, vocab_size: int, moe: Any = _NO_EXPERTS
) -> dict[str, Shape]:
    """List every logical tensor of a BERT with its global shape, see ``tensor_shapes``."""
    D, heads = config.hidden_size, config.bert_heads
    shapes = tensor_shapes(config, vocab_size, moe)
    if config.num_tokentypes:
        shapes["tokentype_embedding.weight"] = (config.num_tokentypes, D)
    if config.post_layer_norm:
        shapes = {
            name.replace("attention_norm", "attention_post_norm")
            .replace("mlp_norm", "mlp_post_norm")
            .replace("final_norm", "embedding_norm"): shape
            for name, shape in shapes.items()
        }
    kinds = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    parts: dict[str, dict[str, Shape]] = {
        "pooler": {"pooler.dense.weight": (D, D), "pooler.dense.bias": (D,)},
        "lm": {
            "lm_head.dense.weight": (D, D),
            "lm_head.dense.bias": (D,),
            **{f"lm_head.norm.{kind}": (D,) for kind in kinds},
            "lm_head.bias": (vocab_size,),
        },
        "binary": {"binary_head.weight": (2, D), "binary_head.bias": (2,)},
    }
    for name in heads:
        shapes |= parts[name]
    return shapes


def bert_flops_per_token(
    config: BertConfig,
    padded_vocab_size: int,
    seq_length: int,
    moe: MoEConfig = _NO_EXPERTS,
) -> float:
    """Floating-point operations of training for each token: every token sees all others.

    Multiplications and additions each count as one; the pooler, lookups and norms are left
    out.
    """
    N, H = config.num_attention_heads, head_dim(config)
    weights = sum(
        prod(shape)
        for name, shape in bert_shapes(config, 0, moe).items()
        if len(shape) == 2 and name.startswith(("blocks.", "lm_head."))
    )
    weights += config.hidden_size * padded_vocab_size
    # 3 passes x 2 operations x (scores and their mix) for each pair of a layer.
    return 6.0 * weights + 12.0 * N * H * seq_length * config.num_layers


def t5_layout_problems(
    config: T5Config,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> list[str]:
    """Say what keeps a T5 from being split; see ``layout_problems``."""
    stacked = replace(config, num_layers=num_stack_layers(config))
    return encoder_layout_problems(stacked, parallel, moe, seq_length)


def t5_shapes(config: T5Config, vocab_size: int, _moe: Any = _NO_EXPERTS) -> dict[str, Shape]:
    """List every logical tensor of a T5 with its global shape, see ``tensor_shapes``."""
    D, H = config.hidden_size, head_dim(config)
    inner, keys = config.num_attention_heads * H, num_kv_heads(config) * H
    norm = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    width, is_gated = t5_ffn_size(config), feed_forward(config)[0]
    own: dict[str, Shape] = {
        "qkv.q": (inner, D),
        "qkv.k": (keys, D),
        "qkv.v": (keys, D),
        "proj": (D, inner),
    }
    across: dict[str, Shape] = {
        "q": (inner, D),
        "kv.k": (keys, D),
        "kv.v": (keys, D),
        "proj": (D, inner),
    }
    dense = dict.fromkeys(("fc1.gate", "fc1.up") if is_gated else ("fc1",), (width, D))

    def half(name: str, linears: dict[str, Shape]) -> dict[str, Shape]:
        found: dict[str, Shape] = {f"{name}_norm.{kind}": (D,) for kind in norm}
        for linear, shape in linears.items():
            found[f"{name}.{linear}.weight"] = shape
            if config.add_bias_linear:
                found[f"{name}.{linear}.bias"] = shape[:1]
        return found

    shapes: dict[str, Shape] = {"embedding.weight": (vocab_size, D)}
    if config.position_embedding_type == "learned_absolute":
        shapes["position_embedding.weight"] = (config.max_position_embeddings, D)
    for stack, depth in (
        ("encoder", encoder_layers(config)),
        ("decoder", decoder_layers(config)),
    ):
        if config.position_embedding_type == "relative":
            table = (config.relative_attention_num_buckets, config.num_attention_heads)
            shapes[f"{stack}.relative_position_bias.weight"] = table
        block = half("attention", own)
        block |= half("cross_attention", across) if stack == "decoder" else {}
        block |= half("mlp", {**dense, "fc2": (D, width)})
        for layer in range(depth):
            shapes |= {f"{stack}.blocks.{layer}.{name}": s for name, s in block.items()}
        shapes |= {f"{stack}.final_norm.{kind}": (D,) for kind in norm}
    if config.untie_embeddings_and_output_weights:
        shapes["head.weight"] = (vocab_size, D)
    elif config.add_output_bias:
        shapes["lm_head.bias"] = (vocab_size,)
    return shapes


def t5_ffn_size(config: T5Config) -> int:
    """Width inside a feed-forward layer over all ranks, F."""
    return ffn_size(config)


def t5_flops_per_token(
    config: T5Config,
    padded_vocab_size: int,
    seq_length: int,
    moe: MoEConfig = _NO_EXPERTS,
) -> float:
    """Floating-point operations of training for each token of the encoder.

    The decoder is taken to have a quarter of the encoder's tokens, as in T5's pre-training,
    since the encoder's are those that throughput counts.
    """
    N, H = config.num_attention_heads, head_dim(config)
    matrices = {
        name: prod(shape)
        for name, shape in t5_shapes(config, 0, moe).items()
        if len(shape) == 2
    }
    encoder = sum(size for name, size in matrices.items() if name.startswith("encoder.blocks"))
    decoder = sum(size for name, size in matrices.items() if name.startswith("decoder.blocks"))
    across = sum(size for name, size in matrices.items() if ".kv." in name)
    share, pairs = 0.25, 12.0 * N * H * seq_length
    weights = (
        encoder + across + share * (decoder - across + config.hidden_size * padded_vocab_size)
    )
    own = encoder_layers(config) + decoder_layers(config) * share**2 / 2
    return 6.0 * weights + pairs * (own + decoder_layers(config) * share)
