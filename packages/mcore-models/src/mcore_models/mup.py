"""muP: initial standard deviations, learning rates and factors that depend on a model's width.

Let m be the model's width divided by the width of a base model. Matrices inside the layers are
initialized with a standard deviation times 1/sqrt(m), and Adam's step and epsilon are divided
by m. Scores of the vocabulary are divided by m, attention scores by the width of a head instead
of its square root. Embeddings, the output head, norms, biases and convolutions are unchanged.
Then activations change by the same amount in a step at every width, and a learning rate tuned
at the base width transfers.

Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 8. The weight decay of a step is
equal at every width: Wang and Aitchison 2024, arXiv:2405.13698. ``config`` is any object with
the fields of ``TransformerConfig``. The standard library only.
"""

from collections.abc import Iterable
from typing import Any

TABLES = (
    *("embedding.weight", "position_embedding.weight", "tokentype_embedding.weight"),
    "per_layer_embedding.table.weight",
)
"""Logical matrices whose rows are looked up."""
_OF_ANY_WIDTH = (*TABLES, "head.weight")
_NO_SUM_OVER_WIDTH = (".conv1d.", "norm.")  # convolutions, and norms with a row a head


def width_ratio(config: Any) -> float:
    """Return m, the model's width divided by the base width; 1 without muP."""
    return config.hidden_size / config.mup_base_hidden_size if config.use_mup else 1.0


def spread_factor(name: str, config: Any) -> float:
    """Return the factor on a logical matrix's initial standard deviation, by its name."""
    return 1.0 if name in _OF_ANY_WIDTH else width_ratio(config) ** -0.5


def step_width(tensors: Iterable[tuple[str, tuple[int, ...]]], config: Any) -> float:
    """Return the divisor of a parameter's learning rate and Adam's epsilon: m or 1.

    Args:
        tensors: names and shapes of the parameter's logical tensors.
        config: of the model.
    """
    is_inside = all(
        len(shape) > 1
        and name not in _OF_ANY_WIDTH
        and not any(part in name for part in _NO_SUM_OVER_WIDTH)
        for name, shape in tensors
    )
    return width_ratio(config) if is_inside else 1.0


def embedding_factor(config: Any) -> float:
    """Return the factor on embeddings."""
    return config.embedding_multiplier * (config.mup_embedding_mult if config.use_mup else 1.0)


def logits_factor(config: Any) -> float:
    """Return the factor on the scores of the vocabulary."""
    mup_factor = config.mup_output_mult / width_ratio(config) if config.use_mup else 1.0
    return config.logits_multiplier * mup_factor


def score_scale(config: Any, width: int) -> float:
    """Return the factor on attention scores; 0: 1 / sqrt(width of a head)."""
    if config.softmax_scale or not config.use_mup:
        return config.softmax_scale
    # Equal to 1 / sqrt(width) at the base width, and falling with width ** -power beyond.
    base = config.mup_base_head_dim or width
    return base**-0.5 * (base / width) ** config.mup_attn_scale_power
