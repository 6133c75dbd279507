"""``mcore-models show``: lines that describe a model as a tree, without torch.

Equal layers are printed once, with their numbers.
"""

from collections.abc import Callable, Iterator
from math import prod

from mcore_models.config import activation, chunk, is_rotated, window
from mcore_models.description import ModelDescription
from mcore_models.encoder_config import (
    BertConfig,
    T5Config,
    decoder_layers,
    encoder_layers,
    feed_forward,
)
from mcore_models.families import FAMILIES
from mcore_models.logical_tensors import (
    expert_size,
    ffn_size,
    head_dim,
    is_gated,
    layer_config,
    layer_mixers,
    mamba_sizes,
    num_kv_heads,
)
from mcore_moe.config import MoEConfig


def tree(model: ModelDescription) -> Iterator[str]:
    """Yield the lines of a model's tree, one for each part, with its parameters."""
    config = model.config
    shapes = FAMILIES[model.family].tensor_shapes(config, model.vocab_size, model.moe)
    counts = {name: prod(shape) for name, shape in shapes.items()}

    def size(prefix: str) -> str:
        return f"{sum(n for name, n in counts.items() if name.startswith(prefix)):,}"

    kind = config.position_embedding_type
    limit = config.max_position_embeddings
    positions = f"{kind}, up to {limit:,} tokens" if limit else kind
    table = f"{model.vocab_size:,} tokens x {config.hidden_size:,}"
    yield f"embedding  {table}  [{size('embedding.')}]"
    yield f"positions  {positions}"
    if config.per_layer_embedding_size:
        yield f"per-layer embeddings  [{size('per_layer_embedding.')}]"
    if config.altup_num_inputs:
        yield f"residual streams  {config.altup_num_inputs}  [{size('altup_')}]"
    if isinstance(config, T5Config):
        yield from _stacks(config, size)
    elif isinstance(config, BertConfig):
        yield from _bert(model, config, size)
        return
    else:
        yield from _layers(model, size)
        yield f"final norm  {config.normalization}  [{size('final_norm.')}]"
    untied = config.untie_embeddings_and_output_weights
    yield f"head  [{size('head.')}]" if untied else "head  tied to the embedding"
    if further := config.mtp_num_layers:
        noun = "tokens" if further > 1 else "token"
        yield f"multi-token prediction  {further} further {noun}  [{size('mtp.0.')} each]"
        yield "  two norms, a projection and a layer like the last one; shared embedding, head"


def _layers(model: ModelDescription, size: Callable[[str], str]) -> Iterator[str]:
    for layers, lines in _kinds(model):
        yield f"{_ranges(layers)}  [{size(f'blocks.{layers[0]}.')} each]"
        yield from (f"  {line}" for line in lines)


def _bert(
    model: ModelDescription, config: BertConfig, size: Callable[[str], str]
) -> Iterator[str]:
    if config.num_tokentypes:
        yield f"token types  {config.num_tokentypes}  [{size('tokentype_embedding.')}]"
    where = "after" if config.post_layer_norm else "before"
    for line in _layers(model, size):
        yield line.replace(" before each part", f" {where} each part, bidirectional")
    for name, prefix in (("pooler", "pooler."), ("lm", "lm_head."), ("binary", "binary_head.")):
        if name in config.bert_heads:
            yield f"{name} head  [{size(prefix)}]"


def _stacks(config: T5Config, size: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines of encoder and decoder of a T5."""
    gated, activation = feed_forward(config)
    heads = f"{config.num_attention_heads} heads of {head_dim(config)}"
    for stack, depth in (
        ("encoder", encoder_layers(config)),
        ("decoder", decoder_layers(config)),
    ):
        yield f"{stack} {_ranges(list(range(depth)))}  [{size(f'{stack}.blocks.0.')} each]"
        yield f"  {config.normalization} before each part"
        yield f"  attention  {heads}"
        if stack == "decoder":
            yield f"  attention to the encoder  {heads}"
        yield f"  mlp  {ffn_size(config):,} wide, {'gated ' if gated else ''}{activation}"


def _kinds(model: ModelDescription) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    """Yield groups of layers with equal lines, and the lines; ordered by first layer."""
    mixers = layer_mixers(model.config, model.moe)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in range(model.config.num_layers):
        kinds.setdefault(tuple(_lines(model, layer, mixers[layer])), []).append(layer)
    for lines, layers in kinds.items():
        yield layers, lines


def _lines(model: ModelDescription, layer: int, mixers: tuple[str, ...]) -> Iterator[str]:
    config = model.config
    placements = {
        "pre": "before",
        "output": "after",
        "sandwich": "before and after",
        "post": "of the residual stream before",
    }
    where = placements[config.norm_placement]
    parallel = {
        "off": "",
        "two_norms": ", in parallel",
        "one_norm": ", in parallel, one norm",
    }
    yield f"{config.normalization} {where} each part{parallel[config.parallel_residual]}"
    for mixer in mixers:
        if mixer == "attention":
            yield f"attention  {', '.join(_attention(model, layer))}"
            if config.laurel_rank:
                yield f"low-rank branch  of rank {config.laurel_rank}"
        elif mixer == "mlp":
            gate = "gated " if is_gated(config) else ""
            width = ffn_size(layer_config(config, layer))
            share = (config.activation_sparsity_pattern or (0.0,) * config.num_layers)[layer]
            cut = f", {share:.0%} of gates cut" if share else ""
            yield f"mlp  {width:,} wide, {gate}{activation(config)}{cut}"
        elif mixer in ("delta_net", "kda"):
            keys, values = config.linear_num_key_heads, config.linear_num_value_heads
            widths = f"{config.linear_key_head_dim} and {config.linear_value_head_dim}"
            kind = "gated delta net" if mixer == "delta_net" else "Kimi Delta Attention"
            yield f"{kind}  {keys} key and {values} value heads of {widths}"
        elif mixer == "short_conv":
            yield f"gated short convolution  of {config.short_conv_kernel_dim} tokens"
        elif mixer == "lightning":
            heads = config.num_attention_heads
            yield f"lightning attention  {heads} heads of {head_dim(config)}"
        elif mixer == "layer_input":
            yield f"per-layer embedding  {config.per_layer_embedding_size} wide"
        elif mixer == "moe":
            yield f"experts  {', '.join(_experts(model, model.moe))}"
        elif mixer == "mla":
            yield f"latent attention  {', '.join(_latent(model))}"
        elif mixer == "mamba":
            yield f"mamba  {', '.join(_mamba(model))}"
        else:
            yield mixer


def _latent(model: ModelDescription) -> Iterator[str]:
    config = model.config
    rotated = config.qk_pos_emb_head_dim
    yield f"{config.num_attention_heads} heads of {config.qk_head_dim} + {rotated} rotated"
    yield f"values of {config.v_head_dim}"
    yield f"keys and values from {config.kv_lora_rank:,}"
    if config.q_lora_rank:
        yield f"queries from {config.q_lora_rank:,}"


def _mamba(model: ModelDescription) -> Iterator[str]:
    config, sizes = model.config, mamba_sizes(model.config)
    yield f"{sizes.heads} heads of {config.mamba_head_dim}"
    yield f"a state of {config.mamba_state_dim}"
    yield f"{sizes.groups} group{'s' * (sizes.groups > 1)}"


def _attention(model: ModelDescription, layer: int) -> Iterator[str]:
    config = layer_config(model.config, layer)
    heads, groups = config.num_attention_heads, num_kv_heads(config)
    yield f"{heads} heads of {head_dim(config)}"
    if groups != heads:
        yield f"{groups} key/value heads"
    if window(config, layer) >= 0:
        yield f"window of {window(config, layer) + 1:,}"
    if chunk(config, layer):
        yield f"chunks of {chunk(config, layer):,}"
    if config.position_embedding_type == "rope" and not is_rotated(config, layer):
        yield "no rotation"
    if config.num_kv_shared_layers:
        yield "keys and values of another layer"
    if config.attention_k_eq_v:
        yield "keys as values"
    if config.qk_layernorm:
        yield "norms of queries and keys"
    if config.attention_output_gate:
        yield "gated output"
    if config.softmax_type == "learnable":
        yield "sinks"
    if config.attn_logit_softcapping:
        yield f"scores capped at {config.attn_logit_softcapping:g}"


def _experts(model: ModelDescription, moe: MoEConfig) -> Iterator[str]:
    yield f"{moe.moe_router_topk} of {moe.num_experts}"
    gate = "gated " if is_gated(model.config) else ""
    yield f"each {expert_size(model.config, moe):,} wide, {gate}{activation(model.config)}"
    if moe.moe_shared_expert_intermediate_size:
        yield f"a shared expert {moe.moe_shared_expert_intermediate_size:,} wide"


def _ranges(layers: list[int]) -> str:
    """Return a short text for layers: "layers 0-31", "layers 5, 11, 17, ... (8 of them)"."""
    first, last, count = layers[0], layers[-1], len(layers)
    if count == 1:
        return f"layer {first}"
    if last - first == count - 1:
        return f"layers {first}-{last}"
    first_three = ", ".join(map(str, layers[:3]))
    return f"layers {first_three}{', ...' if count > 3 else ''} ({count} of them)"
