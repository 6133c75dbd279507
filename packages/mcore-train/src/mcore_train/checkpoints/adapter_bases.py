"""Loads the base model of adapters, and selects the weights that a run saves.

A run with ``--peft`` saves its adapters and the path of their base, which is not copied. A run
whose base came from no checkpoint (random weights) saves all weights.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mcore_base.options import flag, idle_options
from mcore_base.stores import as_path, is_store
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.storage.index import ADAPTER
from mcore_models.config import config_to_dict
from mcore_models.layer_patterns import layers_skip, without_stage_marks
from mcore_models.logical_tensors import moe_layers
from mcore_models.peft.attaching import start_magnitudes
from mcore_models.peft.config import PeftConfig, is_adapter
from mcore_models.peft.quantized_base import quantize_base
from mcore_parallel.sharding import Shard
from mcore_train.assembly import Origin, Run
from mcore_train.checkpoints.origin import checkpoint_extra, find_checkpoint
from mcore_train.composition import TrainConfig, flat, parts
from mcore_train.resolution import Plan

_FREE = ("lora_dropout", "peft_base_bits")
"""Options of adapters that a resumed run may change."""

FREE = frozenset(
    (
        *("hidden_dropout", "attention_dropout", "label_smoothing", "z_loss_coeff"),
        *("max_position_embeddings", "make_vocab_size_divisible_by", "mamba_chunk_size"),
        *("init_method_std", "embedding_init_method_std"),
        *("moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_input_jitter_eps", "moe_router_load_balancing_type", "moe_router_dtype"),
        "moe_router_force_load_balancing",
        *("moe_router_bias_update_rate", "moe_expert_capacity_factor"),
        *("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
        *("moe_token_dispatcher_type", "moe_expert_rows_limit", "moe_grouped_gemm"),
        *("moe_dispatch_dtype", "moe_experts_dtype", "moe_shared_expert_overlap"),
        *("moe_split_batch_overlap", "moe_wgrad_micro_batches"),
    )
)
"""Fields that a resumed run may change, as the stored tensors keep their meaning."""


def model_shards(run: Run) -> dict[str, Shard]:
    """Return shards of this rank's weights, named ``model.<logical>``; waits for gathers."""
    described = run.data_parallel.weight_shards()
    run.data_parallel.wait_params()
    return {f"model.{name}": shard for name, shard in described.items()}


def saved_weights(run: Run) -> dict[str, Shard]:
    """Return shards of the weights to save, without those of an adapter's base."""
    shards, peft = model_shards(run), run.plan.config.peft
    return (
        {n: s for n, s in shards.items() if peft.is_trained(n)}
        if run.origin.adapter_base
        else shards
    )


def load_base(run: Run, folder: Path | None) -> Origin:
    """Load the weights of a run's base model or initial checkpoint, if it has one.

    All ranks call it together.

    Returns:
        The folder of the weights, also as ``adapter_base`` if adapters are trained on them;
        empty if there are none.

    Raises:
        ValueError: if the folder holds another model, or an adapter; or if there is no folder,
            and ``--peft-base-bits`` would round weights that the run has to save.
    """
    config = run.plan.config
    base = base_folder(config, folder)
    if base is None:
        if bits := config.peft.peft_base_bits:
            raise ValueError(
                f"--peft-base-bits {bits} needs a base model in a folder, as rounded weights "
                "are not saved: give the folder by --pretrained-checkpoint or --load."
            )
        return Origin()
    extra = checkpoint_extra(base)
    if ADAPTER in extra:
        raise ValueError(
            f"{base} holds an adapter: give the model that it adapts as "
            "--pretrained-checkpoint."
        )
    check_model(extra["model"], run.plan, base)
    has_adapters = config.peft.peft != "none"
    weights = model_shards(run)
    load_weights(run, base, {n: s for n, s in weights.items() if not is_adapter(n)})
    if has_adapters:
        for chunk in run.chunks:
            start_magnitudes(chunk, {n.removeprefix("model."): weights[n] for n in weights})
    run.optimizer.refresh(from_parameters=True)
    run.optimizer.restart_average()
    adapter_base = str(base if is_store(base) else base.resolve()) if has_adapters else ""
    return Origin(checkpoint=str(base), adapter_base=adapter_base)


def load_weights(run: Run, folder: Path, shards: Mapping[str, Shard]) -> None:
    """Load weights from a checkpoint, cast from the dtype in which they were saved."""
    load(folder, shards, ignore=("optimizer.", "rng.", "fp8."), cast=True, **load_options(run))


def load_options(run: Run) -> dict[str, Any]:
    """Return the common arguments of all loads of a run."""
    config = run.plan.config
    return {
        "world": run.ctx.world,
        "strictness": config.strictness,
        "checksums": config.loading.load_checksums,
    }


def quantize_weights(run: Run) -> None:
    """Round the loaded weights of the base to --peft-base-bits; no communication."""
    if bits := run.plan.config.peft.peft_base_bits:
        for chunk in run.chunks:
            quantize_base(chunk, bits)


def describe_adapter(run: Run) -> dict[str, Any]:
    """Describe adapters and their base for a checkpoint; empty without adapters."""
    config = run.plan.config.peft
    if config.peft == "none":
        return {}
    return {ADAPTER: {**config_to_dict(config), "base": run.origin.adapter_base}}


def check_adapter(extra: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """Raise ``ValueError`` if a checkpoint's adapters differ from the run's."""
    saved, current = extra.get(ADAPTER), config_to_dict(plan.config.peft)
    if saved is None or plan.config.peft.peft == "none":
        if saved is not None:
            raise ValueError(
                f"{folder} holds an adapter: give --peft {saved['peft']}, or convert it to a "
                "whole model first (mcore-ckpt convert)."
            )
        return
    # Checkpoints before --modules-to-save lack it.
    saved = {**config_to_dict(PeftConfig()), **saved}
    different = [
        f"{flag(name)} {saved[name]} in the checkpoint, {value} here"
        for name, value in current.items()
        if name not in _FREE and saved[name] != value
    ]
    if different:
        raise ValueError(
            f"{folder} holds another adapter ({'; '.join(different)}): leave these flags out, "
            "as --load reads them from the checkpoint."
        )


def base_folder(config: TrainConfig, folder: Path | None) -> Path | None:
    """Return the folder of the weights that are not saved; None: all weights are saved."""
    base_path = config.loading.pretrained_checkpoint
    has_adapters = config.peft.peft != "none"
    if folder is not None:
        if not has_adapters:
            return None
        saved = checkpoint_extra(folder).get(ADAPTER)
        if saved is None:
            return find_checkpoint(base_path) if base_path else folder
        base_path = base_path or saved["base"]
    if not base_path:
        return None
    base = find_checkpoint(base_path)
    if base is None:
        raise ValueError(
            f"--pretrained-checkpoint {as_path(base_path)} holds no checkpoint: give the "
            "folder of the model that the run begins from."
        )
    return base


def check_model(saved: dict[str, Any], plan: Plan, folder: Path) -> None:
    """Raise ``ValueError`` with every option in which a checkpoint's model differs."""
    current = model_description(plan)
    if (family := saved.get("family", "gpt")) != current["family"]:
        raise ValueError(
            f"{folder} holds a model of the family {family}, and this command trains "
            f"{current['family']}: use mcore-train {family}."
        )
    if (experts := current["moe"]["num_experts"]) and not saved["moe"].get("num_experts", 0):
        raise ValueError(
            f"{folder} holds a dense model: make it one with experts (mcore-ckpt upcycle "
            f"{folder} --output DIR --num-experts {experts}), and load that, or leave "
            "--num-experts out."
        )
    # Fields of a part that is off are ignored.
    idle = idle_options(flat(plan.config), map(type, parts(plan.config)))
    different = []
    has_same_depth = saved["config"].get("num_layers") == plan.config.model.num_layers
    for part, owner in (("config", plan.config.model), ("moe", plan.config.experts)):
        # A description leaves defaults out, and JSON has lists instead of tuples.
        defaults = {f.name: f.default for f in fields(owner)}
        for name, value in current[part].items():
            default = defaults[name]
            saved_value = saved[part].get(
                name, list(default) if type(default) is tuple else default
            )
            if name in FREE | idle or saved_value == value:
                continue
            if not (has_same_depth and _is_same_layers(name, saved_value, value, plan)):
                different.append(f"{name}: {saved_value} in the checkpoint, {value} here")
    if saved["vocab_size"] != current["vocab_size"]:
        different.append(
            f"vocab_size: {saved['vocab_size']} in the checkpoint, {current['vocab_size']} here"
        )
    if different:
        raise ValueError(
            f"{folder} holds another model ({'; '.join(different)}): leave these flags out, as "
            "--load reads the model's shape from the checkpoint, or load another checkpoint."
        )


def _is_same_layers(name: str, saved: str, current: str, plan: Plan) -> bool:
    """Whether two values of a field describe the same layers; stage marks are layout."""
    num_layers = plan.config.model.num_layers
    if name == "hybrid_override_pattern":
        return without_stage_marks(saved) == without_stage_marks(current)
    if name == "moe_layer_freq":
        return (
            len(
                {
                    moe_layers(replace(plan.config.experts, moe_layer_freq=text), num_layers)
                    for text in (saved, current)
                }
            )
            == 1
        )
    if name in ("window_attn_skip_freq", "rope_skip_freq"):
        ones = name == "rope_skip_freq"
        return (
            len({layers_skip(text, num_layers, name, ones=ones) for text in (saved, current)})
            == 1
        )
    return False


def model_description(plan: Plan) -> dict[str, Any]:
    """Describe a plan's model as plain data, from which any layout can build the model."""
    pattern = plan.config.model.hybrid_override_pattern
    marks = {"hybrid_override_pattern": without_stage_marks(pattern)}
    return {
        "family": plan.family.name,
        "vocab_size": plan.vocab_size,
        "config": config_to_dict(plan.config.model) | marks,
        "moe": config_to_dict(plan.config.experts),
    }
