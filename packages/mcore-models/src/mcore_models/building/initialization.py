"""Initial weights by logical name, with the same bits under every layout.

| logical tensor | initial values |
| --- | --- |
| matrices that write to the residual stream | N(0, std / sqrt(number of mixers)) |
| embedding tables | N(0, embedding std) |
| every other matrix, head and router among them | N(0, std) |
| norms and biases | the constants of their modules: 1 and 0 |
| convolutions | U(-1, 1) / sqrt(kernel size) |
| Mamba's decay rates | U(1, 16), stored as logarithms |
| a delta net's decay rates | U(0.01, 16), stored as logarithms |
| Mamba's step sizes | exp U(ln min, ln max), at least a floor; stored before the softplus |

With ``--use-mup`` standard deviations also fall with the width, see ``mcore_models.mup``.
The smaller residual weights keep the variance of the stream independent of depth: Radford
et al. 2019, section 2.3 (GPT-2). Rates and step sizes: Dao and Gu 2024, arXiv:2405.21060
(Mamba); Yang et al. 2024, arXiv:2412.06464 (delta net).
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mcore_models.config import TransformerConfig
from mcore_models.logical_tensors import num_halves
from mcore_models.mup import TABLES, spread_factor
from mcore_parallel.rng import fill_shards_
from mcore_parallel.sharding import Shard

_RESIDUAL = (
    "attention.proj.weight",
    ".mla.proj.weight",
    ".fc2.weight",
    ".mamba.out_proj.weight",
    ".delta_net.out_proj.weight",
    ".short_conv.out_proj.weight",
    ".lightning.out_proj.weight",
    ".kda.out_proj.weight",
    ".latent_up.weight",
    ".layer_input.proj.weight",
)


def initialize_(weights: Mapping[str, Shard], config: TransformerConfig, seed: int) -> None:
    """Fill this rank's part of a model's matrices in place.

    No communication.

    Args:
        weights: by logical name, with global layer numbers. Tensors other than matrices, and
            padding, keep their values; pieces on the meta device are skipped.
        config: standard deviations and depth.
        seed: of the whole model, equal on all ranks.
    """
    matrices = []
    for name, shard in weights.items():
        if any(piece.data.is_meta for piece in shard.pieces):
            continue
        mixers = "mamba", "delta_net", "short_conv", "kda"
        is_recurrent = any(f".{mixer}." in name for mixer in mixers)
        if is_recurrent and _fill_recurrent_(name, shard, config, seed):
            continue
        if len(shard.shape) > 1 and not name.endswith("norm.weight"):
            matrices.append((name, shard, initial_std(name, config)))
    fill_shards_(matrices, seed=seed)


def initial_std(name: str, config: TransformerConfig) -> float:
    """Return the standard deviation of a logical matrix by its name."""
    if name in TABLES:
        return config.embedding_init_method_std or config.init_method_std
    std = config.init_method_std * spread_factor(name, config)
    is_residual = name.endswith(_RESIDUAL) and ".shared.block." not in name
    return std / math.sqrt(num_halves(config)) if is_residual else std


def _fill_recurrent_(name: str, shard: Shard, config: TransformerConfig, seed: int) -> bool:
    """Fill the special tensors of a recurrent layer; return False for other tensors."""
    if ".conv1d." in name and name.endswith(".weight"):
        scale = math.sqrt(shard.shape[-1])
        for piece, uniform in _uniform(name, shard, seed):
            piece.copy_((2 * uniform - 1) / scale)
    elif name.endswith(".A_log"):
        least = 1.0 if ".mamba." in name else 0.01
        for piece, uniform in _uniform(name, shard, seed):
            piece.copy_((least + (16 - least) * uniform).log())
    elif name.endswith((".mamba.dt_bias", ".kda.dt_bias")):
        low, high = math.log(config.mamba_dt_min), math.log(config.mamba_dt_max)
        for piece, uniform in _uniform(name, shard, seed):
            step = (low + (high - low) * uniform).exp().clamp(min=config.mamba_dt_init_floor)
            piece.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus
    else:
        return False
    return True


def _uniform(name: str, shard: Shard, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece with values of U(0, 1), float64; overwrites the pieces.

    The values are the normal distribution function of normal values, which are rounded to the
    pieces' dtype first.
    """
    fill_shards_([(name, shard, 1.0)], seed=seed)
    for piece in shard.pieces:
        yield piece.data, torch.special.ndtr(piece.data.double())
