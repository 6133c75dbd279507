"""Translates the flags of a file into a recipe, and reports the translation of each flag."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mcore_base.command_line import (
    FaultCollector,
    Option,
    is_flag,
    list_options,
    read_words,
)
from mcore_base.command_line import unknown as unknown_option
from mcore_base.options import describe_rules, idle_options, rules_of, types_of
from mcore_parallel.pipeline_parallel.stages import expand_layout
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig, flag_names
from mcore_train.migrating.sources import CLASSES, Given, Source, read_source
from mcore_train.options.megatron_defaults import (
    LATENT_DEFAULTS,
    MODEL_DEFAULTS,
    defaults_not_taken,
)
from mcore_train.options.megatron_flags import (
    find_foreign,
    megatron_default,
    translate,
    translated_names,
)
from mcore_train.options.parsing import LAYERS_PER_STAGE, virtual_stages
from mcore_train.options.recipe import Value, write_recipe

_GROUPS_NOTE = "--num-query-groups"
_HEADINGS = {
    "changed default": "Megatron's default differs; not in the file",
    "unresolved": "not in the file, so not in the recipe",
    "launcher": "stays with the launcher",
    "note": "note: not in the recipe, or with a remark",
    "refused": "refused: not in the recipe",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The translation of one flag or key."""

    text: str
    kind: str
    """One of ``CLASSES``."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """A recipe, and the translation of every flag of its source."""

    source: Source
    answers: tuple[Answer, ...]
    values: Mapping[str, Any]
    """Options of the recipe, by name."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Indices in ``answers``, by flag."""
    open_flags: tuple[str, ...] = field(default=())
    """Options of the file whose values the file does not contain."""

    def count(self, kind: str) -> int:
        """Return the number of flags with an answer of one class."""
        return sum(answer.kind == kind for answer in self.answers)


def migrate_file(path: Path, settings: Mapping[str, str], command: str = "") -> Migration:
    """Translate a script or config into the options of a recipe.

    Args:
        path: script or config file.
        settings: values of variables that a script does not set.
        command: ``gpt``, ``mamba``, ``bert`` or ``t5``; empty: the command of the file.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the format of the file is unknown.
    """
    source = read_source(path, settings)
    config_type = FAMILY_COMMANDS[command or source.command].run
    options = list_options(config_type)
    known = {*_flag_names(config_type), LAYERS_PER_STAGE}
    names = {given.words[0] for given in source.given if given.words}
    answers: list[Answer] = []
    translated_words: list[str] = []
    owners: dict[str, int] = {}
    for given in source.given:
        if given.kind:
            answers.append(Answer(given.text, given.kind, given.reason))
            continue
        translated: list[Answer] = []
        for words in _flags(given.words):
            translated.append(_answer(given, words, known, options, names))
            owners[words[0]] = len(answers)
            translated_words += words if translated[-1].kind != "refused" else []
        refused = [answer for answer in translated if answer.kind == "refused"]
        reasons = " ".join(answer.reason for answer in refused or translated)
        answers.append(Answer(given.text, (refused or translated)[0].kind, reasons))
    faults = FaultCollector()
    line = translate(translated_words, known, faults)
    answers += [
        Answer(note.partition(":")[0], "note", note.partition(": ")[2].rstrip("."))
        for note in line.notes
        if note.startswith(f"{_GROUPS_NOTE}:")
    ]
    words, layers_per_stage = _take(list(line.words), LAYERS_PER_STAGE)
    values: dict[str, Any] = dict(source.values)
    values |= read_words(options, line.defaults, faults)
    values |= read_words(options, words, faults)
    if layers_per_stage:
        stages = faults.attempt(virtual_stages, values, layers_per_stage)
        values |= {"num_virtual_stages_per_pipeline_rank": stages} if stages else {}
    layout = values.get("pipeline_model_parallel_layout")
    if layout and "num_virtual_stages_per_pipeline_rank" not in values:
        # Megatron counts the stages of a rank from the layout.
        text = faults.attempt(expand_layout, layout, "--pipeline-model-parallel-layout") or ""
        stages = (text.count("|") + 1) // int(values.get("pipeline_model_parallel_size", 1))
        if stages > 1:
            values["num_virtual_stages_per_pipeline_rank"] = stages
            index = owners["--pipeline-model-parallel-layout"]
            reason = f"the same with --num-virtual-stages-per-pipeline-rank {stages}"
            answers[index] = Answer(answers[index].text, "renamed", reason)
    answers += [Answer("together", "refused", line) for line in faults.lines]
    open_flags = tuple(
        given.words[0] for given in source.given if given.kind == "unresolved" and given.words
    )
    if values.get("fp8_format") and {"fp8_amax_history_len", "fp8_amax_compute_algo"} & (
        values.keys()
    ):
        values.setdefault("fp8_recipe", "delayed")  # the only recipe with a history
    if values.get("tensorboard_dir") or "--tensorboard-dir" in open_flags:
        values["tensorboard"] = True  # Megatron's only flag for it
    theirs = defaults_not_taken(values, line.foreign, config_type)
    opened = {o.name: "x" for o in options if o.flag in open_flags and o.kind is str}
    outside = {**(theirs if source.has_megatron_defaults else {}), **opened}
    _drop_idle(values, outside, config_type, options, answers, owners)
    if source.has_megatron_defaults:
        answers += _take_defaults(values, line.foreign, config_type, options)
    return Migration(
        source=source,
        answers=tuple(answers),
        values=values,
        owners=owners,
        open_flags=open_flags,
    )


def _answer(
    given: Given, words: list[str], known: set[str], options: list[Option], names: set[str]
) -> Answer:
    """Classify one flag with its values."""
    name, values = words[0], words[1:]
    faults = FaultCollector()
    row = find_foreign(name)
    if name in known:
        becomes = row.values.get(values[0]) if row and values else None
        if name == LAYERS_PER_STAGE and row:
            return Answer(given.text, "renamed", f"{row.becomes}, {row.note}")
        line = translate(words, known, faults)
        read_words(options, line.words, faults)
        if faults.lines:
            return Answer(given.text, "refused", " ".join(faults.lines))
        if becomes or not given.text.replace("=", " ").startswith(name):
            return Answer(given.text, "renamed", becomes or " ".join(words))
        return Answer(given.text, "same")
    if row is not None and row.becomes:
        needed = [row.needs] if row.needs in names else []
        line = translate([*words, *needed], known, faults)
        read_words(options, [*line.words, *line.defaults], faults)
        if faults.lines:
            reason = _of_another(row.flags[:1]) or " ".join(faults.lines)
            return Answer(given.text, "refused", reason)
        if row.yields and row.flags[0] in names:
            return Answer(given.text, "note", row.note)
        after = [] if row.num_dropped else values
        note = f" ({row.note})" if row.note else ""
        return Answer(given.text, "renamed", " ".join([*row.flags, *after]) + note)
    if row is not None and row.note:
        translate(words, known, faults)
        kind = "refused" if faults.lines else "note"
        return Answer(given.text, kind, " ".join(faults.lines) or row.note)
    if elsewhere := _of_another([name]):
        return Answer(given.text, "refused", elsewhere)
    if row is not None:
        return Answer(given.text, "refused", f"{row.refused}.")
    if not given.text.startswith("--"):
        return Answer(given.text, "refused", "this key has no counterpart; left out")
    return Answer(given.text, "refused", unknown_option(name, {*known, *translated_names()}))


@cache
def _flag_names(config_type: type[TrainConfig]) -> frozenset[str]:
    return frozenset(flag_names(config_type))


def _of_another(flags: Sequence[str]) -> str:
    """Return a sentence that names the command with a flag; "" if no command has it."""
    for name, command in FAMILY_COMMANDS.items():
        if flags and flags[0] in _flag_names(command.run):
            return f"an option of mcore-train {name}: give --command {name} if it is one"
    return ""


def _flags(words: Iterable[str]) -> list[list[str]]:
    """Split words into flags with their values."""
    flags: list[list[str]] = []
    for word in words:
        if is_flag(word) or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    return flags


def _take(words: list[str], flag: str) -> tuple[list[str], str]:
    """Remove a flag and its value from words; return the rest and the value."""
    if flag not in words:
        return words, ""
    index = words.index(flag)
    return words[:index] + words[index + 2 :], words[index + 1] if words[index + 1 :] else ""


def _drop_idle(
    values: dict[str, Any],
    outside: Mapping[str, Any],
    config_type: type[TrainConfig],
    options: list[Option],
    answers: list[Answer],
    owners: Mapping[str, int],
) -> None:
    """Remove options without effect, which a run would refuse, and report each.

    ``outside`` has the options that apply without being in the recipe: Megatron's defaults,
    and options with unknown values.
    """
    flags = {option.name: option.flag for option in options}
    parts = list(types_of(config_type).values())
    while idle := sorted(idle_options({**outside, **values}, parts) & values.keys()):
        for name in idle:
            del values[name]
            rules = next(
                (rules_of(part)[name] for part in parts if name in rules_of(part)), None
            )
            why = describe_rules(rules).rstrip(".") if rules else ""
            reason = f"without effect in this run, left out: {why}"
            index = owners.get(flags[name])
            if index is None:
                answers.append(Answer(flags[name], "note", reason))
            else:
                answers[index] = Answer(answers[index].text, "note", reason)


def without_conflicts(
    migration: Migration, command: str, find_faults: Callable[[Mapping[str, Any]], list[str]]
) -> tuple[Migration, list[str]]:
    """Remove options without effect, and switches without the options that they need.

    Megatron ignores both silently; mcore-train refuses them. Other faults need a decision of
    the user, and are returned.

    Args:
        migration: translation of the file.
        command: command of the recipe.
        find_faults: returns the faults of a table of options, one sentence each.

    Returns:
        The migration without these options, with a reason for each, and the other faults.
    """
    options = {option.flag: option for option in list_options(FAMILY_COMMANDS[command].run)}
    values, answers = dict(migration.values), list(migration.answers)
    while lines := find_faults(values):
        before = len(values)
        for line in lines:
            flag, _, rest = line.partition(" ")
            option = options.get("--" + flag.removeprefix("--no-").removeprefix("--"))
            is_idle = "has no effect" in rest and "leave it out" in rest
            is_alone = rest.startswith("needs ") and option is not None and option.kind is bool
            if option is None or option.name not in values or not (is_idle or is_alone):
                continue
            del values[option.name]
            index = migration.owners.get(flag, len(answers))
            text = answers[index].text if index < len(answers) else flag
            kind = "note" if is_idle else "refused"
            reason = line.removeprefix(text).strip() if line.startswith(text) else rest
            answers[index : index + 1] = [Answer(text, kind, reason)]
        if len(values) == before:
            break
    return replace(migration, values=values, answers=tuple(answers)), lines


def _take_defaults(
    values: dict[str, Any],
    foreign: frozenset[str],
    config_type: type[TrainConfig],
    options: list[Option],
) -> list[Answer]:
    """Set ``megatron_defaults`` if the model depends on defaults; list all that differ."""
    ours = {option.name: option.default for option in options}
    missing = defaults_not_taken(values, foreign, config_type)
    # megatron_defaults must not turn on again what a flag without an option here turned off.
    turned_off = defaults_not_taken(values, (), config_type).keys() - missing.keys()
    if missing:
        values["megatron_defaults"] = True
        values |= {name: ours[name] for name in turned_off}
    answers = [
        Answer(
            f"--{name.replace('_', '-')}",
            "changed default",
            f"{_spelled(value)} in Megatron, {_spelled(ours[name])} here; megatron_defaults in "
            "the recipe takes Megatron's",
        )
        for name, value in missing.items()
    ]
    idle = idle_options(values, types_of(config_type).values())
    skipped = {*values, *idle, *missing, *MODEL_DEFAULTS, *LATENT_DEFAULTS}
    for option in (each for each in options if each.name not in skipped):
        theirs = megatron_default(option)
        if theirs not in (None, "required", option.default):
            both = f"{_spelled(theirs)} in Megatron, {_spelled(option.default)} here"
            reason = f"{both}; give it to have that"
            answers.append(Answer(option.flag, "changed default", reason))
    return answers


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return (
        {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value) or "auto"
    )


def recipe_text(migration: Migration, command: str, origin: str) -> str:
    """Format the options as a recipe, in tables by topic."""
    topics: dict[str, dict[str, Value]] = {}
    options = {option.name: option for option in list_options(FAMILY_COMMANDS[command].run)}
    values = migration.values
    for name, value in ((n, values[n]) for n in options if n in values):
        plain = list(value) if isinstance(value, tuple) else value
        topics.setdefault(options[name].topic, {})[name] = plain
    order = dict.fromkeys(option.topic for option in options.values())
    tables = (
        f"\n[{topic}]\n{write_recipe(topics[topic])}" for topic in order if topic in topics
    )
    return f"# mcore-train {command}, migrated from {origin}.\n" + "".join(tables)


def report_text(migration: Migration) -> str:
    """Format one line for every flag, by class, in the order of the file."""
    source, answers = migration.source, migration.answers
    counts = ", ".join(f"{migration.count(k)} {k}" for k in CLASSES if migration.count(k))
    lines = [f"{source.form}: {counts}"]
    for kind in CLASSES:
        rows = [answer for answer in answers if answer.kind == kind]
        if rows:
            lines += ["", f"{_HEADINGS.get(kind, kind)} ({len(rows)})"]
        arrow = " -> " if kind == "renamed" else ": "
        lines += [f"  {a.text}{arrow + a.reason if a.reason else ''}" for a in rows]
    if source.skipped:
        lines += ["", "not followed", *(f"  {line}" for line in source.skipped)]
    return "\n".join(lines)


def layout_world(values: Mapping[str, Any]) -> int:
    """Return the smallest number of ranks that the degrees of a layout divide."""
    sizes = {
        axis: int(values.get(f"{axis}_size", 1) or 1)
        for axis in (
            *("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"),
            "expert_model_parallel",
        )
    }
    tensor = sizes["tensor_model_parallel"]
    expert_tensor = int(values.get("expert_tensor_parallel_size", 0) or tensor)
    pipeline = sizes["pipeline_model_parallel"]
    dense = tensor * sizes["context_parallel"] * pipeline
    return math.lcm(dense, expert_tensor * sizes["expert_model_parallel"] * pipeline)
