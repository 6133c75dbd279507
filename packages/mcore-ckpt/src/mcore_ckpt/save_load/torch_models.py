"""Saves and loads any torch model with its optimizer, with or without ``fully_shard``.

Tensors are saved as shards; other optimizer state (numbers, lists, dictionaries, groups with
their learning rates) is JSON in the index. Loading creates the optimizer's state as it was
saved, so that a new optimizer needs no step first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.save_load.dtensors import tensor_shards
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_ckpt.save_load.saving import KEEP_ALL, save
from mcore_ckpt.storage.files import DTYPES
from mcore_ckpt.storage.index import Index, read_index
from mcore_ckpt.storage.paths import resolve_folder
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

_KEPT = "torch_optimizer"
"""Key of ``extra`` for optimizer state other than tensors."""


def save_torch(
    run_folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    world: Axis,
    extra: Mapping[str, Any] | None = None,
    retention: RetentionConfig = KEEP_ALL,
) -> Path:
    """Save a torch model and its optimizer as one step; returns when it is durable.

    Communicates over ``world``: all ranks call it. Tensors are named ``model.<name>`` and
    ``optimizer.<kind>.<name>``.

    Args:
        run_folder: one folder for all ranks.
        step: iteration.
        model: with or without ``fully_shard``; buffers are saved too.
        optimizer: optimizer of the model's parameters; its state and groups are saved.
        world: the ranks that hold the model, ``ParallelContext.build(...).world``.
        extra: JSON to save with the model.
        retention: which older steps are deleted.

    Raises:
        ValueError: if the optimizer holds a value other than tensors, numbers, strings, lists
            and dictionaries, or state of a parameter that the model lacks; and as ``save``.
        CheckpointError: as ``save``.
    """
    with raise_on_all_ranks(world):
        shards = tensor_shards(model.state_dict(), "model.")
        more = dict(extra or {})
        if _KEPT in more:
            raise ValueError(f"extra has an entry {_KEPT}, reserved by save_torch: rename it.")
        if optimizer is not None:
            tensors: dict[str, Tensor] = {}
            more[_KEPT] = _described(model, optimizer, tensors)
            shards |= tensor_shards(tensors)
    return save(run_folder, step, shards, world=world, extra=more, retention=retention)


def load_torch(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *, world: Axis
) -> dict[str, Any]:
    """Load a checkpoint of ``save_torch``, on any number of ranks and under any sharding.

    Communicates over ``world``. Weights are written in place; the optimizer's state and groups
    are replaced. After an error both may be partly loaded.

    Args:
        folder: a run folder for its latest step, or a step folder.
        model: model with the same parameters.
        optimizer: optimizer of the same class, new or used; None: optimizer state in the
            checkpoint is ignored.
        world: the ranks that load together.

    Returns:
        ``extra`` as it was given to ``save_torch``.

    Raises:
        ValueError: if the checkpoint holds no optimizer, or other parameters or groups; and as
            ``load``.
        CheckpointError: as ``load``.
    """
    with raise_on_all_ranks(world):
        shards = tensor_shards(model.state_dict(), "model.")
        if optimizer is not None:
            tensors: dict[str, Tensor] = {}
            _restore(model, optimizer, read_index(resolve_folder(folder)), tensors)
            shards |= tensor_shards(tensors)
    ignore = () if optimizer is not None else ("optimizer.",)
    extra = dict(load(folder, shards, world=world, ignore=ignore))
    extra.pop(_KEPT, None)
    return extra


def torch_model_shards(
    model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Shard]:
    """Describe a model, ``model.<name>``, and the tensors of its optimizer, for ``save``.

    For background saves or saves with other tensors; ``save_torch`` also keeps numbers and
    groups.

    Args:
        model: with or without ``fully_shard``.
        optimizer: its state must exist, so make one step (for example with zero gradients)
            before loading into it. Its groups (learning rates) are not described.

    Raises:
        ValueError: if the optimizer holds no state yet, state of parameters that the model
            lacks, or state that is no tensor.
    """
    shards = tensor_shards(model.state_dict(), "model.")
    if optimizer is None:
        return shards
    if not optimizer.state:
        raise ValueError(
            "the optimizer has no state to save or to load into: make one step first, or leave "
            "the optimizer out if its class never has state."
        )
    for name, state in _states(model, optimizer):
        for kind, value in state.items():
            if value is not None:
                shards |= tensor_shards({name: value}, f"optimizer.{kind}.")
    return shards


def _states(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise ValueError(
                f"the optimizer holds state of a parameter of shape {list(parameter.shape)} "
                "that is not in the model and would be lost: give the model that holds all "
                "parameters of the optimizer."
            )
        yield names[parameter], state


def _described(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return an optimizer's state and groups as JSON; add its tensors to ``tensors``."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        name: {
            kind: _packed(value, f"optimizer.{kind}", name, tensors)
            for kind, value in mine.items()
        }
        for name, mine in _states(model, optimizer)
    }
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {
            key: _packed(value, f"optimizer.group_{number}", key, tensors)
            for key, value in group.items()
            if key != "params"
        }
        members = [names.get(parameter, "") for parameter in group["params"]]
        groups.append({"params": members, "options": options})
    return {"state": state, "groups": groups}


def _packed(value: Any, path: str, name: str, tensors: dict[str, Tensor]) -> list[Any]:
    """Return a value as JSON: its kind and content; add its tensors to ``tensors``."""
    if isinstance(value, Tensor):
        if f"{path}.{name}" in tensors:
            raise ValueError(f"the optimizer holds two tensors named {path}.{name}.")
        tensors[f"{path}.{name}"] = value
        return ["tensor", f"{path}.{name}"]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    if isinstance(value, (list, tuple)):
        items = [_packed(one, f"{path}.{n}", name, tensors) for n, one in enumerate(value)]
        return ["tuple" if isinstance(value, tuple) else "list", items]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {
            key: _packed(one, f"{path}.{key}", name, tensors) for key, one in value.items()
        }
        return ["dict", items]
    raise ValueError(
        f"{path} of {name} is a {type(value).__name__}, which cannot be saved: use tensors, "
        "numbers, strings, lists and dictionaries with string keys."
    )


def _restore(
    model: nn.Module, optimizer: Optimizer, index: Index, tensors: dict[str, Tensor]
) -> None:
    """Set an optimizer's numbers from a checkpoint; add the tensors to load to ``tensors``."""
    saved_optimizer = index.extra.get(_KEPT)
    if saved_optimizer is None:
        raise ValueError(
            "the checkpoint holds no optimizer of save_torch: load without an optimizer."
        )
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
    if groups != (saved_groups := [group["params"] for group in saved_optimizer["groups"]]):
        raise ValueError(
            f"the optimizer has groups of {[len(g) for g in groups]} parameters, the "
            f"checkpoint of {[len(g) for g in saved_groups]}, or their names differ: build the "
            "optimizer with the groups of the run that saved it."
        )
    for group, saved in zip(optimizer.param_groups, saved_optimizer["groups"], strict=True):
        for key, value in saved["options"].items():
            group[key] = _unpacked(value, group.get(key), None, index, tensors)
    by_parameter = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, saved in saved_optimizer["state"].items():
        parameter = parameters[name]
        group = by_parameter[parameter]
        on_device = bool(group.get("capturable") or group.get("fused"))
        old_state = optimizer.state.get(parameter, {})
        step_device = parameter.device if on_device else torch.device("cpu")
        optimizer.state[parameter] = {
            kind: _unpacked(
                value, old_state.get(kind), (parameter, step_device), index, tensors
            )
            for kind, value in saved.items()
        }


def _unpacked(
    packed: list[Any],
    before: Any,
    place: tuple[Tensor, torch.device] | None,
    index: Index,
    tensors: dict[str, Tensor],
) -> Any:
    """Return a value from the result of ``_packed``, with tensors that ``load`` fills later.

    Args:
        packed: kind and content of the value.
        before: the current value; a tensor of the right shape is loaded in place.
        place: the parameter of the value, and the device of its step count; None: a group's
            value.
        index: index of the step.
        tensors: receives each tensor by its name in the checkpoint.
    """
    kind, content = packed
    if kind == "value":
        return content
    if kind == "dict":
        old = before if isinstance(before, dict) else {}
        return {
            key: _unpacked(one, old.get(key), place, index, tensors)
            for key, one in content.items()
        }
    if kind in ("list", "tuple"):
        olds = list(before) if isinstance(before, (list, tuple)) else []
        olds += [None] * (len(content) - len(olds))
        items = [
            _unpacked(one, old, place, index, tensors)
            for one, old in zip(content, olds, strict=False)
        ]
        return items if kind == "list" else tuple(items)
    entry = index.tensors[content]
    dtype = DTYPES[entry.dtype]
    is_alike = isinstance(before, Tensor) and before.dtype == dtype
    if not is_alike or tuple(before.shape) != entry.shape:
        before = _empty(content, entry.shape, dtype, place)
    tensors[content] = before
    return before


def _empty(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    place: tuple[Tensor, torch.device] | None,
) -> Tensor:
    if place is None:
        return torch.zeros(shape, dtype=dtype)
    parameter, steps = place
    if not shape:
        device = steps if name.startswith("optimizer.step.") else parameter.device
        return torch.zeros((), dtype=dtype, device=device)
    if tuple(parameter.shape) == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} has another shape than its sharded parameter: make one step with the "
            "optimizer first, which creates the tensor as the optimizer shards it."
        )
    return torch.zeros(shape, dtype=dtype, device=parameter.device)
