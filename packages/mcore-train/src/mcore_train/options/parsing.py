"""From the words of a command line to a ``TrainConfig``, without torch.

What stands further right wins: defaults, then the model that ``--load`` names, then the one
that ``--model`` names, then recipes from left to right, then flags. ``megatron_flags``
has the spellings that differ.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_type_hints

from mcore_ckpt.storage.stores import as_path
from mcore_models.families import FAMILIES
from mcore_models.hybrid_config import sizes_of_pattern
from mcore_models.presets import find_preset
from mcore_parallel.command_line import HELP_FLAGS, is_flag, list_options, read_words
from mcore_parallel.command_line import parse as parse_options
from mcore_parallel.entry_point import is_first_rank
from mcore_parallel.field_checks import flag
from mcore_parallel.layer_patterns import pattern_layers
from mcore_train.checkpoints.origin import checkpoint_fields, find_checkpoint
from mcore_train.composition import TrainConfig, field_types, flag_names
from mcore_train.options.idle_options import without_idle_options
from mcore_train.options.megatron_flags import translate
from mcore_train.options.recipe import Value, read_recipe, to_flags

log = logging.getLogger(__name__)

PATTERN = "--hybrid-override-pattern"
"""Says how many layers there are, and by its | which stage they are on."""

LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's other way to say --num-virtual-stages-per-pipeline-rank."""

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
"""What --help shows; the rest belongs to --help-all and to topics."""

Config = TypeVar("Config", bound=TrainConfig)


def parse(
    argv: Sequence[str],
    program: str = "mcore-train gpt",
    config_type: type[Config] = TrainConfig,
    beginning: Sequence[str] = (),
) -> Config:
    """Read a command line, its recipes and the shape of the model that it continues.

    Args:
        argv: the words after the command.
        program: the command, as help and errors call it.
        config_type: of the result: a command may have options beside a run's.
        beginning: flags that the command begins from where no preset or checkpoint says the
            model; all others win over them.

    Raises:
        ValueError: for an unknown flag, field or model, a refused flag, a value of the wrong
            type, or values that the configs themselves refuse.
        SystemExit: after help.
    """
    if set(argv) & set(HELP_FLAGS):
        return parse_options(config_type, program, argv, usual=USUAL)
    words, notes = translate(argv, {*flag_names(config_type), LAYERS_PER_STAGE})
    for note in notes if is_first_rank() else ():
        log.info("%s", note)
    words, recipes = take_all(words, "--recipe")
    words, layers_per_stage = take_all(words, LAYERS_PER_STAGE)
    fields: dict[str, Value] = {}
    for recipe in recipes:
        fields |= _checked_recipe(recipe, config_type)
    name = _last_value(words, "--model") or str(fields.get("model", ""))
    preset = _preset_fields(name, config_type) if name else {}
    load = _last_value(words, "--load") or str(fields.get("load", ""))
    step = _last_value(words, "--ckpt-step") or str(fields.get("ckpt_step", 0))
    if not step.isdecimal():
        raise ValueError(
            f"--ckpt-step {step} must be the number of a step: leave it out for the latest."
        )
    save = _last_value(words, "--save") or str(fields.get("save", ""))
    if save and _is_on(words, "--auto-resume", fields) and find_checkpoint(save) is not None:
        load, step = save, "0"
    base = _last_value(words, "--pretrained-checkpoint")
    base = base or str(fields.get("pretrained_checkpoint", ""))
    saved = checkpoint_fields(base, 0, config_type) if base else {}
    saved |= checkpoint_fields(load, int(step), config_type) if load else {}
    saved |= preset
    beginning = () if saved else beginning  # fields that a model leaves out have their defaults
    given = [*to_flags(fields), *words]
    args = [*beginning, *to_flags(saved), *given]
    _check_model_source({"--load": load, "--pretrained-checkpoint": base}, args, config_type)
    # What follows from a pattern wins over the model that the pattern changes.
    derived = _pattern_flags(args)
    before = [*derived, *beginning, *to_flags(saved), *(derived if PATTERN in given else ())]
    if layers_per_stage:
        given += [
            "--num-virtual-stages-per-pipeline-rank",
            virtual_stages(args, layers_per_stage[-1]),
        ]
    if recipes:
        given += ["--recipe", *recipes]
    config = parse_options(config_type, program, [*before, *given])
    # What a saved model or preset says of a part that options turn off has no effect.
    options = set(field_types(config_type))
    kept = {name for name in options if {flag(name), flag(f"no_{name}")} & set(given)}
    return without_idle_options(config, kept | (options - set(saved)))


def virtual_stages(args: list[str], layers_per_stage: str) -> str:
    """Return the stages on a rank that have so many layers each."""
    if _last_value(args, "--num-virtual-stages-per-pipeline-rank"):
        raise ValueError(
            f"{LAYERS_PER_STAGE} and --num-virtual-stages-per-pipeline-rank say the same: "
            "leave one of the two out."
        )
    layers = _last_value(args, "--num-layers")
    ranks = _last_value(args, "--pipeline-model-parallel-size") or "1"
    if not (layers.isdecimal() and ranks.isdecimal() and layers_per_stage.isdecimal()):
        raise ValueError(
            f"{LAYERS_PER_STAGE} {layers_per_stage} needs numbers: itself, --num-layers and "
            "--pipeline-model-parallel-size."
        )
    together = int(ranks) * int(layers_per_stage)
    if together < 1 or int(layers) % together:
        raise ValueError(
            f"--num-layers {layers} are not whole stages of {LAYERS_PER_STAGE} "
            f"{layers_per_stage} on each of --pipeline-model-parallel-size {ranks} ranks: make "
            f"the layers a multiple of {max(1, together)}."
        )
    return str(int(layers) // together)


def take_all(words: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Take a flag that may be repeated, and its values, out of a command line."""
    rest, taken = [], []
    while words:
        word, *words = words
        if word != flag:
            rest.append(word)
            continue
        if not words or is_flag(words[0]):
            raise ValueError(f"{flag} needs a value.")
        while words and not is_flag(words[0]):
            taken.append(words.pop(0))
    return rest, taken


def _preset_fields(name: str, config_type: type[TrainConfig]) -> dict[str, Value]:
    """Read a preset of the family that the command trains."""
    preset = find_preset(name)
    if FAMILIES[preset.family].config is not get_type_hints(config_type)["model"]:
        raise ValueError(
            f"--model {name} is of another family: use mcore-train {preset.family}."
        )
    return preset.flags


def _check_model_source(
    sources: Mapping[str, str], args: Sequence[str], config_type: type[TrainConfig]
) -> None:
    """Refuse a folder that a run would take its model from and that holds no checkpoint."""
    options = list_options(config_type)
    if all(option.flag in args for option in options if option.is_required):
        return
    for name, folder in sources.items():
        if folder and find_checkpoint(folder) is None:
            why = "holds no checkpoint" if as_path(folder).is_dir() else "does not exist"
            raise ValueError(
                f"{name} {folder} {why}: correct the path, or give a model (--model NAME, or "
                "--num-layers, --hidden-size and --num-attention-heads) to start from nothing."
            )


def _pattern_flags(args: list[str]) -> list[str]:
    """Return what follows from a hybrid pattern; flags further right win over it."""
    pattern = _last_value(args, PATTERN)
    found = to_flags(sizes_of_pattern(pattern))
    stages = pattern.split("|")
    if len(stages) > 1 and _last_value(args, "--pipeline-model-parallel-size") not in ("", "1"):
        layout = "E" + "|".join("t" * len(pattern_layers(stage)) for stage in stages) + "L"
        found += ["--pipeline-model-parallel-layout", layout]
    return found


def _checked_recipe(recipe: str, config_type: type[TrainConfig]) -> dict[str, Value]:
    """Read a recipe; a value of the wrong type is named with its file."""
    fields = read_recipe(Path(recipe), field_types(config_type))
    try:
        read_words(list_options(config_type), to_flags(fields))
    except ValueError as error:
        raise ValueError(f"{recipe}: {error}") from None
    return fields


def _last_value(words: list[str], flag: str) -> str:
    """Return what stands behind a flag where it is given last; empty: it is not given."""
    places = [i for i, word in enumerate(words[:-1]) if word == flag]
    value = words[places[-1] + 1] if places else ""
    if is_flag(value):
        raise ValueError(f"{flag} needs a value.")
    return value


def _is_on(words: list[str], switch: str, fields: Mapping[str, Value]) -> bool:
    both = [word for word in words if word in (switch, switch.replace("--", "--no-", 1))]
    if both:
        return both[-1] == switch
    return bool(fields.get(switch[2:].replace("-", "_"), False))
