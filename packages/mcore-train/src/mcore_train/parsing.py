"""From the words of a command line to a ``TrainConfig``, without torch.

What stands further right wins: defaults, then the model that ``--load`` names, then recipes
from left to right, then flags. tyro projects the dataclasses to flags; ``dialect`` knows the
spellings that differ.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from mcore_ckpt.paths import resolve_folder
from mcore_train.composition import TrainConfig, field_types, flag_names
from mcore_train.dialect import translate
from mcore_train.recipe import Value, read_recipe, to_flags

log = logging.getLogger(__name__)


def parse(argv: Sequence[str], program: str = "mcore-train gpt") -> TrainConfig:
    """Read a command line, its recipes and the shape of the model that it continues.

    Args:
        argv: the words after the command.
        program: the command, as help and errors call it.

    Raises:
        ValueError: for an unknown flag or field, a refused one, or values that the configs
            themselves refuse.
        SystemExit: code 0 after help, code 2 after a value of the wrong type.
    """
    import tyro

    words, notes = translate(argv, {*flag_names(), "--help"})
    for note in notes:
        log.info("%s", note)
    words, recipes = _take_all(words, "--recipe")
    fields: dict[str, Value] = {}
    for recipe in recipes:
        fields |= read_recipe(Path(recipe), field_types())
    load = _last_value(words, "--load") or str(fields.get("load", ""))
    step = int(_last_value(words, "--ckpt-step") or str(fields.get("ckpt_step", 0)))
    saved = checkpoint_fields(load, step) if load else {}
    args = [*to_flags(saved), *to_flags(fields), *words]
    if recipes:
        args += ["--recipe", *recipes]
    return tyro.cli(
        TrainConfig,
        prog=program,
        args=args,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def checkpoint_fields(load: str, step: int = 0) -> dict[str, Value]:
    """Read the model's own options out of a checkpoint's index, as a flat table.

    Args:
        load: run folder or step folder.
        step: step in a run folder; 0: the latest.

    Returns:
        The fields that differ from their defaults or have none; empty where the folder holds
        no checkpoint or the checkpoint describes no model.
    """
    try:
        folder = resolve_folder(Path(load), step or None)
    except FileNotFoundError:
        return {}
    return model_fields(read_extra(folder).get("model", {}))


def model_fields(description: dict[str, Any]) -> dict[str, Value]:
    """Turn a checkpoint's model description into the flat fields that build it again."""
    table: dict[str, Value] = {}
    parts = get_type_hints(TrainConfig)
    for part, values in (("model", "config"), ("experts", "moe")):
        for field in dataclasses.fields(parts[part]):
            value = description.get(values, {}).get(field.name, field.default)
            if value != field.default:
                table[field.name] = value
    if description:
        table["vocab_size"] = description["vocab_size"]
    return table


def _take_all(words: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Take a flag that may be repeated, and its values, out of a command line."""
    rest, taken = [], []
    while words:
        word, *words = words
        if word != flag:
            rest.append(word)
            continue
        if not words or words[0].startswith("--"):
            raise ValueError(f"{flag} needs a file.")
        while words and not words[0].startswith("--"):
            taken.append(words.pop(0))
    return rest, taken


def _last_value(words: list[str], flag: str) -> str:
    places = [i for i, word in enumerate(words[:-1]) if word == flag]
    return words[places[-1] + 1] if places else ""
