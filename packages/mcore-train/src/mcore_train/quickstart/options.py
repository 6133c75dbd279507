"""Options of ``mcore-train quickstart``: where, how long, and under which layout."""

from dataclasses import dataclass, field
from typing import Literal

from mcore_base.options import Options, option
from mcore_parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TourConfig(Options):
    """The tour from a book's text to a paragraph."""

    output: str = "runs/quickstart"
    """Folder for everything that the tour writes. A tour of the same options that was stopped
    there continues; any other that is there is deleted."""
    steps: int = option(1000, minimum=20, hint="Fewer leave nothing to resume and end.")
    """Training steps of 2048 tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where present."""
    seed: int = option(1234, minimum=0, below=2**32)
    """Seed of the held-out chapters, the weights, the data order and the writing."""
    num_words: int = option(300, minimum=1)
    """Words to write at the end."""
    nproc: int = option(0, minimum=0)
    """Ranks to start on this host; 0: this process alone, or what torchrun started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartConfig:
    """Options of the tour and of its layout."""

    tour: TourConfig = field(default_factory=TourConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
