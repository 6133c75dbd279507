"""What weights begin as, by logical name: the same bits under every layout.

| logical tensor | begins as |
| --- | --- |
| matrices that write to the residual stream | N(0, std / sqrt(number of mixers)) |
| embedding tables | N(0, embedding std) |
| every other matrix, head and router among them | N(0, std) |
| norms and biases (vectors) | the constants of their modules: 1 and 0 |
| convolutions | U(-1, 1) / sqrt(tokens that they see) |
| Mamba's decay rates | U(1, 16), kept as logarithms |
| a delta net's decay rates | U(0.01, 16), kept as logarithms |
| Mamba's step sizes | exp U(ln min, ln max), at least a floor; kept before the softplus |

With ``--use-mup`` spreads fall with the width too, see ``mcore_parallel.mup``.
The smaller residual weights keep the variance of the stream independent of depth: Radford
et al. 2019, section 2.3 (GPT-2). Mamba's are those of Dao and Gu 2024, arXiv:2405.21060,
a delta net's those of Yang et al. 2024, arXiv:2412.06464.
"""

import math

import torch
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_parallel.logical_tensors import num_halves
from mcore_parallel.mup import TABLES, spread_factor
from mcore_parallel.rng import fill_parameter_, fill_parameters_
from mcore_parallel.sharding import NamedParameter, named_parameters

_RESIDUAL = (
    "attention.proj.weight",
    ".mla.proj.weight",
    ".fc2.weight",
    ".mamba.out_proj.weight",
    ".delta_net.out_proj.weight",
    ".latent_up.weight",
)


def initialize_(model: nn.Module, config: TransformerConfig, seed: int) -> None:
    """Fill the matrices of a model or of one of its stages, in place; no communication.

    Args:
        model: its paths carry global layer numbers. Parameters on the meta device are left.
        config: standard deviations and depth.
        seed: of the whole model, equal on all ranks.
    """
    wanted = []
    for named in named_parameters(model):
        parts = named.layout.parts
        if named.parameter.is_meta:
            continue
        recurrent = ".mamba." in named.name or ".delta_net." in named.name
        if recurrent and _fill_recurrent_(named, config, seed):
            continue
        if len(parts[0].shape) < 2:
            continue
        (std,) = {initial_std(part.name, config) for part in parts}
        wanted.append((named, std))
    fill_parameters_(wanted, seed=seed)


def initial_std(name: str, config: TransformerConfig) -> float:
    """Standard deviation of a logical matrix by its name."""
    if name in TABLES:
        return config.embedding_init_method_std or config.init_method_std
    std = config.init_method_std * spread_factor(name, config)
    is_residual = name.endswith(_RESIDUAL) and ".shared.block." not in name
    return std / math.sqrt(num_halves(config)) if is_residual else std


def _fill_recurrent_(named: NamedParameter, config: TransformerConfig, seed: int) -> bool:
    """Fill what is special in a layer with a state; False for its other parameters."""
    name, parameter = named.name, named.parameter.detach()
    if name.endswith(".conv1d.weight"):
        width = parameter.shape[-1]
        parameter.copy_((2 * _uniform(named, seed) - 1) / math.sqrt(width))
    elif name.endswith(".A_log"):
        least = 1.0 if ".mamba." in name else 0.01
        parameter.copy_((least + (16 - least) * _uniform(named, seed)).log())
    elif name.endswith(".mamba.dt_bias"):
        low, high = math.log(config.mamba_dt_min), math.log(config.mamba_dt_max)
        step = (low + (high - low) * _uniform(named, seed)).exp()
        step = step.clamp(min=config.mamba_dt_init_floor)
        parameter.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus
    else:
        return False
    return True


def _uniform(named: NamedParameter, seed: int) -> Tensor:
    """Draw numbers of U(0, 1) for a parameter: normal ones, by their distribution function."""
    fill_parameter_(named, seed=seed, std=1.0)
    return torch.special.ndtr(named.parameter.detach().double())
