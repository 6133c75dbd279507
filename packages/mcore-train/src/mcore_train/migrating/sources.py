"""Reads a launch script or config of another trainer as a list of flags.

Every entry of the file becomes a ``Given``: the entry, and the equivalent flags (Megatron's or
mcore-train's), or the reason why there is no equivalent.
"""

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_base.command_line import canonical, is_flag
from mcore_ckpt.families import find_family
from mcore_train.checkpoints.origin import model_fields
from mcore_train.golden.cases import CONFIG, read_yaml
from mcore_train.migrating.foreign_configs import (
    DEEPSPEED,
    HF_FIELDS,
    NEMO,
    TORCHTITAN,
    Row,
    answer,
    flat,
    megatron_flag,
    render,
)
from mcore_train.migrating.shell import UNKNOWN, read_script, shown, unknown_in

CLASSES = ("same", "renamed", "note", "changed default", "refused", "unresolved", "launcher")


@dataclass(frozen=True, slots=True)
class Given:
    """One flag or key of a file, and the equivalent flags."""

    text: str
    """Text of the entry in the file, with its value."""
    words: tuple[str, ...] = ()
    """Equivalent flags and their values; empty: see ``reason``."""
    kind: str = ""
    """One of ``CLASSES``, if already known; else empty."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Flags, world size and format of a file."""

    form: str
    """Description of the file's format, for the report."""
    command: str = "gpt"
    given: tuple[Given, ...] = ()
    world_size: int = 0
    """Number of ranks that the file starts; 0: unknown."""
    has_megatron_defaults: bool = False
    """Whether options that the file does not set have Megatron's defaults."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Options of a published model, by name."""
    skipped: tuple[str, ...] = ()
    """Parts of the file that were not read, one sentence each."""
    lacks: str = ""
    """Parts of a run that files of this format never describe."""


def read_source(path: Path, settings: Mapping[str, str]) -> Source:
    """Read a file of any supported format.

    Args:
        path: script or config file.
        settings: values of variables that a script does not set.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the format is unknown.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a script or a config.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: give a script or a config.") from None
    end = path.suffix.lower()
    if end == ".json":
        return _read_json(path, text)
    if end == ".toml":
        return _read_toml(path, text)
    if end in (".yaml", ".yml"):
        return _read_yaml(path, settings)
    if end == ".py":
        raise ValueError(
            f"{path} is Python, which is not run: write the config that it builds to YAML "
            "(Megatron-Bridge: config.to_yaml), and give that file."
        )
    return _read_shell(text, settings)


PROGRAMS = (
    ("*t5*", "t5"),
    ("*bert*", "bert"),
    ("*mamba*", "mamba"),
    ("*hybrid*", "mamba"),
)
"""Patterns of Megatron's entry scripts and the commands for them; any other script: gpt."""


def _read_shell(text: str, settings: Mapping[str, str]) -> Source:
    script = read_script(text, settings)
    given = [
        Given(word, kind="launcher", reason="it stays with torchrun or the scheduler")
        for word in _grouped(script.launcher)
        if word.startswith("-")
    ]
    given += [
        Given(
            f"{name}={value}", kind="launcher", reason="an environment variable; keep it there"
        )
        for name, value in script.exports.items()
    ]
    program = Path(script.program).name
    command = next((name for p, name in PROGRAMS if fnmatchcase(program, p)), "gpt")
    return Source(
        form=f"a launch script of {program}",
        command=command,
        given=(*given, *split_flags(script.words)),
        world_size=_world_size(script.launcher, script.batch_options),
        has_megatron_defaults=True,
        skipped=tuple(script.skipped),
    )


def split_flags(words: list[str]) -> list[Given]:
    """Split words into flags with their values.

    Flags with unknown variables are unresolved; words without a flag are refused.
    """
    given: list[Given] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        values = []
        while rest and not is_flag(rest[0]) and is_flag(word):
            values.append(rest.pop(0))
        text = shown(" ".join([word, *values]))
        if missing := unknown_in([word, *values]):
            names = ", ".join(dict.fromkeys(missing))
            reason = (
                f"the script does not contain {names}: give it by --set, or the flag itself"
            )
            is_bare = not is_flag(word)
            flags = () if is_bare else (canonical(flag),)
            given.append(Given(text, flags, "unresolved", reason))
        elif not is_flag(word):
            given.append(Given(text, kind="refused", reason="a word without a flag; left out"))
        else:
            parts = (canonical(flag), *([value] if "=" in word else []), *values)
            given.append(Given(text, parts))
    return given


def _grouped(words: list[str]) -> list[str]:
    """Join each flag of a launcher with its values."""
    groups: list[str] = []
    for word in words:
        if (
            groups
            and not word.startswith("-")
            and groups[-1].startswith("-")
            and ("=" not in groups[-1] and " " not in groups[-1])
        ):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    return groups


def _world_size(launcher: list[str], batch_options: list[str]) -> int:
    """Return hosts times ranks per host; 0 if the ranks per host are unknown."""
    words = [w for word in (*batch_options, *launcher) for w in word.split("=", 1)]
    counts: dict[str, int] = {}
    names = {
        "nnodes": "hosts",
        "nodes": "hosts",
        "N": "hosts",
        "num_nodes": "hosts",
        "nproc_per_node": "ranks",
        "num_gpus": "ranks",
        "gpus_per_node": "ranks",
        "ntasks_per_node": "ranks",
    }
    for name, value in itertools.pairwise(words):
        part = names.get(name.lstrip("-").replace("-", "_"), "")
        numbers = re.findall(r"\d+", value)
        is_single_task = "ntasks" in name and numbers == ["1"]  # one torchrun per host
        if part and numbers and name.startswith("-") and not is_single_task:
            counts[part] = int(numbers[-1])
    return counts.get("ranks", 0) * counts.get("hosts", 1)


def _read_yaml(path: Path, settings: Mapping[str, str]) -> Source:
    config = read_yaml(path)
    if "MODEL_ARGS" in config or path.name == CONFIG:
        return _read_functional_test(path, config, settings)
    table = flat(config)
    keys = {key.partition(".")[0] for key in table}
    if not keys & {"model", "trainer", "train", "optimizer", "ddp"}:
        raise ValueError(
            f"{path} has neither MODEL_ARGS nor the sections of NeMo or Megatron-Bridge "
            "(model, trainer, train, optimizer): its form is not known."
        )
    devices, nodes = table.get("trainer.devices", 0), table.get("trainer.num_nodes", 1)
    world_size = devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else 0
    given = [
        _by_row(NEMO, key, value, table) for key, value in table.items() if value is not None
    ]
    return Source(
        form="a config of NeMo or Megatron-Bridge",
        given=tuple(given),
        world_size=max(0, world_size),
        has_megatron_defaults=True,
    )


def _read_functional_test(
    path: Path, config: Mapping[str, Any], settings: Mapping[str, str]
) -> Source:
    """Read MODEL_ARGS of a case and of ``model_config.yaml`` in the folders above it."""
    options: dict[str, Any] = {}
    command = ""
    levels = [config]
    folder = path.resolve().parent.parent
    while path.name == CONFIG and (folder / CONFIG).is_file():
        levels.insert(0, read_yaml(folder / CONFIG))
        folder = folder.parent
    for level in levels:
        options |= level.get("MODEL_ARGS") or {}
        command = str(level.get("COMMAND", command))
    variables: dict[str, str] = {}
    for level in levels:
        variables |= {n: str(v) for n, v in (level.get("ENV_VARS") or {}).items()}
    given = [
        Given(
            f"{name}={value}", kind="launcher", reason="an environment variable; keep it there"
        )
        for name, value in variables.items()
    ]
    for flag, value in options.items():
        given += _of_yaml(str(flag), value, settings)
    flags = " ".join(map(str, options))
    if not command:
        command = "t5" if "--decoder-seq-length" in flags else "gpt"
        command = "bert" if "--bert-" in flags else command
        command = "mamba" if "--hybrid-" in flags else command
    return Source(
        form="MODEL_ARGS of a functional test",
        command=command,
        given=tuple(given),
        has_megatron_defaults=True,
        skipped=("LANES is not read: options of one lane are left out.",)
        if any("LANES" in level for level in levels)
        else (),
    )


def _of_yaml(flag: str, value: Any, settings: Mapping[str, str]) -> list[Given]:
    if value is None or (value is False and flag.startswith("--no-")):
        return [Given(f"{flag}: {render(value)}", kind="note", reason="it is off there")]
    if isinstance(value, bool):
        return split_flags([flag if value else f"--no-{flag[2:]}"])
    words = [str(each) for each in value] if isinstance(value, list) else _words(str(value))
    expanded = [
        re.sub(
            r"\$\{?(\w+)\}?",
            lambda match: settings.get(match[1], f"{UNKNOWN}{match[0]}{UNKNOWN}"),
            word,
        )
        for word in words
    ]
    return split_flags([flag, *expanded])


def _words(text: str) -> list[str]:
    """Split a value like a shell; lists and texts that are invalid in a shell stay one word."""
    try:
        return [text] if text.startswith(("[", "(")) else shlex.split(text)
    except ValueError:
        return [text]


def _by_row(rows: Mapping[str, Row], key: str, value: Any, table: Mapping[str, Any]) -> Given:
    """Translate a key by the first matching row; other keys of NeMo by Megatron's names."""
    text = f"{key}: {render(value)}"
    if isinstance(value, str) and ("${" in value or value in ("auto", "???")):
        reason = f"{value} is filled in when the program runs: give the flag itself"
        return Given(text, kind="unresolved", reason=reason)
    row = next((rows[pattern] for pattern in rows if fnmatchcase(key, pattern)), None)
    if row is None and rows is NEMO:
        translation = megatron_flag(key, value)
    elif row is None:
        return Given(text, kind="refused", reason="this key is not known; left out")
    else:
        translation = answer(row, value, table)
    if translation.startswith("--"):
        return Given(text, tuple(shlex.split(translation)))
    if translation.startswith("refused: "):
        return Given(text, kind="refused", reason=translation.removeprefix("refused: "))
    return Given(text, kind="note", reason=translation)


def _read_toml(path: Path, text: str) -> Source:
    try:
        table = flat(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: no valid TOML: {error}") from None
    if not {key.partition(".")[0] for key in table} & {"parallelism", "training", "job"}:
        raise ValueError(
            f"{path} has no section [training], [parallelism] or [job] of torchtitan; a recipe "
            "of mcore-train is used as it is: --recipe."
        )
    return Source(
        form="a config of torchtitan",
        given=tuple(_by_row(TORCHTITAN, key, value, table) for key, value in table.items()),
    )


def _read_json(path: Path, text: str) -> Source:
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: no valid JSON: {error}") from None
    if isinstance(table, dict) and "model_type" in table:
        return _read_published(table)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
    if not isinstance(table, dict) or not set(keys) & table.keys():
        raise ValueError(
            f"{path} is neither a config.json with model_type nor DeepSpeed's config with "
            f"{', '.join(keys)}."
        )
    table = flat(table)
    return Source(
        form="DeepSpeed's config",
        given=tuple(_by_row(DEEPSPEED, key, value, table) for key, value in table.items()),
        lacks="the model, the data and the number of steps",
    )


def _read_published(table: Mapping[str, Any]) -> Source:
    """Read the model of a config.json by the family of its ``model_type``."""
    description = find_family(table["model_type"]).to_ours(dict(table))
    values = model_fields(description)
    given = []
    for key, value in table.items():
        name = HF_FIELDS.get(key, key)
        text = f"{key}: {render(value)}"
        if name in values:
            kind = "same" if name == key else "renamed"
            reason = f"{name} = {json.dumps(values[name])}"
            given.append(Given(text, kind=kind, reason="" if kind == "same" else reason))
        else:
            reason = (
                f"read by the family {table['model_type']}; it adds no option to the recipe"
            )
            given.append(Given(text, kind="note", reason=reason))
    command = {"bert": "bert", "t5": "t5"}.get(description["family"], "gpt")
    return Source(
        form=f"config.json of a {table['model_type']}",
        command=command,
        given=tuple(given),
        values=values,
        lacks="batches, learning rate, data and layout",
    )
