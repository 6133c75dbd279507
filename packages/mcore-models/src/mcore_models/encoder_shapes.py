"""Logical tensors of BERT and T5, and their training FLOPs per token.

Pure functions of configs; no torch here.
"""

from math import prod
from typing import Any

from mcore_models.encoder_config import (
    BertConfig,
    T5Config,
    decoder_layers,
    encoder_layers,
    feed_forward,
)
from mcore_models.layer_patterns import is_local
from mcore_models.logical_tensors import (
    ffn_size,
    head_dim,
    norm_kinds,
    num_kv_heads,
    num_positions,
    tensor_shapes,
)
from mcore_models.parameter_kinds import tensor_kind
from mcore_moe.config import MoEConfig

_NO_EXPERTS = MoEConfig()

Shape = tuple[int, ...]


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
    if config.embedding_layernorm:
        shapes = {
            n: s for n, s in shapes.items() if not n.startswith("blocks.0.attention_norm")
        }
    kinds = norm_kinds(config)
    bias: dict[str, Shape] = {"lm_head.dense.bias": (D,)} if config.add_bias_linear else {}
    parts: dict[str, dict[str, Shape]] = {
        "pooler": {"pooler.dense.weight": (D, D), "pooler.dense.bias": (D,)},
        "lm": {
            "lm_head.dense.weight": (D, D),
            **bias,
            **{f"lm_head.norm.{kind}": (D,) for kind in kinds},
            "lm_head.bias": (vocab_size,),
        },
        "binary": {"binary_head.weight": (2, D), "binary_head.bias": (2,)},
    }
    for name in heads:
        shapes |= parts[name]
    return shapes


def bert_flops_per_token(
    config: BertConfig, padded_vocab_size: int, seq_length: int, moe: MoEConfig = _NO_EXPERTS
) -> float:
    """Return the floating-point operations of training a BERT for each token.

    Multiplications and additions each count as one; pooler, lookups and norms are not counted.
    """
    N, H = config.num_attention_heads, head_dim(config)
    weights = sum(
        prod(shape)
        for name, shape in bert_shapes(config, 0, moe).items()
        if tensor_kind(name, shape) == "matrix" and name.startswith(("blocks.", "lm_head."))
    )
    weights += config.hidden_size * padded_vocab_size
    keys = sum(
        min(seq_length, 2 * config.window_size[0] + 1)
        if is_local(config, layer)
        else seq_length
        for layer in range(config.num_layers)
    )
    # 3 passes x 2 operations for each weight; for each query, key and channel of a layer twice
    # as many: q·k, and the product with v.
    return 6.0 * weights + 12.0 * N * H * keys


def t5_shapes(config: T5Config, vocab_size: int, _moe: Any = _NO_EXPERTS) -> dict[str, Shape]:
    """List every logical tensor of a T5 with its global shape, see ``tensor_shapes``."""
    D, H = config.hidden_size, head_dim(config)
    inner, keys = config.num_attention_heads * H, num_kv_heads(config) * H
    norm = norm_kinds(config)
    width, is_gated = ffn_size(config), feed_forward(config)[0]
    self_attention: dict[str, Shape] = {
        "qkv.q": (inner, D),
        "qkv.k": (keys, D),
        "qkv.v": (keys, D),
        "proj": (D, inner),
    }
    cross_attention: dict[str, Shape] = {
        "q": (inner, D),
        "kv.k": (keys, D),
        "kv.v": (keys, D),
        "proj": (D, inner),
    }
    dense = dict.fromkeys(("fc1.gate", "fc1.up") if is_gated else ("fc1",), (width, D))

    def half(name: str, linears: dict[str, Shape]) -> dict[str, Shape]:
        tensors: dict[str, Shape] = {f"{name}_norm.{kind}": (D,) for kind in norm}
        for linear, shape in linears.items():
            tensors[f"{name}.{linear}.weight"] = shape
            if config.add_bias_linear:
                tensors[f"{name}.{linear}.bias"] = shape[:1]
        return tensors

    shapes: dict[str, Shape] = {"embedding.weight": (vocab_size, D)}
    if config.position_embedding_type == "learned_absolute":
        shapes["position_embedding.weight"] = (num_positions(config), D)
    for stack, depth in (
        ("encoder", encoder_layers(config)),
        ("decoder", decoder_layers(config)),
    ):
        if config.position_embedding_type == "relative":
            table = (config.relative_attention_num_buckets, config.num_attention_heads)
            shapes[f"{stack}.relative_position_bias.weight"] = table
        block = half("attention", self_attention)
        block |= half("cross_attention", cross_attention) if stack == "decoder" else {}
        block |= half("mlp", {**dense, "fc2": (D, width)})
        for layer in range(depth):
            shapes |= {f"{stack}.blocks.{layer}.{name}": s for name, s in block.items()}
        shapes |= {f"{stack}.final_norm.{kind}": (D,) for kind in norm}
    if config.untie_embeddings_and_output_weights:
        shapes["head.weight"] = (vocab_size, D)
    elif config.add_output_bias:
        shapes["lm_head.bias"] = (vocab_size,)
    return shapes


def t5_flops_per_token(
    config: T5Config, padded_vocab_size: int, seq_length: int, moe: MoEConfig = _NO_EXPERTS
) -> float:
    """Return the floating-point operations of training a T5 for each token of the encoder.

    The decoder is assumed to have a quarter of the encoder's tokens, as in T5's pre-training;
    throughput counts the encoder's tokens.
    """
    N, H = config.num_attention_heads, head_dim(config)
    matrices = {
        name: prod(shape)
        for name, shape in t5_shapes(config, 0, moe).items()
        if tensor_kind(name, shape) == "matrix"
    }
    encoder = sum(size for name, size in matrices.items() if name.startswith("encoder.blocks"))
    decoder = sum(size for name, size in matrices.items() if name.startswith("decoder.blocks"))
    # Keys and values of cross-attention are computed once for each token of the encoder.
    cross_kv = sum(size for name, size in matrices.items() if ".kv." in name)
    share, pairs = 0.25, 12.0 * N * H * seq_length
    weights = (
        encoder
        + cross_kv
        + share * (decoder - cross_kv + config.hidden_size * padded_vocab_size)
    )
    # Layers of self-attention; in the decoder share x share of the pairs, halved as causal.
    self_attention = encoder_layers(config) + decoder_layers(config) * share**2 / 2
    return 6.0 * weights + pairs * (self_attention + decoder_layers(config) * share)
