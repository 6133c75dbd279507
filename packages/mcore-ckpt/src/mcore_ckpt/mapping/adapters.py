"""Merges low-rank adapters into the weights of their base model, by rows.

For ``...qkv.q.weight`` of its base model, a checkpoint of adapters holds
``...qkv.adapter.q.lora_A.weight`` and ``lora_B.weight``, and for DoRA
``lora_magnitude_vector``. LoRA's weight is V = W + s B A; DoRA's is V with each row scaled to
its magnitude. A row of the result needs one row of W and B and all of A, so that only A is held
in memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_base.stores import as_path
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.files import DTYPES
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.paths import resolve_folder

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_MODULE = ".adapter."
_FUSED = ("qkv", "kv", "fc1", "in_proj")
"""Fused linears: their parts are logical tensors, whose adapters are named below the linear."""


def is_adapter(name: str) -> bool:
    """Whether a logical tensor belongs to an adapter."""
    return _MODULE in name


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter's tensor changes."""
    for kind in (A, B, MAGNITUDE):
        if name.endswith(f".{kind}"):
            return name.removesuffix(kind).replace(_MODULE, ".", 1) + "weight"
    raise CheckpointError(f"{name} is not a tensor of a LoRA or DoRA adapter")


def adapter_name(weight: str, kind: str) -> str:
    """Return the name of an adapter's tensor of one kind; inverse of ``adapted_weight``."""
    words = weight.removesuffix(".weight").split(".")
    position = len(words)
    if "experts" in words:
        position = words.index("experts") + 1
    elif words[-2] in _FUSED:
        position -= 1
    return ".".join([*words[:position], _MODULE.strip("."), *words[position:], kind])


def group_adapters(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group adapters' tensors by the weight that they change, and by kind."""
    by_weight: dict[str, dict[str, str]] = {}
    for name in names:
        if is_adapter(name):
            weight = adapted_weight(name)
            stem = name.split(_MODULE)[1]
            kind = next(kind for kind in (A, B, MAGNITUDE) if stem.endswith(kind))
            by_weight.setdefault(weight, {})[kind] = name
    return by_weight


def find_base(folder: Any, adapter: Mapping[str, Any]) -> str:
    """Return the folder of the adapters' base model; ValueError if it cannot be read."""
    base = adapter["base"]
    try:
        resolve_folder(as_path(base))
    except ValueError as error:
        raise ValueError(
            f"{folder} holds adapters of the model in {base}, which cannot be read ({error}): "
            "restore that folder."
        ) from None
    return base


class MergedTensors:
    """A model's tensors with its adapters merged."""

    def __init__(
        self,
        base: Rows,
        adapters: Rows,
        config: Mapping[str, Any],
        replaced: Rows | None = None,
    ) -> None:
        """Match adapters with weights; values are read later.

        Args:
            base: tensors of the base model, by logical name.
            adapters: tensors of the adapters, by logical name.
            config: rank and factor, as in the index of adapters.
            replaced: tensors that replace the base's, by logical name.
        """
        self._base, self._adapters, self._replaced = base, adapters, replaced
        if replaced is None and adapters is not base:
            self._replaced = adapters  # tables of --modules-to-save
        self._scale = config["lora_alpha"] / config["lora_dim"]
        self._by_weight = group_adapters(adapters.entries)
        self.entries: dict[str, TensorEntry] = {
            name: replace(entry, chunks=()) if name in self._by_weight else entry
            for name, entry in base.entries.items()
            if not is_adapter(name)
        }
        for name, entry in (self._replaced.entries if self._replaced else {}).items():
            if not is_adapter(name):
                self.entries[name] = replace(entry, dtype=base.entries[name].dtype)
        if unmatched := sorted(self._by_weight.keys() - self.entries.keys()):
            raise ValueError(f"the adapters change {unmatched[0]}, which the base model lacks.")

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows of the base and add their adapter's rows, in float32 or wider."""
        if self._replaced is not None and name in self._replaced.entries:
            trained = self._replaced.rows(name, begin, stop)
            return trained.to(DTYPES[self.entries[name].dtype])
        rows = self._base.rows(name, begin, stop)
        if name not in self._by_weight:
            return rows
        names = self._by_weight[name]
        wide = torch.promote_types(rows.dtype, torch.float32)
        down = self._whole(names[A]).to(wide)
        up = self._adapters.rows(names[B], begin, stop).to(wide)
        total = rows.to(wide) + self._scale * (up @ down)
        if MAGNITUDE in names:
            wanted = self._adapters.rows(names[MAGNITUDE], begin, stop).to(wide)
            total *= (wanted / total.norm(dim=1))[:, None]
        return total.to(rows.dtype)

    def _whole(self, name: str) -> Tensor:
        return self._adapters.rows(name, 0, self._adapters.entries[name].shape[0])
