"""From the words of a command line to a ``TrainConfig``, without torch.

What stands further right wins: defaults, then the model that ``--load`` names, then recipes
from left to right, then flags. tyro projects the dataclasses to flags; ``dialect`` knows the
spellings that differ.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from mcore_train.composition import TrainConfig, field_types, flag_names
from mcore_train.dialect import translate
from mcore_train.origin import checkpoint_fields
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
