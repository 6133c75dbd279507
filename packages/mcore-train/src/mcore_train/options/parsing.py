"""Parses a command line into a ``TrainConfig``, without torch.

Sources of an option's value, each of which overrides those before it: defaults, the model of
the checkpoint that ``--load`` names, the preset that ``--model`` names, recipes from left to
right, flags. ``megatron_flags`` translates Megatron's flags first. All faults are collected and
raised as one error at the end.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mcore_base.command_line import (
    HELP_FLAGS,
    FaultCollector,
    OptionsError,
    build_options,
    is_flag,
    list_options,
    read_table,
    read_words,
)
from mcore_base.command_line import parse as parse_options
from mcore_base.entry_point import is_first_rank
from mcore_base.options import idle_options, types_of
from mcore_base.stores import as_path
from mcore_models.config import sizes_of_pattern, stages_of_pattern
from mcore_models.families import FAMILIES
from mcore_models.layer_patterns import without_stage_marks
from mcore_models.presets import find_preset
from mcore_train.checkpoints.origin import (
    checkpoint_fields,
    describe_balancing_loss,
    find_checkpoint,
)
from mcore_train.composition import (
    TrainConfig,
    field_types,
    flag_names,
)
from mcore_train.objectives.config import DATA_OPTIONS
from mcore_train.options.megatron_defaults import defaults_not_taken, describe
from mcore_train.options.megatron_flags import check_translation, idle_reasons, translate
from mcore_train.options.recipe import Value, read_recipe

log = logging.getLogger(__name__)

PATTERN = "--hybrid-override-pattern"
"""Flag whose letters give the number of layers, and whose | marks give pipeline stages."""

LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's second flag for --num-virtual-stages-per-pipeline-rank."""

USUAL = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
    *(
        "hybrid_override_pattern",
        "ffn_hidden_size",
        "max_position_embeddings",
        "num_experts",
        "moe_router_topk",
    ),
    *("micro_batch_size", "global_batch_size", "seq_length", "train_iters", "train_samples"),
    *("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay", "clip_grad"),
    *("bf16", "recompute_granularity", "tensor_model_parallel_size", "sequence_parallel"),
    *("pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "use_distributed_optimizer", "tokenizer_type"),
    *("tokenizer_model", "vocab_size", "data_path", "split", "mock_data", "eval_interval"),
    *("save", "save_interval", "load", "finetune", "log_interval", "seed", "device"),
    *("model", "recipe", "nproc", "certificate", "quiet"),
)
"""Options that --help shows; --help-all and the topics show the others."""

_PLACEHOLDERS = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16}
"""Sizes that stand in for missing or faulty ones while the other options are checked."""

_HISTORY, _AMAX = "fp8_amax_history_len", "fp8_amax_compute_algo"
_NOTHING: Mapping[str, Value] = MappingProxyType({})

Config = TypeVar("Config", bound=TrainConfig)


def parse(
    argv: Sequence[str],
    program: str = "mcore-train gpt",
    config_type: type[Config] = TrainConfig,
    beginning: Mapping[str, Value] = _NOTHING,
    *,
    needs: str = "",
    is_megatron_script: bool = False,
    check: Callable[[Config], object] | None = None,
) -> Config:
    """Read a command line, its recipes and the shape of the model that it continues.

    Args:
        argv: the words after the command.
        program: the command, as help and errors call it.
        config_type: of the result; a command may have more options than a run.
        beginning: the command's own defaults, used without a checkpoint or preset; every other
            source overrides them.
        needs: a flag that the command requires, as in ``Command``.
        is_megatron_script: whether one of Megatron's entry scripts was called. Its user may
            expect Megatron's defaults, so differences are logged; for other commands they are
            logged if Megatron's spellings of flags occur.
        check: raises ``ValueError`` for faults of a whole config. It is called only if the
            command line has faults already, so that one error lists all of them; otherwise the
            caller checks the result.

    Raises:
        OptionsError: (a ValueError) with every unknown flag, field or model, refused flag,
            value of the wrong type, and value that the configs refuse.
        SystemExit: after help.
    """
    if set(argv) & set(HELP_FLAGS):
        return parse_options(config_type, program, argv, usual=USUAL)
    faults = FaultCollector()
    options = list_options(config_type)
    # 1. Flags, with Megatron's spellings translated; recipes, presets and checkpoints.
    line = translate(argv, {*flag_names(config_type), LAYERS_PER_STAGE}, faults)
    for note in line.notes if is_first_rank() else ():
        log.info("%s", note)
    words, recipes = take_all(list(line.words), "--recipe", faults)
    words, layers_per_stage = take_all(words, LAYERS_PER_STAGE, faults)
    typed = read_words(options, words, faults)
    sources = _read_sources(typed, recipes, config_type, faults)
    given = {**sources.fields, **typed}
    faults.unsettled -= {option.flag for option in options if option.name in given}
    saved = sources.saved
    # 2. Defaults of the command, and Megatron's. They are not used with a saved model: fields
    # that it leaves out have mcore's defaults.
    before = {**({} if saved else beginning), **read_words(options, line.defaults, faults)}
    uses_megatron_defaults = given.get("megatron_defaults", False)
    if uses_megatron_defaults and sources.preset:
        faults.add(
            f"--megatron-defaults has no effect on --model {sources.preset}, which is a whole "
            "model: leave one of them out.",
        )
    if not saved:
        missing = defaults_not_taken({**before, **given}, line.foreign, config_type)
        if uses_megatron_defaults:
            before = {**read_table(options, missing, faults), **before}
        elif missing and (line.foreign or is_megatron_script) and is_first_rank():
            log.info("%s", describe(missing))
    # 3. All sources, the last one wins; then what follows from a hybrid pattern.
    values = {**before, **saved, **given}
    required = _required_flags(config_type)
    faults.attempt(_check_model_source, sources.folders, values, unsettles=required)
    pattern = values.get("hybrid_override_pattern", "")
    derived = faults.attempt(_follows_from_pattern, values, unsettles=(PATTERN, "--num-layers"))
    # Sizes that follow from a pattern win over a saved model only if the command line or a
    # recipe gives the pattern.
    overriding = derived if "hybrid_override_pattern" in given else {}
    values = {**(derived or {}), **before, **saved, **(overriding or {}), **given}
    if pattern:  # its | marks are pipeline stages: layout, not part of the model
        values["hybrid_override_pattern"] = without_stage_marks(str(pattern))
    if layers_per_stage:
        stages = faults.attempt(virtual_stages, values, layers_per_stage[-1])
        values |= {"num_virtual_stages_per_pipeline_rank": stages} if stages else {}
    if values.get("tensorboard_dir"):
        values["tensorboard"] = True  # Megatron's only flag for it
    if "fp8_recipe" not in values and {_HISTORY, _AMAX} & given.keys():
        values["fp8_recipe"] = "delayed"  # the only recipe with a history
    values |= DATA_OPTIONS.get(str(values.get("objective", "")), {})
    if recipes:
        values["recipe"] = tuple(recipes)
    # Drop fields of a saved model or preset that belong to a feature which flags turn off.
    idle = idle_options(values, types_of(config_type).values())
    noted = {
        flag[2:].replace("-", "_").removeprefix("no_"): f"{flag}: {reason}."
        for flag, reason in idle_reasons().items()
    }
    dropped = {name: noted[name] for name in noted if name in idle & typed.keys()}
    for note in dropped.values() if is_first_rank() else ():
        log.info("%s", note)
    values = {
        n: value
        for n, value in values.items()
        if n not in dropped and (n in given or n not in idle & saved.keys())
    }
    # 4. The config, and checks of the whole.
    build = build_options(config_type, program, values, faults, placeholders=_PLACEHOLDERS)
    if build is None:
        faults.raise_all()
    assert build is not None
    config = build()
    if needs and not getattr(config.model, needs.partition(",")[0][2:].replace("-", "_")):
        faults.add(f"{program} needs {needs}: see {program} --help.")
    faults.attempt(check_translation, config, line.foreign)
    parallel = config.parallelism
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        config = replace(config, parallelism=replace(parallel, sequence_parallel=False))
        if is_first_rank():
            log.info("--sequence-parallel has no effect with --tensor-model-parallel-size 1.")
    if faults.lines and check is not None:
        faults.attempt(check, config)
    faults.raise_all()
    if config.experts.num_experts and is_first_rank():
        folders = (sources.folders[name] for name in ("--load", "--pretrained-checkpoint"))
        if source := next((each for each in folders if each and find_checkpoint(each)), ""):
            log.info("%s", describe_balancing_loss(config, given, source))
    return config


@dataclass(frozen=True, slots=True)
class _Sources:
    """Options from recipes, presets and checkpoints."""

    fields: dict[str, Any]
    """Options of recipes."""
    saved: dict[str, Any]
    """Options of the model of a preset or checkpoint."""
    preset: str
    """Name of the preset; empty: none."""
    folders: dict[str, str]
    """Folders of checkpoints by flag; empty: not given."""


def _read_sources(
    typed: Mapping[str, Any],
    recipes: list[str],
    config_type: type[TrainConfig],
    faults: FaultCollector,
) -> _Sources:
    """Read recipes, the preset and the checkpoint that a command line names."""
    required, options = _required_flags(config_type), list_options(config_type)
    fields: dict[str, Any] = {}
    for recipe in recipes:
        fields |= faults.attempt(_checked_recipe, recipe, config_type, unsettles=required) or {}
    given = {**fields, **typed}
    name, load, save = (given.get(key, "") for key in ("model", "load", "save"))
    preset = name and faults.attempt(_preset_fields, name, config_type, unsettles=required)
    step = given.get("ckpt_step", 0)
    resumes = save and given.get("auto_resume", False)
    if resumes and faults.attempt(find_checkpoint, save) is not None:
        load, step = save, 0
    base = given.get("pretrained_checkpoint", "")
    saved: dict[str, Any] = {}
    for folder, number in ((base, 0), (load, step)):
        if folder:
            table = faults.attempt(
                checkpoint_fields, folder, number, config_type, unsettles=required
            )
            saved |= table or {}
    saved = read_table(options, {**saved, **(preset or {})}, faults)
    return _Sources(fields, saved, name, {"--load": load, "--pretrained-checkpoint": base})


def _required_flags(config_type: type[TrainConfig]) -> set[str]:
    return {option.flag for option in list_options(config_type) if option.is_required}


def virtual_stages(values: Mapping[str, Any], layers_per_stage: str) -> int:
    """Return the number of stages on a rank, each of ``layers_per_stage`` layers."""
    if values.get("num_virtual_stages_per_pipeline_rank"):
        raise ValueError(
            f"{LAYERS_PER_STAGE} and --num-virtual-stages-per-pipeline-rank set one "
            "option: leave one of the two out."
        )
    layers, ranks = values.get("num_layers"), values.get("pipeline_model_parallel_size", 1)
    if layers is None or not layers_per_stage.isdecimal():
        raise ValueError(
            f"{LAYERS_PER_STAGE} {layers_per_stage} must be a whole number, and needs "
            "--num-layers."
        )
    together = ranks * int(layers_per_stage)
    if together < 1 or layers % together:
        raise ValueError(
            f"--num-layers {layers} cannot be divided into stages of {LAYERS_PER_STAGE} "
            f"{layers_per_stage} on --pipeline-model-parallel-size {ranks} ranks: make the "
            f"layers a multiple of {max(1, together)}."
        )
    return layers // together


def take_all(
    words: list[str], flag: str, faults: FaultCollector
) -> tuple[list[str], list[str]]:
    """Split a command line into the other words and the values of a repeatable flag."""
    rest, taken = [], []
    while words:
        word, *words = words
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        if equals:
            taken.append(value)
        elif not words or is_flag(words[0]):
            faults.add(f"{flag} needs a value.", flag)
        elif flag == "--recipe":
            while words and not is_flag(words[0]):
                taken.append(words.pop(0))
        else:
            taken.append(words.pop(0))
    return rest, taken


def _preset_fields(name: str, config_type: type[TrainConfig]) -> dict[str, Value]:
    """Read a preset of the family that the command trains."""
    preset = find_preset(name)
    if FAMILIES[preset.family].config is not types_of(config_type)["model"]:
        raise ValueError(
            f"--model {name} is of another family: use mcore-train {preset.family}."
        )
    return preset.flags


def _check_model_source(sources: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Refuse a folder without a checkpoint from which the run would read its model."""
    if values.keys() >= _PLACEHOLDERS.keys():
        return
    for name, folder in sources.items():
        if folder and find_checkpoint(folder) is None:
            why = "holds no checkpoint" if as_path(folder).is_dir() else "does not exist"
            raise ValueError(
                f"{name} {folder} {why}: correct the path, or give a model (--model NAME, or "
                "--num-layers, --hidden-size and --num-attention-heads) to start without a "
                "checkpoint."
            )


def _follows_from_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that follow from a hybrid pattern."""
    pattern = values.get("hybrid_override_pattern", "")
    is_cut = values.get("pipeline_model_parallel_size", 1) != 1
    return {**sizes_of_pattern(pattern), **(stages_of_pattern(pattern) if is_cut else {})}


def _checked_recipe(recipe: str, config_type: type[TrainConfig]) -> dict[str, Any]:
    """Read a recipe; errors about values name the file."""
    fields = read_recipe(Path(recipe), field_types(config_type))
    faults = FaultCollector()
    values = read_table(list_options(config_type), fields, faults)
    if faults.lines:
        raise OptionsError([f"{recipe}: {line}" for line in faults.lines])
    return values
