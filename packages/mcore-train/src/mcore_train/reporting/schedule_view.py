"""``mcore-train schedule show``: a pipeline schedule as a picture, with its bubble."""

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
"""What a run's flags are called where only its schedule is looked at."""

SPLITTING = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options that say which stage holds which layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig(Options):
    """What to draw, and where to."""

    ranks: int = option(4, minimum=1)
    """Pipeline ranks, as --pipeline-model-parallel-size in training."""
    microbatches: int = option(8, minimum=1)
    """Micro-batches of one step."""
    layers: int = option(0, minimum=0, zero="leave out")
    """Layers of the model, as --num-layers in training: a stage then takes as long as it has
    layers; 0: all stages take the same time."""
    output: str = ""
    """SVG file to write, which ends in .svg; empty: only the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowConfig:
    """Options of ``schedule show``."""

    view: ViewConfig = field(default_factory=ViewConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


def view_words(words: Sequence[str]) -> list[str]:
    """Spell what flags of a run say of its schedule as options of ``schedule show``."""
    pairs = (word.partition("=") if is_flag(word) else (word, "", "") for word in words)
    found = [each for name, _, value in pairs for each in (canonical(name), value) if each]
    faults = FaultCollector()
    found, per_stage = take_all(found, LAYERS_PER_STAGE, faults)
    faults.raise_all()
    if per_stage:
        given = {MEGATRONS.get(name, name): value for name, value in pairwise(found)}
        layers, ranks = given.get("--layers", ""), given.get("--ranks", str(ViewConfig().ranks))
        sizes = {
            "num_layers": int(layers) if layers.isdecimal() else None,
            "pipeline_model_parallel_size": int(ranks) if ranks.isdecimal() else 1,
        }
        stages = virtual_stages(sizes, per_stage[-1])
        found += ["--num-virtual-stages-per-pipeline-rank", str(stages)]
    return [MEGATRONS.get(word, word) for word in found]


def draw_schedule(config: ShowConfig) -> str:
    """Draw a schedule as text and, with ``--output``, into an SVG file.

    Raises:
        ValueError: if the schedule does not take so many ranks and micro-batches, the layers
            do not divide into these stages, or the file cannot be written or is named as
            another kind of picture.
    """
    view = config.view
    if view.output and Path(view.output).suffix.lower() != ".svg":
        raise ValueError(f"--output {view.output} is written as SVG: end its name in .svg.")
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
    """Put the fastest schedule in the place of auto; without a model memory does not count."""
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
    """Return how long a rank computes for an action: in proportion to its stage's layers."""
    view, pipeline = config.view, config.pipeline
    if not view.layers:
        splitting = [name.replace("_", "-") for name in SPLITTING if getattr(pipeline, name)]
        if splitting:
            raise ValueError(f"--{splitting[0]} splits layers: say how many, by --layers.")
        return lambda _, action: DURATIONS[action.kind]
    stages = build_stages(pipeline, view.layers, view.ranks)
    # A stage of embedding or loss alone is drawn as half a layer.
    shares = [max(0.5, len(stage.layers) + stage.num_mtp_layers) for stage in stages]
    places = Placement(view.ranks, pipeline.num_chunks, pipeline.v_shaped)
    return lambda rank, action: (
        DURATIONS[action.kind] * shares[places.stage(rank, action.chunk)]
    )
