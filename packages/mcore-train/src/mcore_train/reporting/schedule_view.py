"""``mcore-train schedule show``: draws a pipeline schedule with its bubble."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from mcore_base.command_line import FaultCollector, canonical, is_flag
from mcore_base.destinations import check_file
from mcore_base.options import Options, option
from mcore_parallel.pipeline_parallel.actions import DURATIONS, Action
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.search import Costs, search_schedules, search_table
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.stages import Placement, build_stages
from mcore_parallel.pipeline_parallel.timeline import timeline_svg, timeline_text
from mcore_train.options.parsing import LAYERS_PER_STAGE, take_all, virtual_stages

MEGATRONS = {
    "--pipeline-model-parallel-size": "--ranks",
    "--num-layers": "--layers",
    "--num-microbatches": "--microbatches",
}
"""Options of ``schedule show`` for the flags of a run."""

SPLITTING = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options that assign layers to stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig(Options):
    """Size of the schedule, and the output file."""

    ranks: int = option(4, minimum=1)
    """Pipeline ranks, as --pipeline-model-parallel-size in training."""
    microbatches: int = option(8, minimum=1)
    """Micro-batches of one step."""
    layers: int = option(0, minimum=0, zero="leave out")
    """Layers of the model, as --num-layers in training: the time of a stage is then
    proportional to its number of layers; 0: all stages take the same time."""
    output: str = ""
    """SVG file to write, with the suffix .svg; empty: only text is printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowConfig:
    """Options of ``schedule show``."""

    view: ViewConfig = field(default_factory=ViewConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


def view_words(words: Sequence[str]) -> list[str]:
    """Translate the flags of a run to options of ``schedule show``."""
    pairs = (word.partition("=") if is_flag(word) else (word, "", "") for word in words)
    flags = [each for name, _, value in pairs for each in (canonical(name), value) if each]
    faults = FaultCollector()
    flags, per_stage = take_all(flags, LAYERS_PER_STAGE, faults)
    faults.raise_all()
    if per_stage:
        values = {MEGATRONS.get(name, name): value for name, value in pairwise(flags)}
        layers = values.get("--layers", "")
        ranks = values.get("--ranks", str(ViewConfig().ranks))
        sizes = {
            "num_layers": int(layers) if layers.isdecimal() else None,
            "pipeline_model_parallel_size": int(ranks) if ranks.isdecimal() else 1,
        }
        stages = virtual_stages(sizes, per_stage[-1])
        flags += ["--num-virtual-stages-per-pipeline-rank", str(stages)]
    return [MEGATRONS.get(word, word) for word in flags]


def draw_schedule(config: ShowConfig) -> str:
    """Draw a schedule as text and, with ``--output``, into an SVG file.

    Raises:
        ValueError: if the schedule does not support the numbers of ranks and micro-batches, the
            layers cannot be divided into the stages, or the output cannot be written or has
            another suffix.
    """
    view = config.view
    if view.output and Path(view.output).suffix.lower() != ".svg":
        raise ValueError(f"--output {view.output} must be an SVG file: use the suffix .svg.")
    if view.output:
        check_file("--output", view.output)
    table = ""
    if config.pipeline.pipeline_schedule == "auto":
        config, table = _choose(config)
    schedule = build_schedule(config.pipeline, view.ranks, view.microbatches)
    simulation = simulate(
        schedule,
        num_microbatches=view.microbatches,
        num_chunks=config.pipeline.num_chunks,
        v_shaped=config.pipeline.v_shaped,
        durations=_durations(config),
    )
    if view.output:
        Path(view.output).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(view.output).write_text(timeline_svg(simulation), encoding="utf-8")
    return table + timeline_text(simulation)


def _choose(config: ShowConfig) -> tuple[ShowConfig, str]:
    """Replace auto by the fastest schedule, without regard to memory; return the table too."""
    view = config.view
    candidates = search_schedules(
        config.pipeline,
        view.layers or 12 * view.ranks,  # which 2, 3 and 4 stages a rank share evenly
        view.ranks,
        view.microbatches,
        Costs(layer=DURATIONS, loss=dict.fromkeys(DURATIONS, 0.0)),
        lambda _: 0,
    )
    if candidates[0].problem:
        raise ValueError(candidates[0].problem)
    table = search_table(candidates, with_memory=False)
    return replace(config, pipeline=candidates[0].pipeline), f"{table}\n"


def _durations(config: ShowConfig) -> Callable[[int, Action], float]:
    """Return the duration of an action on a rank, proportional to the stage's layers."""
    view, pipeline = config.view, config.pipeline
    if not view.layers:
        splitting = [name.replace("_", "-") for name in SPLITTING if getattr(pipeline, name)]
        if splitting:
            raise ValueError(f"--{splitting[0]} splits layers: give their number by --layers.")
        return lambda _, action: DURATIONS[action.kind]
    stages = build_stages(pipeline, view.layers, view.ranks)
    # A stage of embedding or loss alone is drawn as half a layer.
    shares = [max(0.5, len(stage.layers) + stage.num_mtp_layers) for stage in stages]
    places = Placement(view.ranks, pipeline.num_chunks, pipeline.v_shaped)
    return lambda rank, action: (
        DURATIONS[action.kind] * shares[places.stage(rank, action.chunk)]
    )
