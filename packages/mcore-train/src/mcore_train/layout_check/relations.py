"""Describes in words the relations between numbers of a plan that decide code branches.

Relations are: which numbers are one, two or more, and which divide which (heads by tensor
ranks, experts by expert ranks, layers by stages). ``mcore-train verify`` chooses sizes of a
small run that keep the relations, and reports the relations that it could not keep. No torch.
"""

from collections.abc import Iterator
from math import lcm

from mcore_models.building.layouts import cannot_be_cut, cp_comm_type
from mcore_models.config import TransformerConfig, is_rotated
from mcore_models.encoder_config import BertConfig, T5Config, encoder_layers
from mcore_models.layer_patterns import is_local
from mcore_models.logical_tensors import head_dim, layer_config, layer_mixers, num_kv_heads
from mcore_parallel.config import ParallelConfig
from mcore_train.composition import TrainConfig
from mcore_train.resolution import Plan

HEAD_CHUNK_TOKENS = 4096
"""Tokens of a rank's micro-batch above which the head computes its logits in chunks."""
TILE_ROWS, TILE_COLUMNS = 64, 512
"""Shape of the tiles in which initial weights are drawn."""
BUCKET_MULTIPLE = 128
"""The end of a bucket is rounded up to a multiple of this number of elements."""


def relations(plan: Plan) -> dict[str, str]:
    """Return the relations of a plan's numbers, such as which divide which, by name.

    Returns:
        Relations by the names of the related numbers, both in words. Two plans with the same
        switches and equal relations take the same branches.
    """
    return {
        **dict(_degrees(plan)),
        **dict(_heads(plan)),
        **dict(_recurrent(plan)),
        **dict(_layers(plan)),
        **dict(_microbatches(plan)),
        **dict(_experts(plan)),
        **dict(_optimizer(plan)),
        **dict(_sizes(plan)),
        "vocabulary rows of tensor ranks": vocabulary_rows(plan),
    }


def compare_relations(real: Plan, small: Plan) -> dict[str, tuple[str, str]]:
    """Return the relations that differ between a real and a small run, as pairs of both."""
    small_relations = relations(small)
    return {
        what: (relation, small_relations.get(what, "off"))
        for what, relation in relations(real).items()
        if small_relations.get(what, "off") != relation
    }


def _degrees(plan: Plan) -> Iterator[tuple[str, str]]:
    parallel = plan.config.parallelism
    degrees = {
        "tensor ranks": parallel.tensor_model_parallel_size,
        "context ranks": parallel.context_parallel_size,
        "context ranks that exchange heads": _exchanging(parallel),
        "pipeline ranks": parallel.pipeline_model_parallel_size,
        "data ranks": plan.data_parallel_size,
        "expert ranks": parallel.expert_model_parallel_size,
        "expert ranks of a node": parallel.hierarchical_expert_parallel_size,
        "optimizer instances": parallel.num_distributed_optimizer_instances,
    }
    for name, degree in degrees.items():
        yield name, _few(degree)


def _exchanging(parallel: ParallelConfig) -> int:
    """Return the context ranks over which heads are exchanged."""
    return (*parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size)[0]


def head_relations(num_heads: int, num_groups: int, parallel: ParallelConfig) -> dict[str, str]:
    """Describe how heads and key/value heads divide over tensor and context ranks."""
    tp, cp = parallel.tensor_model_parallel_size, _exchanging(parallel)
    on_rank = max(1, num_groups // tp)
    described = {
        "query heads of a key/value head": "one" if num_heads == num_groups else "several",
        "key/value heads of a tensor rank": _one(on_rank),
    }
    if num_groups < tp:
        described["key/value heads of a tensor rank"] = (
            "one for all ranks" if num_groups == 1 else "one for some ranks"
        )
    if cp > 1:
        described["query heads over context ranks"] = (
            "divide" if num_heads % (tp * cp) == 0 else "do not divide"
        )
        if on_rank % cp == 0:
            described["key/value heads over context ranks"] = "divide"
        elif on_rank == 1:
            described["key/value heads over context ranks"] = "one for all"
        elif cp % on_rank == 0:
            described["key/value heads over context ranks"] = "each for several"
        else:
            described["key/value heads over context ranks"] = "neither divides the other"
    return described


def _heads(plan: Plan) -> Iterator[tuple[str, str]]:
    model = plan.config.model
    groups = num_kv_heads(model)
    yield from head_relations(
        model.num_attention_heads, groups, plan.config.parallelism
    ).items()
    has_own_width = head_dim(model) * model.num_attention_heads != model.hidden_size
    yield "width of all heads", "its own" if has_own_width else "--hidden-size"


def mamba_relations(num_groups: int, parallel: ParallelConfig) -> dict[str, str]:
    """Describe how groups of Mamba heads divide over tensor and context ranks."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    on_rank = num_groups // tp
    shared = "one for all ranks" if num_groups == 1 else "one for some ranks"
    described = {"Mamba groups of a tensor rank": _one(on_rank) if on_rank else shared}
    if cp > 1:
        described["Mamba groups over context ranks"] = (
            "divide" if max(1, on_rank) % cp == 0 else "each for several"
        )
    return described


def has_shared_keys(model: TransformerConfig) -> bool:
    """Whether several value heads of a gated delta net share a key head."""
    return model.linear_num_value_heads > model.linear_num_key_heads


def _recurrent(plan: Plan) -> Iterator[tuple[str, str]]:
    if {"G", "K"} & {*plan.config.model.hybrid_override_pattern}:
        shared = has_shared_keys(plan.config.model)
        yield "value heads of a delta net's key head", "several" if shared else "one"
    if "M" in plan.config.model.hybrid_override_pattern:
        groups = plan.config.model.mamba_num_groups
        yield from mamba_relations(groups, plan.config.parallelism).items()


def layer_kinds(plan: Plan) -> list[tuple[str, ...]]:
    """Return, for every layer in order, its mixers and its kind of attention.

    For a model with an encoder and a decoder, return which of them the layer belongs to.
    """
    config = plan.config
    if isinstance(config.model, T5Config):
        depth = encoder_layers(config.model)
        layers = range(plan.family.num_layers(config.model))
        return [("encoder",) if layer < depth else ("decoder",) for layer in layers]
    words = {"mlp": "dense", "moe": "experts", "mamba": "Mamba"}
    words |= {"delta_net": "delta net", "short_conv": "short convolution"}
    words |= {"lightning": "lightning attention", "kda": "Kimi Delta Attention"}
    words |= {"layer_input": "vector of the layer"}
    shares = config.model.activation_sparsity_pattern
    return [
        tuple(
            _positioned(config, layer)
            if name in ("attention", "mla")
            else words.get(name, name.replace("_", " "))
            for name in names
        )
        + ("sparse gates",) * (any(shares) and shares[layer] > 0)
        for layer, names in enumerate(layer_mixers(config.model, config.experts))
    ]


def _positioned(config: TrainConfig, layer: int) -> str:
    rotated = "" if is_rotated(config.model, layer) else ", unrotated"
    shares = layer_config(config.model, layer).num_kv_shared_layers
    keys = ", keys of another layer" if shares else ""
    return _attention(config, layer) + rotated + keys


def _attention(config: TrainConfig, layer: int) -> str:
    has_window = is_local(config.model, layer)
    if isinstance(config.model, BertConfig):
        return "all tokens, also later ones"
    if config.parallelism.context_parallel_size == 1:
        return "window" if has_window else "all tokens"
    kind = cp_comm_type(config.model, config.parallelism, layer)
    if kind == "a2a":
        return "exchanged heads, window" if has_window else "exchanged heads"
    if kind.endswith("p2p"):
        return "ring" if kind == "p2p" else "exchanged heads, ring"
    is_whole = cannot_be_cut(config.model, layer)
    return "gathered keys" if is_whole else "gathered keys in blocks"


def _layers(plan: Plan) -> Iterator[tuple[str, str]]:
    kinds = layer_kinds(plan)
    yield "kinds of layers", "; ".join(sorted({", ".join(kind) for kind in kinds}))
    counts = [len(stage.layers) for stage in plan.stages]
    if len(counts) == 1:
        return
    yield "layers of pipeline stages", "even" if len(set(counts)) == 1 else "uneven"
    if plan.config.model.mtp_num_layers:
        is_last = plan.stages[-1].has_mtp
        yield "multi-token prediction", "with the loss" if is_last else "before the loss"
    yield "pipeline stages without layers", "some" if 0 in counts else "none"


def _microbatches(plan: Plan) -> Iterator[tuple[str, str]]:
    number, pp = plan.num_microbatches, plan.config.parallelism.pipeline_model_parallel_size
    if pp == 1:
        yield "micro-batches", "one" if number == 1 else "several"
    elif number % pp == 0:
        rounds = number // pp
        yield (
            "micro-batches",
            "as many as stages" if rounds == 1 else "several times the stages",
        )
    else:
        yield "micro-batches", "fewer than stages" if number < pp else "no multiple of stages"
    yield "rows of a micro-batch", _one(plan.config.batch.micro_batch_size)


def _experts(plan: Plan) -> Iterator[tuple[str, str]]:
    experts, parallel = plan.config.experts, plan.config.parallelism
    if not experts.num_experts:
        return
    tp = parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    per_rank = experts.num_experts // parallel.expert_model_parallel_size
    topk = experts.moe_router_topk
    copies = expert_data_ranks(plan)
    instances = parallel.num_distributed_optimizer_instances
    yield "experts of a rank", _one(per_rank)
    yield "experts of a token", "all" if topk == experts.num_experts else _one(topk)
    yield "groups of experts for a token", _one(experts.moe_router_group_topk)
    yield (
        "tensor ranks of experts",
        "as of dense layers" if expert_tp == tp else "fewer" if expert_tp < tp else "more",
    )
    yield "split of an expert", _one(expert_tp)
    yield "ranks that hold the same experts", _one(copies)
    if plan.config.data_parallelism.sharding != "no_shard":
        yield "shards of an expert's optimizer", _one(copies // instances)


def _optimizer(plan: Plan) -> Iterator[tuple[str, str]]:
    config = plan.config
    if config.data_parallelism.sharding == "no_shard":
        return
    shards = optimizer_shards(plan)
    yield "shards of the optimizer", _one(shards)
    yield "vectors", "cut by shard borders" if cuts_vectors(plan) else "whole"


def _sizes(plan: Plan) -> Iterator[tuple[str, str]]:
    config = plan.config
    tokens = config.batch.micro_batch_size * config.batch.seq_length
    tokens //= config.parallelism.context_parallel_size
    yield "logits of a micro-batch", "whole" if tokens <= HEAD_CHUNK_TOKENS else "in pieces"
    is_wide = config.model.hidden_size > TILE_COLUMNS or plan.vocab_size > TILE_ROWS
    yield "tiles of an initial weight", "several" if is_wide else "one"


def vocabulary_rows(plan: Plan) -> str:
    """Describe whether vocabulary shares of tensor ranks are full, partly or all padding."""
    tp = plan.config.parallelism.tensor_model_parallel_size
    share = plan.padded_vocab_size // tp
    rows = [min(max(plan.vocab_size - rank * share, 0), share) for rank in range(tp)]
    kinds = {
        "full": any(n == share for n in rows),
        "partly padding": any(0 < n < share for n in rows),
        "all padding": 0 in rows,
    }
    return ", ".join(kind for kind, is_there in kinds.items() if is_there)


def expert_data_ranks(plan: Plan) -> int:
    """Return the number of ranks that hold the same part of the same experts."""
    parallel = plan.config.parallelism
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    split = expert_tp * parallel.expert_model_parallel_size
    return plan.world_size // (split * parallel.pipeline_model_parallel_size)


def optimizer_shards(plan: Plan) -> int:
    """Return the number of ranks that share one optimizer instance; 1: not shared."""
    if plan.config.data_parallelism.sharding == "no_shard":
        return 1
    parallel = plan.config.parallelism
    sharing = plan.data_parallel_size * parallel.context_parallel_size
    return sharing // parallel.num_distributed_optimizer_instances


def has_flat_shards(plan: Plan) -> bool:
    """Whether ranks share the optimizer by flat ranges (ZeRO-1), which may end anywhere."""
    return optimizer_shards(plan) > 1 and not plan.config.data_parallelism.is_fully_sharded


def cuts_vectors(plan: Plan) -> bool:
    """Whether borders of optimizer shards can lie in vectors of the residual stream."""
    shards = optimizer_shards(plan)
    if plan.config.data_parallelism.is_fully_sharded:
        return shards > 1
    return shards > 1 and plan.config.model.hidden_size > vector_length(shards)


def vector_length(shards: int) -> int:
    """Return the largest length of a vector that shards never cut in its own bucket."""
    return lcm(BUCKET_MULTIPLE, shards) // shards


def _few(number: int) -> str:
    return str(number) if number <= 2 else "more than 2"


def _one(number: int) -> str:
    return "none" if number == 0 else "one" if number == 1 else "several"
