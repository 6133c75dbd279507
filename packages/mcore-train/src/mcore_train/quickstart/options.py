"""Options of ``mcore-train quickstart``: where, how long, and under which layout."""

from dataclasses import dataclass, field
from typing import Literal

from mcore_parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TourConfig:
    """The tour from a book's text to a paragraph."""

    output: str = "runs/quickstart"
    """Folder for everything that the tour writes. A tour of the same options that was stopped
    there continues; any other that is there is deleted."""
    steps: int = 1000
    """Training steps of 2048 tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where present."""
    seed: int = 1234
    """Seed of the held-out chapters, the weights, the data order and the writing."""
    num_words: int = 300
    """Words to write at the end."""
    nproc: int = 0
    """Ranks to start on this host; 0: this process alone, or what torchrun started."""

    def __post_init__(self) -> None:
        if self.steps < 20:
            raise ValueError(f"--steps {self.steps}: at least 20 are needed to resume and end.")
        if self.num_words < 1 or self.nproc < 0 or self.seed < 0:
            raise ValueError("--num-words must be 1 or more, --nproc and --seed 0 or more.")
        if self.seed >= 2**32:
            raise ValueError(f"--seed {self.seed} must be below 2^32 = {2**32}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartConfig:
    """Options of the tour and of its layout."""

    tour: TourConfig = field(default_factory=TourConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
