"""``mcore-train migrate``: translates a launch script or config of another trainer."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mcore_base.command_line import OptionsError
from mcore_base.destinations import check_file
from mcore_models.presets import find_preset
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig
from mcore_train.options.recipe import to_flags

if TYPE_CHECKING:
    from mcore_train.migrating.migration import Migration

_LOADED = (
    "load",
    "pretrained_checkpoint",
    "finetune",
    "ckpt_step",
    "exit_on_missing_checkpoint",
)
_FILES = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "data_cache_path", "data_mixture_path"),
    *("object_storage_cache_path", "nccl_communicator_config_path"),
)
_TOKENIZERS = ("tokenizer_model", "vocab_file", "merge_file")
_ASSUMED: Mapping[str, Any] = {"vocab_size": 131_072, "train_iters": 1000, "lr": 1e-4}
"""Values that a dry run assumes if the file does not give them."""


def migrate(
    file: str,
    /,
    output: str = "",
    command: Literal["", "gpt", "mamba", "bert", "t5"] = "",
    set: tuple[str, ...] = (),
    model: str = "",
    world_size: int = 0,
    dry_run: bool = True,
) -> int:
    """Translate a launch script or config of another trainer into a recipe.

    Prints a line for each flag with its translation, then the recipe and the next commands.

    Reads a shell script that starts Megatron's pretrain_*.py (the script is not run),
    model_config.yaml of Megatron's functional tests, YAML of NeMo or Megatron-Bridge, TOML of
    torchtitan, JSON of DeepSpeed, or config.json of Hugging Face. Exit codes: 0 if a run
    accepts the recipe, else 2.

    Args:
        file: script or config.
        output: file for the recipe; empty: the recipe is printed.
        command: command of the recipe; empty: the command of the file, or gpt.
        set: NAME=VALUE of variables that a script does not set; its arguments by number.
        model: preset for the dry run, if the file does not describe a model.
        world_size: ranks of the dry run; 0: those of the file, or as few as its layout allows.
        dry_run: resolve the run of the recipe, on one CPU.
    """
    from mcore_train.migrating.migration import (
        migrate_file,
        recipe_text,
        report_text,
        without_conflicts,
    )

    if output:
        check_file("--output", output)
    if malformed := [each for each in set if "=" not in each]:
        raise ValueError(f"--set {malformed[0]}: give NAME=VALUE.")
    settings = dict(each.split("=", 1) for each in set)
    migration = migrate_file(Path(file), settings, command)
    name = command or migration.source.command
    trial = _Trial(migration, name, model, world_size)
    migration, faults = without_conflicts(migration, name, trial.faults)
    recipe = recipe_text(migration, name, Path(file).name)
    print(report_text(migration))
    if output:
        Path(output).write_text(recipe, encoding="utf-8")
        print(f"\nrecipe: {output}")
    else:
        print(f"\nrecipe, for mcore-train {name} --recipe FILE:\n\n{recipe}", end="")
    print()
    print(*trial.describe(migration.values), sep="\n")
    page = ""
    if dry_run and not faults:
        try:
            page = trial.dry_run(migration.values)
        except ValueError as error:
            faults = [str(error)]
    if faults:
        print(f"\na run of {trial.world_size} ranks refuses the recipe:")
        print(*(f"  {line}" for line in faults), sep="\n")
        return 2
    if page:
        print(f"\n{page}")
    left_open = "".join(f" {f} {f[2:].replace('-', '_').upper()}" for f in migration.open_flags)
    print(
        "\nnext, where the files of the run are, or with --mock-data instead of --data-path:\n"
        f"  mcore-train {name} --recipe {output or 'FILE'}{left_open} --dry-run "
        f"--world-size {trial.world_size}\n"
        f"  torchrun -m mcore_train {name} --recipe {output or 'FILE'}{left_open}"
    )
    return 0


class _Trial:
    """Resolves recipes like a run, without files that are only on the machine of the run."""

    def __init__(
        self, migration: "Migration", command: str, model: str, world_size: int
    ) -> None:
        from mcore_train.migrating.migration import layout_world

        self.command = command
        self.model = model
        self.saves = "save" in migration.values or "--save" in migration.open_flags
        self.world_size = (
            world_size or migration.source.world_size or layout_world(migration.values)
        )

    def faults(self, values: Mapping[str, Any]) -> list[str]:
        """Return the faults that a run would report, one sentence each."""
        from mcore_train.options.output_checks import build_checked_plan

        family = FAMILY_COMMANDS[self.command].family
        with tempfile.TemporaryDirectory() as folder:
            try:
                build_checked_plan(self._parse(values, folder), self.world_size, family)
            except OptionsError as error:
                return list(error.lines)
            except ValueError as error:
                return [str(error)]
        return []

    def dry_run(self, values: Mapping[str, Any]) -> str:
        """Return the page of the dry run."""
        from mcore_train.planning.dry_run import dry_run

        family = FAMILY_COMMANDS[self.command].family
        with tempfile.TemporaryDirectory() as folder:
            return dry_run(self._parse(values, folder), family, self.world_size)

    def describe(self, values: Mapping[str, Any]) -> list[str]:
        """List the options that the dry run replaces or assumes."""
        return [f"dry run: {line}" for line in _without_files(values, self.model)[1]]

    def _parse(self, values: Mapping[str, Any], folder: str) -> TrainConfig:
        from mcore_train.options.output_checks import build_checked_plan
        from mcore_train.options.parsing import parse

        plain, _ = _without_files(values, self.model)
        words = to_flags({n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()})
        words += ["--model", self.model] if self.model else []
        words += ["--save", str(Path(folder) / "run")] if self.saves else []
        words += ["--dry-run", "--world-size", str(self.world_size)]
        family = FAMILY_COMMANDS[self.command]
        return parse(
            words,
            f"mcore-train {self.command}",
            family.run,
            family.beginning,
            needs=family.needs,
            check=lambda config: build_checked_plan(config, self.world_size, family.family),
        )


def _without_files(given: Mapping[str, Any], model: str) -> tuple[dict[str, Any], list[str]]:
    """Remove options of files, which may be missing here, and add missing numbers.

    Returns:
        The options of the dry run, and a line about each change.
    """
    values, lines = dict(given), []
    if removed := [name for name in (*_LOADED, *_FILES) if values.pop(name, None)]:
        lines.append(
            f"leaves out {', '.join(removed)}: their files are on the machine of the run"
        )
    values["mock_data"] = True
    named = [name for name in _TOKENIZERS if name in values]
    if any(not Path(str(values[name])).exists() for name in named):
        for name in (*named, "tokenizer_type"):
            values.pop(name, None)
        lines.append("without the tokenizer, whose files are not on this machine")
        named = []
    if values.get("tokenizer_type") and not named and not values.get("vocab_size"):
        values.pop("tokenizer_type")
    if (dispatcher := values.get("moe_token_dispatcher_type")) in ("deepep", "symmetric"):
        values["moe_token_dispatcher_type"] = "alltoall"
        lines.append(
            f"with --moe-token-dispatcher-type alltoall for {dispatcher}, which needs GPUs"
        )
    missing = dict(_ASSUMED)
    preset = find_preset(name).flags if (name := model or values.get("model", "")) else {}
    if named or values.get("vocab_size") or preset:
        del missing["vocab_size"]
    positions = values.get("max_position_embeddings", preset.get("max_position_embeddings", 0))
    missing["seq_length"] = min(positions or 1024, 1024)
    if values.get("train_samples"):
        del missing["train_iters"]
    for name, value in missing.items():
        if not values.get(name):
            values[name] = value
            lines.append(f"--{name.replace('_', '-')} {value} assumed; the file leaves it open")
    return values, lines
