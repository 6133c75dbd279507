"""What weights begin as, by logical name: the same bits under every layout.

| logical tensor | begins as |
| --- | --- |
| matrices that write to the residual stream | N(0, std / sqrt(2 x layers)) |
| embedding tables | N(0, embedding std) |
| every other matrix, head and router among them | N(0, std) |
| norms and biases (vectors) | the constants of their modules: 1 and 0 |

The smaller residual weights keep the variance of the stream independent of depth: Radford
et al. 2019, section 2.3 (GPT-2).
"""

import math

from torch import nn

from mcore_models.config import TransformerConfig
from mcore_parallel.rng import fill_parameter_
from mcore_parallel.sharding import named_parameters

_RESIDUAL = (".attention.proj.weight", ".mla.proj.weight", ".fc2.weight")
_TABLES = ("embedding.weight", "position_embedding.weight")


def initialize_(model: nn.Module, config: TransformerConfig, seed: int) -> None:
    """Fill the matrices of a model or of one of its stages, in place; talks to nobody.

    Args:
        model: its paths carry global layer numbers. Parameters on the meta device are left.
        config: standard deviations and depth.
        seed: of the whole model, equal on all ranks.
    """
    for named in named_parameters(model):
        parts = named.layout.parts
        if named.parameter.is_meta or len(parts[0].shape) < 2:
            continue
        (std,) = {initial_std(part.name, config) for part in parts}
        fill_parameter_(named, seed=seed, std=std)


def initial_std(name: str, config: TransformerConfig) -> float:
    """Standard deviation of a logical matrix by its name."""
    if name in _TABLES:
        return config.embedding_init_method_std or config.init_method_std
    if name.endswith(_RESIDUAL):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std
