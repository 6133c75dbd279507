"""The file of ``--data-mixture-path``: phases of a mixture that changes during a run.

    [{"from_sample": 0, "data_path": ["0.7", "code", "0.3", "books"]},
     {"from_step": 1000, "data_path": ["0.2", "code", "0.8", "math"]}]

Every source is one stream in an order of its own. A phase takes from the streams where the
one before left them, so a change loses no sample and repeats none; what each source has
given by any sample is a count (``OrderedBlend.ledger``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_data.datasets.blending import OrderedBlend, draw_phases
from mcore_data.datasets.data_paths import read_json
from mcore_data.datasets.epochs import EpochsDataset


@dataclass(frozen=True, slots=True)
class Mixture:
    """Phases over one list of sources.

    Attributes:
        prefixes: of all sources, in the order in which they first appear.
        phases: (first sample, weights of all sources) in turn.
    """

    prefixes: tuple[str, ...]
    phases: tuple[tuple[int, tuple[float, ...]], ...]


def read_mixture(
    path: str | Path,
    parse: Callable[[list[str]], Any],
    samples_before: Callable[[int], int] | None = None,
) -> Mixture:
    """Read the phases of a mixture.

    Args:
        path: the JSON file.
        parse: reads the words of a ``data_path``; gives ``prefixes`` and ``weights``.
        samples_before: samples that a run has used before a step, for ``from_step``.

    Raises:
        ValueError: if the file is no list of phases, a phase has no weights, or it begins at
            a step where only samples are known.
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
        blend = parse([str(word) for word in entry["data_path"]])
        if blend.weights is None:
            raise ValueError(
                f"--data-mixture-path {path}: give a weight before each prefix of a phase."
            )
        blends.append(blend)
        if "from_sample" in entry:
            begins.append(int(entry["from_sample"]))
        elif samples_before is None:
            raise ValueError(
                f"--data-mixture-path {path}: steps are known in training only; give "
                "from_sample."
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
    """Whether a phase of the file begins at a step, so that batch sizes place it."""
    entries = read_json("--data-mixture-path", path)
    return any("from_step" in entry for entry in entries)


def build_mixture(
    mixture: Mixture, build_epoch: Callable[[str, int], Any], size: int
) -> OrderedBlend:
    """Mix the sources as the phases say.

    Args:
        mixture: the phases.
        build_epoch: makes one epoch of one source, from its prefix and the epoch's number.
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
    """Builds epochs of one source; travels to loader processes."""

    build_epoch: Callable[[str, int], Any]
    prefix: str

    def __call__(self, epoch: int) -> Any:
        return self.build_epoch(self.prefix, epoch)
