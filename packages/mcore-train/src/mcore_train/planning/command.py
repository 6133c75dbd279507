"""Runs ``mcore-train plan``: ranks the layouts of a model on a cluster."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mcore_base.command_line import FaultCollector, canonical, is_flag
from mcore_base.destinations import check_file
from mcore_ckpt.families import find_family
from mcore_models.families import Family
from mcore_train.composition import (
    FAMILY_COMMANDS,
    BertTrainConfig,
    T5TrainConfig,
    TrainConfig,
    flag_names,
)
from mcore_train.options.megatron_flags import translate
from mcore_train.options.parsing import LAYERS_PER_STAGE, parse, take_all
from mcore_train.options.recipe import read_recipe, to_flags
from mcore_train.planning.config import PlanConfig
from mcore_train.planning.documents import documents_text
from mcore_train.planning.plot import plot_svg
from mcore_train.planning.report import (
    Planned,
    chosen_row,
    explain_text,
    plan_json,
    plan_text,
    recipe_text,
)
from mcore_train.planning.search import search_layouts
from mcore_train.planning.system import INTERCONNECTS, System, find_system, read_system
from mcore_train.resolution import load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedConfig(TrainConfig):
    """All options of a run and of its plan."""

    planning: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBertConfig(BertTrainConfig):
    """All options of a run of a BERT and of its plan."""

    planning: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedT5Config(T5TrainConfig):
    """All options of a run of a T5 and of its plan."""

    planning: PlanConfig = field(default_factory=PlanConfig)


_CONFIGS: dict[str, type[TrainConfig]] = {
    "gpt": PlannedConfig,
    "mamba": PlannedConfig,
    "bert": PlannedBertConfig,
    "t5": PlannedT5Config,
}
ASSUMED_LENGTH = 4096
"""Default --seq-length of a plan, if the model has as many positions."""


def run_plan(words: Sequence[str]) -> str:
    """Run the plan command: search, write the named files, return the text to print."""
    if "--reproduce-table" in words:
        return documents_text()
    rest, files = take_all(list(words), "--calibrate", FaultCollector())
    if files:
        from mcore_train.planning.calibration import calibrate

        if rest:
            raise ValueError(f"plan --calibrate takes no other options: leave out {rest[0]}.")
        return calibrate(Path(files[-1]))
    command, words = _command(words)
    words, given = _with_folder(words)
    family_command = FAMILY_COMMANDS[command]
    config: Any = parse(
        words,
        f"mcore-train plan {command}",
        _CONFIGS[command],
        family_command.beginning,
        needs=family_command.needs,
    )
    options: PlanConfig = config.planning
    faults = FaultCollector()
    for flag, file in (("--output", options.output), ("--plot", options.plot)):
        if file:
            faults.attempt(check_file, flag, file)
    faults.raise_all()
    system = chosen_system(options)
    plan = make_plan(_run_config(config, command), command, given, options, system)
    if options.output:
        row = chosen_row(plan, options.explain or 1)
        Path(options.output).write_text(recipe_text(plan, row, given), encoding="utf-8")
    if options.plot:
        title = f"{config.launch.model or command} on {plan.world_size} x {system.name}"
        svg = plot_svg(plan.search.rows, system.memory_gib, title)
        Path(options.plot).write_text(svg, encoding="utf-8")
    if options.json:
        return json.dumps(plan_json(plan), indent=1)
    return (
        explain_text(plan, options.explain) if options.explain else plan_text(plan, options.top)
    )


def make_plan(
    config: TrainConfig,
    command: str,
    given: Sequence[str],
    options: PlanConfig,
    system: System,
) -> Planned:
    """Search the layouts of a run.

    Args:
        config: of the run.
        command: ``gpt``, ``mamba``, ``bert`` or ``t5``.
        given: fields that the user gave; they are not searched.
        options: of the plan.
        system: constants of the cluster.
    """
    family: Family = FAMILY_COMMANDS[command].family
    tokenizer = load_tokenizer(config)
    vocab_size = config.tokenizer.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    if not vocab_size:
        raise ValueError("give --vocab-size (the number of token ids), or --tokenizer-model.")
    config = _assumed(config, given, options)
    begin = time.monotonic()
    result = search_layouts(
        config,
        family,
        options.gpus,
        vocab_size,
        system,
        tuple(given),
        searches_fp8=options.search_fp8,
        top=max(options.top, options.explain, 10 * bool(options.plot)),
    )
    return Planned(
        search=result,
        config=config,
        family=family,
        command=command,
        world_size=options.gpus,
        vocab_size=vocab_size,
        system=system,
        train_tokens=options.train_tokens,
        seconds=time.monotonic() - begin,
    )


def chosen_system(options: PlanConfig) -> System:
    """Return the constants that the options name.

    Raises:
        ValueError: for a GPU or network that is not known.
    """
    system = read_system(Path(options.system)) if options.system else find_system(options.gpu)
    if options.nodes_of:
        system = replace(system, gpus_per_node=options.nodes_of)
    if options.interconnect:
        preset_gb_s = INTERCONNECTS.get(options.interconnect.lower())
        try:
            speed = preset_gb_s or float(options.interconnect)
        except ValueError:
            raise ValueError(
                f"--interconnect {options.interconnect} is not known: use "
                f"{', '.join(INTERCONNECTS)}, or a number of GB/s per GPU."
            ) from None
        system = replace(system, network_gb_s=speed)
    return system


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    if words and not is_flag(words[0]):
        if words[0] not in _CONFIGS:
            raise ValueError(
                f"mcore-train plan {words[0]} is not known: use {', '.join(_CONFIGS)}."
            )
        return words[0], list(words[1:])
    return "gpt", list(words)


def _with_folder(words: list[str]) -> tuple[list[str], list[str]]:
    """Replace a Hugging Face folder of --model by flags; also return the given fields."""
    rest, names = take_all(words, "--model", FaultCollector())
    folder = Path(names[-1]) if names else None
    flags: list[str] = []
    if folder is not None and (folder / "config.json").is_file():
        flags = folder_flags(folder)
    elif names:
        flags = ["--model", names[-1]]
    words = [*flags, *rest]
    _, recipes = take_all(rest, "--recipe", FaultCollector())
    known = _field_names()
    spellings = {*flag_names(PlannedConfig), LAYERS_PER_STAGE}
    line = translate(rest, spellings, FaultCollector())  # Megatron's spellings count too
    given = {canonical(word.partition("=")[0])[2:].replace("-", "_")
             for word in (*line.words, *line.defaults) if is_flag(word)}  # fmt: skip
    given |= {name.removeprefix("no_") for name in given}
    if LAYERS_PER_STAGE in line.words:
        given.add("num_virtual_stages_per_pipeline_rank")
    for recipe in recipes:
        given |= set(read_recipe(Path(recipe), known))
    return words, sorted(given)


def _field_names() -> set[str]:
    from mcore_train.composition import field_types

    return {name for kind in _CONFIGS.values() for name in field_types(kind)}


def folder_flags(folder: Path) -> list[str]:
    """Return the flags of training that describe the model of a Hugging Face folder.

    Raises:
        ValueError: for a family that mcore-ckpt does not read.
    """
    table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    description = find_family(table["model_type"]).to_ours(table)
    flags = {**description["config"], **description.get("moe", {})}
    return to_flags({**flags, "vocab_size": description["vocab_size"]})


def _run_config(config: Any, command: str) -> TrainConfig:
    """Return the config of the run, without the options of the plan."""
    kind = FAMILY_COMMANDS[command].run
    return kind(**{part.name: getattr(config, part.name) for part in fields(kind)})


def _assumed(config: TrainConfig, given: Sequence[str], options: PlanConfig) -> TrainConfig:
    """Return the config with defaults of a plan for options that the user left out."""
    batch, model = config.batch, config.model
    length = batch.seq_length
    if "seq_length" not in given:
        length = min(ASSUMED_LENGTH, model.max_position_embeddings or ASSUMED_LENGTH)
    size = batch.global_batch_size
    if not size:
        size = max(16, 4 * options.gpus)
    precision = config.precision
    if not precision.fp16 and "bf16" not in given:
        precision = replace(precision, bf16=True)
    return replace(
        config,
        batch=replace(
            batch,
            seq_length=length,
            global_batch_size=size,
            train_iters=batch.train_iters or (0 if batch.train_samples else 1000),
        ),
        precision=precision,
        optimizer=replace(config.optimizer, lr=config.optimizer.lr or 1e-4),
        data=config.data
        if config.data.mock_data or config.data.data_path
        else replace(config.data, mock_data=True),
    )
