"""Reads ``--data-mixture-path``: the phases of a mixture that changes during a run.

    [{"from_sample": 0, "data_path": ["0.7", "code", "0.3", "books"]},
     {"from_step": 1000, "data_path": ["0.2", "code", "0.8", "math"]}]

Every source is a stream in a fixed order. Each phase continues the streams where the phase
before ended, so no sample is lost or repeated at a change. ``OrderedBlend.ledger`` counts how
many samples each source has given up to any sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_data.datasets.blending import OrderedBlend, draw_phases
from mcore_data.datasets.data_paths import parse_blend, read_json
from mcore_data.datasets.epochs import EpochsDataset


@dataclass(frozen=True, slots=True)
class Mixture:
    """Phases over one list of sources.

    Attributes:
        prefixes: prefixes of all sources, in the order in which they first appear.
        phases: (first sample, weights of all sources) of each phase.
    """

    prefixes: tuple[str, ...]
    phases: tuple[tuple[int, tuple[float, ...]], ...]


def read_mixture(
    path: str | Path, samples_before: Callable[[int], int] | None = None
) -> Mixture:
    """Read the phases of a mixture.

    Args:
        path: the JSON file.
        samples_before: maps a step to the samples used before it, for ``from_step``.

    Raises:
        ValueError: if the file is not a list of phases, a phase has no weights, or a phase has
            ``from_step`` and ``samples_before`` is None.
    """
    entries = read_json("--data-mixture-path", path)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"--data-mixture-path {path}: give a list of phases.")
    begins, blends = [], []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(
                f"--data-mixture-path {path}: a phase is an object, not {entry!r}."
            )
        unknown = set(entry) - {"from_sample", "from_step", "data_path"}
        if unknown or "data_path" not in entry or len(entry) != 2:
            raise ValueError(
                f"--data-mixture-path {path}: a phase has data_path and either from_sample or "
                f"from_step, not {sorted(entry)}."
            )
        blend = parse_blend([str(word) for word in entry["data_path"]])
        if blend.weights is None:
            raise ValueError(
                f"--data-mixture-path {path}: give a weight before each prefix of a phase."
            )
        blends.append(blend)
        if "from_sample" in entry:
            begins.append(int(entry["from_sample"]))
        elif samples_before is None:
            raise ValueError(
                f"--data-mixture-path {path}: from_step needs the batch sizes of a training "
                "run; give from_sample."
            )
        else:
            begins.append(samples_before(int(entry["from_step"])))
    prefixes = tuple(dict.fromkeys(p for blend in blends for p in blend.prefixes))
    phases = []
    for begin, blend in zip(begins, blends, strict=True):
        shares = dict.fromkeys(prefixes, 0.0)
        for prefix, weight in zip(blend.prefixes, blend.weights, strict=True):
            shares[prefix] += weight
        phases.append((begin, tuple(shares.values())))
    return Mixture(prefixes, tuple(phases))


def begins_at_steps(path: str | Path) -> bool:
    """Whether a phase begins at a step, so that the order depends on batch sizes."""
    entries = read_json("--data-mixture-path", path)
    return any("from_step" in entry for entry in entries)


def build_mixture(
    mixture: Mixture, build_epoch: Callable[[str, int], Any], size: int
) -> OrderedBlend:
    """Build the dataset that mixes the sources by phases.

    Args:
        mixture: the phases.
        build_epoch: builds one epoch of a source from the source's prefix and the epoch.
        size: samples of the mixture.

    Raises:
        ValueError: if the phases do not begin at 0 and rise.
    """
    dataset_index, sample_index = draw_phases(mixture.phases, size)
    taken = [int((dataset_index == number).sum()) for number in range(len(mixture.prefixes))]
    datasets = [
        EpochsDataset(_OneSource(build_epoch, prefix), count)
        for prefix, count in zip(mixture.prefixes, taken, strict=True)
    ]
    return OrderedBlend(datasets, dataset_index, sample_index)


@dataclass(frozen=True, slots=True)
class _OneSource:
    """Builds epochs of one source; a class, so that loader processes can unpickle it."""

    build_epoch: Callable[[str, int], Any]
    prefix: str

    def __call__(self, epoch: int) -> Any:
        return self.build_epoch(self.prefix, epoch)
