"""Functions that attach adapters to the linears of a model, initialize and merge them.

An adapter is a submodule of its linear named ``adapter``, which a forward hook calls. The
linear's own parameters keep their names, so that a checkpoint of the model loads with or
without adapters.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.peft.config import ADAPTER, PeftConfig
from mcore_models.peft.experts import ExpertsAdapter
from mcore_models.peft.lora import A_NAME, LinearAdapter, build_adapter
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.latent import LatentProjection
from mcore_parallel.rng import RngStreams, fill_parameter_
from mcore_parallel.sharding import Shard, named_parameters, named_shards, shards_of
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_LINEARS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, LatentProjection)


def attach_adapters(
    model: nn.Module, config: PeftConfig, *, streams: RngStreams, seed: int = 1234
) -> None:
    """Freeze a model, or one of its stages, and attach adapters to its linears, in place.

    Tables of ``modules_to_save`` are not frozen. The model's function is unchanged, as B is
    zero. A is drawn from U(-1, 1) / sqrt(width), equal under every layout. With ``dora``,
    magnitudes are set to the row lengths of the present weights, all-reduced over the ranks
    that share columns; call ``start_magnitudes`` again after loading other weights.

    Args:
        model: before ``DataParallel``; parameters on the meta device stay there.
        config: targets and rank.
        streams: random streams of dropout.
        seed: of A, equal on all ranks.

    Raises:
        ValueError: if ``peft`` is none, or ``dora`` targets routed experts.
    """
    if config.peft == "none":
        raise ValueError("--peft none does not add adapters: use lora or dora.")
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if "blocks" not in path.split("."):
            continue
        if isinstance(module, _LINEARS):
            _attach(module, path, config, streams)
        elif isinstance(module, Experts):
            _attach_to_experts(module, path, config, streams)
    for named in named_parameters(model):
        if all(part.name in config.tables for part in named.layout.parts):
            named.parameter.requires_grad_(True)
    _fill(model, seed)
    start_magnitudes(model)


def start_magnitudes(model: nn.Module, weights: Mapping[str, Shard] | None = None) -> None:
    """Set DoRA's magnitudes to the lengths of the weights' rows, after weights are loaded.

    All-reduces the lengths over the ranks that share columns.

    Args:
        model: with adapters; weights of adapted linears are split over tensor ranks only.
        weights: this rank's part of the model by logical name, if data ranks shard it
            (``GradientSync.weight_shards``); default: the model's own parameters.
    """
    weights = named_shards(model) if weights is None else weights
    named = {id(each.parameter): each for each in named_parameters(model)}
    for linear, adapter in adapted_linears(model):
        if adapter.magnitude is None or adapter.magnitude.is_meta:
            continue
        lengths = adapter.row_lengths(linear.weight)
        for name, shard in shards_of([(named[id(adapter.magnitude)], lengths)]).items():
            targets = weights[name].pieces if name in weights else ()
            for source, target in product(shard.pieces, targets):
                begin = target.offsets[0] - source.offsets[0]
                if 0 <= begin <= begin + target.lengths[0] <= source.lengths[0]:
                    target.data.copy_(source.data[begin : begin + target.lengths[0]])


def merge_adapters(model: nn.Module) -> None:
    """Add every adapter to its linear's weight and remove the adapter, in place.

    The model's function is unchanged up to rounding, without the adapters' cost. The weights
    remain frozen.

    Raises:
        ValueError: if experts have adapters: use ``mcore-ckpt convert``.
    """
    for path, module in model.named_modules():
        if isinstance(module, ExpertsAdapter):
            raise ValueError(
                f"{path}: adapters of experts cannot be merged in memory: save them, and merge "
                "the checkpoint by mcore-ckpt convert."
            )
    for linear, adapter in adapted_linears(model):
        with torch.no_grad():
            linear.weight.copy_(adapter.merged(linear.weight))
        _remove(linear)


def adapted_linears(model: nn.Module) -> list[tuple[Any, LinearAdapter]]:
    """Return the linears that have adapters, each with its adapter."""
    pairs = [(module, getattr(module, ADAPTER, None)) for module in model.modules()]
    return [
        (linear, adapter) for linear, adapter in pairs if isinstance(adapter, LinearAdapter)
    ]


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which models compute without their adapters; no communication."""
    kinds = LinearAdapter, ExpertsAdapter
    adapters = [each for model in models for each in model.modules() if isinstance(each, kinds)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


class _AddAdapter:
    """Forward hook of a linear that adds its adapter's output."""

    def __call__(self, linear: Any, arguments: tuple[Tensor, ...], y: Tensor) -> Tensor:
        if not linear.adapter.is_on:
            return y
        bias = getattr(linear, "bias", None)
        return linear.adapter(arguments[0], y, linear.weight, bias)


def _attach(module: Any, path: str, config: PeftConfig, streams: RngStreams) -> None:
    names = [part.name.removesuffix("weight") for part in module.layouts()["weight"].parts]
    is_adapted = [config.is_target(f"{path}.{name}".removesuffix(".")) for name in names]
    if any(is_adapted):
        module.add_module(ADAPTER, build_adapter(module, is_adapted, config, streams))
        module.register_forward_hook(_AddAdapter())


def _attach_to_experts(
    experts: Experts, path: str, config: PeftConfig, streams: RngStreams
) -> None:
    matrices = ("fc1.gate", "fc1.up", "fc2") if experts.network.gated else ("fc1", "fc2")
    is_adapted = []
    for matrix in matrices:
        chosen = [config.is_target(f"{path}.{e}.{matrix}") for e in range(experts.num_experts)]
        if len(set(chosen)) > 1:
            raise ValueError(
                f"--lora-target-modules {' '.join(config.lora_target_modules)} matches some "
                f"experts of {path} but not all: use patterns that match all experts or none."
            )
        is_adapted.append(chosen[0])
    if not any(is_adapted):
        return
    if config.peft == "dora":
        raise ValueError(
            "--peft dora does not support routed experts: use lora, or other "
            "--lora-target-modules."
        )
    experts.adapter = ExpertsAdapter(experts, is_adapted, config, streams=streams)


def _remove(linear: nn.Module) -> None:
    delattr(linear, ADAPTER)
    hooks = linear._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _AddAdapter)]:
        del hooks[key]


def _fill(model: nn.Module, seed: int) -> None:
    """Fill A like torch a linear's weight: uniform in +-1 / sqrt(width of the input)."""
    for named in named_parameters(model):
        part = named.layout.parts[0]
        if named.parameter.is_meta or not part.name.endswith(f".{A_NAME}"):
            continue
        fill_parameter_(named, seed=seed, std=1.0)
        uniform = torch.special.ndtr(named.parameter.detach().double())
        with torch.no_grad():
            named.parameter.copy_((2 * uniform - 1) / math.sqrt(part.shape[1]))
