"""``mcore-train schedule show``: a pipeline schedule as a picture, with its bubble."""

from dataclasses import dataclass, field
from pathlib import Path

from mcore_parallel.config import PipelineConfig
from mcore_parallel.schedule import build_schedule
from mcore_parallel.simulator import simulate
from mcore_parallel.timeline import timeline_svg, timeline_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig:
    """What to draw, and where to."""

    ranks: int = 4
    """Pipeline ranks, as --pipeline-model-parallel-size in training."""
    microbatches: int = 8
    """Micro-batches of one step."""
    output: str = ""
    """SVG file to write; empty: only the text."""

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: with the flag to change.
        """
        if self.ranks < 1 or self.microbatches < 1:
            raise ValueError("--ranks and --microbatches must be 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Options of ``schedule show``."""

    view: ViewConfig = field(default_factory=ViewConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


def draw_schedule(config: ScheduleConfig) -> str:
    """Draw a schedule as text and, if asked for, into an SVG file.

    Raises:
        ValueError: if the schedule does not take so many ranks and micro-batches.
    """
    view = config.view
    schedule = build_schedule(config.pipeline, view.ranks, view.microbatches)
    simulation = simulate(
        schedule,
        num_microbatches=view.microbatches,
        num_chunks=config.pipeline.num_virtual_stages_per_pipeline_rank,
    )
    if view.output:
        Path(view.output).write_text(timeline_svg(simulation), encoding="utf-8")
    return timeline_text(simulation)
