"""nccl settings by axis: number of multiprocessors that collectives take from GEMMs.

A collective during backward runs on multiprocessors that GEMMs could use. Gradient reductions
over data ranks have all of backward to finish and need few multiprocessors; tensor ranks wait
for every reduction and need all. So each axis may have its own table in a TOML file::

    [dp_cp]
    max_ctas = 8

An axis with a table gets its own group even if another axis has the same ranks, since nccl's
settings belong to a communicator. On gloo the settings have no effect.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

FLAG = "--nccl-communicator-config-path"
TABLES = {
    "dp_cp": ("cp_dp", "optimizer_shard"),
    "expert_dp": ("expert_dp", "expert_optimizer_shard"),
    "pp": ("pp", "pp_back"),
}
"""Tables that hold for several axes: the data ranks and their optimizer shards, and both
directions of the pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """Settings of one nccl communicator; 0 keeps nccl's default."""

    min_ctas: int = 0
    """Smallest number of thread blocks, each on one multiprocessor, of a collective."""
    max_ctas: int = 0
    """Largest number of thread blocks of a collective."""
    cga_cluster_size: int = 0
    """Thread blocks in a cluster."""

    def options(self) -> Any:
        """Build torch's options for an nccl group."""
        options = dist.ProcessGroupNCCL.Options()
        for field in fields(self):
            if value := getattr(self, field.name):
                setattr(options.config, field.name, value)
        return options


def read_communicators(path: str, axes: Mapping[str, object]) -> dict[str, Communicator]:
    """Read a settings file; return the settings by axis; no communication.

    A table of the data ranks, ``dp_cp`` or ``expert_dp``, also holds for the shards of their
    optimizer, and ``pp`` for ``pp_back``, unless these axes have their own tables.

    Raises:
        ValueError: if the file is missing or not TOML, or has an unknown axis or setting, or a
            count below 1.
    """
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{FLAG} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{FLAG} {path} is not TOML: {error}.") from error
    axes_of_tables = {name: (name,) for name in axes} | TABLES
    communicators: dict[str, Communicator] = {}
    # Tables of several axes first, so that a table of a single axis overrides them.
    for name in sorted(tables, key=lambda name: name not in TABLES):
        if name not in axes_of_tables:
            raise ValueError(f"{FLAG} {path}: no axis {name}; use {', '.join(axes_of_tables)}.")
        communicator = _communicator(f"{FLAG} {path}: [{name}]", tables[name])
        communicators |= dict.fromkeys(axes_of_tables[name], communicator)
    return communicators


def _communicator(where: str, table: Any) -> Communicator:
    settings = [field.name for field in fields(Communicator)]
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table of {', '.join(settings)}.")
    for name, value in table.items():
        if name not in settings:
            raise ValueError(
                f"{where} sets {name}, which is unknown: use {', '.join(settings)}."
            )
        if type(value) is not int or value < 1:
            raise ValueError(f"{where} sets {name} = {value!r}: it must be 1 or more.")
    communicator = Communicator(**table)
    least, most = communicator.min_ctas, communicator.max_ctas
    if most and least > most:
        raise ValueError(f"{where} sets min_ctas {least} above max_ctas {most}.")
    return communicator
