"""How many multiprocessors nccl may take from the GEMMs that run at the same time, by axis.

A collective under backward runs on multiprocessors that GEMMs would use. Data ranks have a
whole backward to sum gradients in and need few; tensor ranks wait for every sum and need all.
So each axis has its own counts, from a TOML file with one table for each::

    [dp_cp]
    max_ctas = 8

An axis with a table gets a separate group even where another axis has the same ranks, since
nccl's counts belong to a communicator. On gloo the counts have no effect.
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
"""Tables of several axes: data ranks and their cut by the distributed optimizer, both ways of
the pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """Settings of one nccl communicator; 0 keeps nccl's default."""

    min_ctas: int = 0
    """Least blocks, each on a multiprocessor, that a collective runs on."""
    max_ctas: int = 0
    """Most of them."""
    cga_cluster_size: int = 0
    """Blocks in a cluster."""

    def options(self) -> Any:
        """Build the options that torch makes an nccl group with."""
        options = dist.ProcessGroupNCCL.Options()
        for field in fields(self):
            if value := getattr(self, field.name):
                setattr(options.config, field.name, value)
        return options


def read_communicators(path: str, axes: Mapping[str, object]) -> dict[str, Communicator]:
    """Read the settings of some axes; no communication.

    A table of the data ranks, ``dp_cp`` or ``expert_dp``, also holds for the shards of their
    optimizer, and ``pp`` for ``pp_back``, unless these have tables too.

    Raises:
        ValueError: if the file is missing or no TOML, or names an axis or a setting that is
            not known, or a count below 1; says which.
    """
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{FLAG} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{FLAG} {path} is not TOML: {error}.") from error
    known = {name: (name,) for name in axes} | TABLES
    found: dict[str, Communicator] = {}
    for name in sorted(tables, key=lambda name: name not in TABLES):
        if name not in known:
            raise ValueError(f"{FLAG} {path}: no axis {name}; there are {', '.join(known)}.")
        one = _communicator(f"{FLAG} {path}: [{name}]", tables[name])
        found |= dict.fromkeys(known[name], one)
    return found


def _communicator(where: str, table: Any) -> Communicator:
    known = [field.name for field in fields(Communicator)]
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table of {', '.join(known)}.")
    for name, value in table.items():
        if name not in known:
            raise ValueError(f"{where} says {name}; known are {', '.join(known)}.")
        if type(value) is not int or value < 1:
            raise ValueError(f"{where} says {name} = {value!r}: it must be 1 or more.")
    one = Communicator(**table)
    if one.max_ctas and one.min_ctas > one.max_ctas:
        raise ValueError(f"{where} says min_ctas {one.min_ctas} above max_ctas {one.max_ctas}.")
    return one
