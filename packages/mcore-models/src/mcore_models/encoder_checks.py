"""Whether a model with an encoder fits a layout, what it costs, and what tensors it has.

Pure questions about configs; no torch here.
"""

from math import prod
from typing import Any

from mcore_models.config import TransformerConfig
from mcore_models.encoder_config import BertConfig
from mcore_models.layout_checks import layout_problems
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.logical_tensors import head_dim, tensor_shapes

_NO_EXPERTS = MoEConfig()

Shape = tuple[int, ...]


def check_encoder_layout(
    config: TransformerConfig, parallel: ParallelConfig, moe: MoEConfig = _NO_EXPERTS
) -> None:
    """Raise all of ``encoder_layout_problems`` together.

    Raises:
        ValueError: one line a problem.
    """
    if problems := encoder_layout_problems(config, parallel, moe):
        raise ValueError("\n".join(problems))


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
