"""Checks whether a model fits a layout: pure functions, called before anything is allocated.

A check returns all problems together, each with its flag and allowed values, so that every rank
raises the same error before a collective. No torch here.
"""

from collections.abc import Iterable, Sequence

from mcore_base.options import listed
from mcore_models.config import TransformerConfig, divisors, has_plain_scores
from mcore_models.layer_patterns import is_local, keys_layer
from mcore_models.logical_tensors import (
    ffn_size,
    further_mixers,
    global_config,
    layer_mixers,
    mamba_sizes,
    num_kv_heads,
)
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig

_NO_EXPERTS = MoEConfig()
_LEVELS = "the first of --hierarchical-context-parallel-sizes"


def check_layout(
    config: TransformerConfig,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> None:
    """Raise one error with all ``layout_problems`` of a model, if it has any.

    Raises:
        ValueError: with one line for each problem.
    """
    problems = layout_problems(config, parallel, moe, seq_length)
    if problems:
        raise ValueError("\n".join(problems))


def layout_problems(
    config: TransformerConfig,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> list[str]:
    """Return an error message for each reason why a layout cannot split a model.

    Args:
        config: of the model.
        parallel: the parallel sizes.
        moe: experts of the model.
        seq_length: tokens of a training sequence; 0: not checked.
    """
    problems = _pattern_problems(config, moe)
    if problems:
        return problems
    mixers = {name for names in layer_mixers(config, moe) for name in names}
    if config.mtp_num_layers:
        mixers |= {*further_mixers(config, moe)}
    if mixers & {"attention", "mla"}:
        for sizes in dict.fromkeys((config, global_config(config))):
            problems += _head_problems(sizes, parallel)
        problems += _context_problems(config, parallel)
    if "mla" in mixers and config.dsa_indexer_topk and parallel.context_parallel_size > 1:
        problems.append(
            "--dsa-indexer-topk selects keys of complete sequences: use "
            "--context-parallel-size 1."
        )
    if "mamba" in mixers:
        problems += _mamba_problems(config, parallel)
    for mixer, layers in (("delta_net", "gated delta nets"), ("kda", "Kimi Delta Attention")):
        if mixer in mixers:
            heads = config.linear_num_key_heads
            problems += _split_problems(
                parallel, "--linear-num-key-heads", heads, layers, "heads"
            )
    if "short_conv" in mixers:
        problems += _split_problems(
            parallel,
            "--hidden-size",
            config.hidden_size,
            "gated short convolutions",
            "channels",
        )
    if "lightning" in mixers:
        problems += _split_problems(
            parallel,
            "--num-attention-heads",
            config.num_attention_heads,
            "lightning attention",
            "heads",
        )
    problems += _width_problems(config, parallel, moe, mixers)
    if moe.num_experts:
        problems += _expert_problems(moe, parallel)
    # Embedding and loss may have stages of their own (--pipeline-model-parallel-layout).
    most = config.num_layers + 2
    if parallel.pipeline_model_parallel_size > most:
        problems.append(
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} exceeds "
            f"--num-layers {config.num_layers}, embedding and loss: use at most {most}."
        )
    if seq_length:
        problems += _sequence_problems(config, parallel, seq_length)
    return problems


def stage_problems(config: TransformerConfig, stages: Iterable[Sequence[int]]) -> list[str]:
    """Return an error if layers of a pipeline stage read keys that another stage computes.

    Args:
        config: of the model.
        stages: layers of each stage to check, as global numbers.
    """
    shared, depth = config.num_kv_shared_layers, config.num_layers
    for layers in stages if shared else ():
        for layer in layers:
            if (source := keys_layer(config, layer)) not in layers:
                first = min(keys_layer(config, i) for i in range(depth - shared, depth))
                problem = (
                    f"--num-kv-shared-layers {shared}: layer {layer} reads the keys and values "
                    f"of layer {source}, which is on another pipeline stage: put the last "
                    f"{depth - first} layers on one stage (--decoder-last-pipeline-num-layers "
                    f"{depth - first} or more), or use --pipeline-model-parallel-size 1."
                )
                return [problem]
    return []


def _pattern_problems(config: TransformerConfig, moe: MoEConfig) -> list[str]:
    pattern = config.hybrid_override_pattern
    problem = ""
    if pattern and bool(moe.num_experts) != ("E" in pattern):
        problem = (
            f"--hybrid-override-pattern {pattern} has {'no ' * bool(moe.num_experts)}E, but "
            f"--num-experts is {moe.num_experts}: give both or neither."
        )
    else:
        try:
            layer_mixers(config, moe)
        except ValueError as error:
            problem = str(error)
    return [problem] if problem else []


def _mamba_problems(config: TransformerConfig, parallel: ParallelConfig) -> list[str]:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = mamba_sizes(config)[:2]
    problem = ""
    if heads % (tp * cp):
        split = f"--tensor-model-parallel-size {tp}"
        split += f" x --context-parallel-size {cp}" if cp > 1 else ""
        problem = (
            f"{heads} Mamba heads (--mamba-num-heads) cannot be split over {split}: heads must "
            f"divide evenly. Use {listed(divisors(heads))} ranks."
        )
    elif groups % tp and tp % groups:
        fitting = [n for n in divisors(heads) if groups % n == 0 or n % groups == 0]
        problem = (
            f"--mamba-num-groups {groups} cannot be split over --tensor-model-parallel-size "
            f"{tp}: one must divide the other. Use {listed(fitting)} tensor ranks."
        )
    return [problem] if problem else []


def _split_problems(
    parallel: ParallelConfig, option: str, size: int, layers: str, parts: str
) -> list[str]:
    """Return the error for a size of recurrent layers that tp x cp does not divide, if so."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if size % (tp * cp) == 0:
        return []
    split = f"--tensor-model-parallel-size {tp}"
    split += f" x --context-parallel-size {cp}" if cp > 1 else ""
    problem = (
        f"{option} {size} of {layers} cannot be split over {split}: "
        f"{parts} must divide evenly. Use {listed(divisors(size))} ranks."
    )
    return [problem]


def _head_problems(config: TransformerConfig, parallel: ParallelConfig) -> list[str]:
    tp, heads = parallel.tensor_model_parallel_size, config.num_attention_heads
    groups = num_kv_heads(config)
    if heads % tp:
        problem = (
            f"--num-attention-heads {heads} cannot be split over --tensor-model-parallel-size "
            f"{tp}: heads must divide evenly. Use {listed(divisors(heads))}."
        )
        return [problem]
    if groups % tp and tp % groups:
        fitting = [n for n in divisors(heads) if groups % n == 0 or n % groups == 0]
        problem = (
            f"--num-query-groups {groups} cannot be split over --tensor-model-parallel-size "
            f"{tp}: one must divide the other. Use {listed(fitting)} tensor ranks."
        )
        return [problem]
    if config.qk_layernorm and config.qk_norm_width != "head" and groups % tp:
        problem = (
            f"--qk-norm-width {config.qk_norm_width} cannot norm keys of --num-query-groups "
            f"{groups} over --tensor-model-parallel-size {tp}: use {listed(divisors(groups))}."
        )
        return [problem]
    return []


def _context_problems(config: TransformerConfig, parallel: ParallelConfig) -> list[str]:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    kind, heads = parallel.cp_comm_type, config.num_attention_heads
    if cp == 1:
        return []
    problems = []
    if config.position_embedding_type == "alibi":
        problems.append(
            f"--context-parallel-size {cp} does not split --position-embedding-type alibi: use "
            "rope, or --context-parallel-size 1."
        )
    sizes = parallel.hierarchical_context_parallel_sizes
    exchange_size, flag = (sizes[0], _LEVELS) if sizes else (cp, "--context-parallel-size")
    if kind.startswith("a2a") and heads % (tp * exchange_size):
        problems.append(
            f"--cp-comm-type {kind} cannot exchange --num-attention-heads {heads} over "
            f"--tensor-model-parallel-size {tp} x {flag} {exchange_size}: heads must be "
            f"a multiple of {tp * exchange_size}. Use p2p or all_gather."
        )
    if kind.endswith("p2p"):
        problems += [
            f"--cp-comm-type {kind} does not support {what} ({flag}): use all_gather or a2a."
            for what, flag, is_set in (
                ("windows", "--window-size", config.window_size[0] >= 0),
                ("chunks", "--attention-chunk-size", config.attention_chunk_size > 0),
                ("caps", "--attn-logit-softcapping", config.attn_logit_softcapping > 0),
                ("sinks", "--softmax-type", config.softmax_type == "learnable"),
                ("dropout", "--attention-dropout", config.attention_dropout > 0),
            )
            if is_set
        ]
    return problems


def _width_problems(
    config: TransformerConfig, parallel: ParallelConfig, moe: MoEConfig, mixers: set[str]
) -> list[str]:
    tp = parallel.tensor_model_parallel_size
    widths = {}
    if mixers & {"mlp", "moe", "shared"}:
        widths["--ffn-hidden-size"] = (ffn_size(config), "--tensor-model-parallel-size", tp)
    if moe.num_experts:
        expert_tp = parallel.expert_tensor_parallel_size or tp
        width = moe.moe_ffn_hidden_size or ffn_size(config)
        widths["--moe-ffn-hidden-size"] = (width, "--expert-tensor-parallel-size", expert_tp)
        shared = moe.moe_shared_expert_intermediate_size
        widths["--moe-shared-expert-intermediate-size"] = (
            shared,
            "--tensor-model-parallel-size",
            tp,
        )
    return [
        f"{flag} {width} cannot be split over {degree} {size}: use a multiple of {size}, such "
        f"as {-(-width // size) * size}."
        for flag, (width, degree, size) in widths.items()
        if width % size
    ]


def _expert_problems(moe: MoEConfig, parallel: ParallelConfig) -> list[str]:
    ep = parallel.expert_model_parallel_size
    if moe.num_experts % ep == 0:
        return []
    problem = (
        f"--num-experts {moe.num_experts} cannot be split over --expert-model-parallel-size "
        f"{ep}: use {listed(divisors(moe.num_experts))}."
    )
    return [problem]


def _sequence_problems(
    config: TransformerConfig, parallel: ParallelConfig, seq_length: int
) -> list[str]:
    problems = []
    limit = config.max_position_embeddings
    if limit and seq_length > limit:
        problems.append(too_long(seq_length, limit))
    cp = parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    # Zigzag order gives each context rank two slices of a sequence.
    divisor = cp * tp * (2 if cp > 1 else 1)
    if seq_length % divisor:
        flags = [f"--context-parallel-size {cp} (two slices a rank)"] * (cp > 1)
        flags += [f"--sequence-parallel over --tensor-model-parallel-size {tp}"] * (tp > 1)
        problems.append(
            f"--seq-length {seq_length} cannot be split by {' and '.join(flags)}: use a "
            f"multiple of {divisor}, such as {-(-seq_length // divisor) * divisor}."
        )
    return problems


def check_length(
    config: TransformerConfig, num_tokens: int, num_remembered: int, flag: str = "--seq-length"
) -> None:
    """Raise ValueError for a sequence that is longer than a model's positions.

    Args:
        config: of the model.
        num_tokens: new tokens, over all context ranks.
        num_remembered: earlier tokens, stored in a state.
        flag: option that sets the sequence length.
    """
    limit, length = config.max_position_embeddings, num_tokens + num_remembered
    if limit and length > limit:
        raise ValueError(too_long(length, limit, flag))
    context = config.original_max_position_embeddings
    if config.rope_type == "longrope" and 0 < num_remembered <= context < length:
        raise ValueError(
            f"--rope-type longrope uses other wavelengths beyond {context} tokens, but the "
            f"state stores {num_remembered} keys rotated for a shorter sequence: run all "
            "tokens again without the state."
        )


def too_long(seq_length: int, limit: int, flag: str = "--seq-length") -> str:
    """Return the message for a sequence that exceeds the positions of a model."""
    return (
        f"a sequence of {seq_length} tokens is longer than --max-position-embeddings {limit}: "
        f"use {flag} {limit} or less, or a model with more positions."
    )


def cp_comm_type(config: TransformerConfig, parallel: ParallelConfig, layer: int) -> str:
    """Return the ``--cp-comm-type`` of a layer (counted from 0), or its default."""
    if parallel.cp_comm_type:
        return parallel.cp_comm_type
    return "all_gather" if cannot_be_cut(config, layer) else "p2p"


def cannot_be_cut(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer's attention cannot be computed in blocks of keys."""
    return (
        is_local(config, layer) or config.attention_dropout > 0 or not has_plain_scores(config)
    )
