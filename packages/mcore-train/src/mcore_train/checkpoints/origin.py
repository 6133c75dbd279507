"""Finds the checkpoint that ``--load`` refers to, and reads its model's options.

Only the index is read, without torch, so that a command line is complete before tensors are
loaded.
"""

import dataclasses
import json
import logging
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mcore_base.options import types_of
from mcore_base.stores import as_path, is_store
from mcore_ckpt.storage.index import ADAPTER, read_index
from mcore_ckpt.storage.paths import (
    RELEASE,
    is_complete,
    is_hf_folder,
    latest_step,
    newest_step,
    resolve_folder,
)
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_models.layer_patterns import without_stage_marks
from mcore_train.composition import TrainConfig
from mcore_train.config import LoadConfig
from mcore_train.options.recipe import Value

if TYPE_CHECKING:  # they load NumPy, which help does without
    from mcore_data.tracing.data_plan import BatchSizePhase
    from mcore_train.resolution import Plan

log = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which a Hugging Face folder with a tokenizer has at least one."""


def find_checkpoint(load: str, step: int = 0) -> Path | None:
    """Return the step folder of ``--load`` and ``--ckpt-step``.

    Returns:
        None if the folder holds no checkpoint, so that a run may start without one.

    Raises:
        ValueError: if the named checkpoint does not exist or is not complete, or is a file.
    """
    folder = as_path(load)
    if folder.is_file():
        raise ValueError(f"--load {load} is a file: give a run folder or a step folder.")
    nothing_yet = not folder.is_dir() or newest_step(folder) is None
    if nothing_yet and not step and not is_complete(folder) and not is_hf_folder(folder):
        return None
    return resolve_folder(folder, step)


def checkpoint_extra(folder: Path) -> Mapping[str, Any]:
    """Return the description of a checkpoint: its model, and the progress of its run.

    Args:
        folder: from ``find_checkpoint``; a Hugging Face folder describes only the model.
    """
    if is_hf_folder(folder):
        from mcore_ckpt.save_load.loading import describe_checkpoint  # imports torch

        return describe_checkpoint(folder).extra
    return read_index(folder).extra


def carried_files(config: TrainConfig, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files that checkpoints of a run copy from its origin; no communication.

    Args:
        config: of the run.
        tokenizer: the run's; None: none.

    Returns:
        ``generation_config.json``, which holds the ids of tokens that end a text; empty if the
        origin has no such file, or another tokenizer.
    """
    from mcore_ckpt.formats.hf_folder import GENERATION  # imports torch

    loading = starting_point(config)
    folder = find_checkpoint(loading.load, loading.ckpt_step) if loading.load else None
    if folder is None and loading.pretrained_checkpoint:
        folder = find_checkpoint(loading.pretrained_checkpoint)
    if folder is None or not (folder / GENERATION).is_file():
        return {}
    inner = folder / "tokenizer"
    origin = inner if inner.is_dir() else folder
    if tokenizer is not None and not _is_same(config, tokenizer, origin):
        log.warning(
            "%s is left out of this run's checkpoints: its end tokens are ids of another "
            "tokenizer than the run's, or of a tokenizer that is not in %s.",
            *(folder / GENERATION, origin),
        )
        return {}
    return {GENERATION: (folder / GENERATION).read_bytes()}


def _is_same(config: TrainConfig, tokenizer: Tokenizer, origin: Path) -> bool:
    """Whether a run's tokenizer is the one in a folder, which may be in an object store."""
    from mcore_ckpt.formats.hf_folder import small_files  # imports torch

    tokenizer_path = config.tokenizer.tokenizer_model
    if (
        tokenizer_path
        and not is_store(origin)
        and Path(tokenizer_path).resolve() == origin.resolve()
    ):
        return True
    with tempfile.TemporaryDirectory() as copy:
        if is_store(origin):
            for name, content in small_files(origin)[0].items():
                (Path(copy) / name).parent.mkdir(exist_ok=True)
                (Path(copy) / name).write_bytes(content)
            origin = Path(copy)
        try:
            return load_tokenizer(origin).fingerprint() == tokenizer.fingerprint()
        except (ValueError, OSError, ImportError):
            return False


def starting_point(config: TrainConfig) -> LoadConfig:
    """Return the loading options; with ``--auto-resume``, of ``--save`` if it has a step."""
    loading, save = config.loading, config.saving.save
    if not loading.auto_resume or not save or find_checkpoint(save) is None:
        return loading
    return dataclasses.replace(loading, load=save, ckpt_step=0, finetune=False)


def start_kind(config: TrainConfig) -> Literal["", "weights", "run"]:
    """Return what a run loads: nothing, the weights of a model, or the state of a run."""
    loading = starting_point(config)
    folder = find_checkpoint(loading.load, loading.ckpt_step) if loading.load else None
    if folder is None:
        return "weights" if loading.pretrained_checkpoint else ""
    has_state = "iteration" in checkpoint_extra(folder)
    return "run" if has_state and not loading.finetune else "weights"


def loads_from_save(config: TrainConfig) -> bool:
    """Whether a run starts from the run folder in ``--save`` or one of its steps."""
    load = starting_point(config).load
    if not load:
        return False
    source, target = as_path(load), as_path(config.saving.save)
    if not is_store(target) and not is_store(source):
        source, target = source.resolve(), target.resolve()
    return target in (source, source.parent)


def continues_saved_run(config: TrainConfig) -> bool:
    """Whether a run continues the one in ``--save`` and its count of steps."""
    counts_anew = starting_point(config).finetune and latest_step(config.saving.save) != RELEASE
    return loads_from_save(config) and not counts_anew


def checkpoint_fields(
    load: str, step: int = 0, config_type: type[TrainConfig] = TrainConfig
) -> dict[str, Value]:
    """Return the model's options from a checkpoint's index, as a flat table.

    Args:
        load: run folder, step folder or Hugging Face folder.
        step: step in a run folder; 0: the latest.
        config_type: defines the fields of model and experts.

    Returns:
        The fields that differ from their defaults or have none, and the tokenizer's folder;
        empty without a checkpoint or without a model in its description.

    Raises:
        ValueError: if the named checkpoint does not exist.
    """
    folder = find_checkpoint(load, step)
    if folder is None:
        return {}
    extra = checkpoint_extra(folder)
    table = model_fields(extra.get("model", {}), config_type)
    adapter = dict(extra.get(ADAPTER, {}))
    base = adapter.pop("base", "")
    described_in = as_path(base) if is_hf_folder(folder) and base else folder
    if is_hf_folder(described_in) and not _has_balancing_loss(described_in):
        table.pop("moe_aux_loss_coeff", None)
    if adapter:
        table |= adapter | ({"pretrained_checkpoint": base} if base else {})
    if is_hf_folder(folder) and any((folder / name).is_file() for name in TOKENIZERS):
        table["tokenizer_model"] = str(folder)
    # Tokenizer libraries cannot open a folder in an object store.
    if (folder / "tokenizer").is_dir() and not is_store(folder):
        table["tokenizer_model"] = str(folder / "tokenizer")
    return table


def _has_balancing_loss(folder: Path) -> bool:
    """Whether transformers adds a mixture's balancing loss to the loss of a folder's model."""
    return bool(json.loads((folder / "config.json").read_text()).get("output_router_logits"))


def describe_balancing_loss(config: TrainConfig, given: Collection[str], source: str) -> str:
    """Return the log line about a loaded mixture's balancing loss and its origin.

    Args:
        config: of the run.
        given: options of its command line and recipes, by name.
        source: folder of the model.
    """
    experts, option = config.experts, "--moe-aux-loss-coeff"
    kind, weight = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    if weight and kind not in ("none", "sinkhorn"):
        origin = "the command line" if "moe_aux_loss_coeff" in given else source
        return f"balancing loss of experts: {kind} x {weight:g}, from {origin}"
    folder = find_checkpoint(source)
    coefficient = 0.0
    if folder is not None and is_hf_folder(folder):
        moe = checkpoint_extra(folder)["model"].get("moe", {})
        coefficient = moe.get("moe_aux_loss_coeff", 0.0)
    if not coefficient or "moe_aux_loss_coeff" in given:
        return "balancing loss of experts: none"
    return (
        f"balancing loss of experts: none, as in transformers, which adds that of {source} "
        f"({coefficient:g}) only with output_router_logits; {option} {coefficient:g} adds it"
    )


def model_fields(
    description: dict[str, Any], config_type: type[TrainConfig] = TrainConfig
) -> dict[str, Value]:
    """Return the flat fields that build the model of a checkpoint's description."""
    table: dict[str, Value] = {}
    if not description:
        return table
    parts = types_of(config_type)
    for part, values in (("model", "config"), ("experts", "moe")):
        for field in dataclasses.fields(parts[part]):
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            value = description[values].get(field.name, default)
            if field.name == "hybrid_override_pattern":
                value = without_stage_marks(value)  # older checkpoints kept them
            if value != default:
                table[field.name] = value
    table["vocab_size"] = description["vocab_size"]
    return table


def continue_plan(plan: "Plan") -> "Plan":
    """Return the plan with lengths counted by the batch sizes of the run to continue.

    Reads the checkpoint's index.
    """
    from mcore_data.tracing.data_plan import PLAN_FILE

    if (folder := _step_to_continue(plan.config)) is None:
        return plan
    extra, file = checkpoint_extra(folder), folder / PLAN_FILE
    text = file.read_text("utf-8") if file.is_file() else ""
    return plan.continue_after(batch_sizes(extra, text), extra["iteration"])


def check_schedule(plan: "Plan") -> None:
    """Check that the checkpoint's learning-rate schedule is that of the flags; reads the index.

    A run with local checkpoints is checked when it loads, since the step on its disks may be
    newer than that of ``--load``.

    Raises:
        ValueError: with the fields that differ, as ``reconcile``.
    """
    from mcore_train.updating.lr_schedule import reconcile

    config = plan.config
    folder = _step_to_continue(config)
    if folder is None or config.local_saving.non_persistent_local_ckpt_dir:
        return
    extra, continued = checkpoint_extra(folder), continue_plan(plan)
    reconcile(extra["schedule"], continued.schedule, config.schedule, extra["schedule_samples"])


def _step_to_continue(config: TrainConfig) -> Path | None:
    """Return the step folder whose count of steps a run continues; None: none."""
    options = starting_point(config)
    folder = find_checkpoint(options.load, options.ckpt_step) if options.load else None
    if folder is None or options.finetune or is_hf_folder(folder):
        return None
    extra = checkpoint_extra(folder)
    is_base = config.peft.peft != "none" and ADAPTER not in extra
    return None if is_base or "iteration" not in extra else folder


def batch_sizes(extra: Mapping[str, Any], data_plan_text: str) -> "list[BatchSizePhase]":
    """Return the batch sizes of a checkpoint's run, from its first step on.

    Args:
        extra: the checkpoint's description.
        data_plan_text: the checkpoint's data plan, which older checkpoints have instead; empty:
            none.
    """
    from mcore_data.tracing.data_plan import BatchSizePhase, parse_plan

    if "stretches" in extra:
        return [BatchSizePhase(*numbers) for numbers in extra["stretches"]]
    return list(parse_plan(data_plan_text).stretches) if data_plan_text else []
