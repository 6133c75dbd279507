"""Describes a run at its start: model, layout, devices, versions, data, saves."""

import os
import platform
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.epochs import EpochsDataset
from mcore_data.datasets.packing import PackedDataset
from mcore_models.flops import num_active_parameters, num_parameters
from mcore_parallel.launch import launcher
from mcore_train.assembly import Run
from mcore_train.composition import TrainConfig
from mcore_train.diagnosis.memory import planned_bytes
from mcore_train.options.recipe import changed_options, to_flags
from mcore_train.reporting.log import Header
from mcore_train.resolution import Plan, layout_degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Documents and tokens of one stored dataset, and the number of times a run reads them."""

    prefix: str
    """Prefix of the files; "" for mock data."""
    documents: int
    """Documents in the training split."""
    tokens: int
    """Tokens in the training split."""
    epochs: float
    """Number of times that the whole run reads the split."""


class StartClock:
    """Seconds of the parts of a start, in order, up to the first step.

    Attributes:
        parts_s: seconds by part.
    """

    def __init__(self, *, since_process_began: bool = True) -> None:
        age_s = process_age_s() if since_process_began else 0.0
        self.parts_s: dict[str, float] = {}
        self._last_s = time.monotonic() - age_s

    def end(self, part: str) -> None:
        """Record the seconds since the end of the previous part, or since the start."""
        now_s = time.monotonic()
        self.parts_s[part] = round(now_s - self._last_s, 2)
        self._last_s = now_s


def process_age_s() -> float:
    """Return the seconds since this process was started; 0 without Linux's /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def build_header(run: Run, start: StartClock) -> Header:
    """Describe a run before training; gathers the names of devices over the world.

    Args:
        run: to describe.
        start: parts of its start so far.
    """
    plan, config = run.plan, run.plan.config
    devices = Counter(gather_json(_device_name(run.ctx.device), run.ctx.world))
    model = config.model, plan.vocab_size, config.experts, plan.family.tensor_shapes
    size, active = num_parameters(*model), num_active_parameters(*model)
    layout, versions = layout_degrees(plan), _versions()
    shares = list(read_shares(run))
    first = run.progress.iteration + 1
    now = plan.ramp.size_at(run.progress.consumed_train_samples)
    grows = f"{now} to " if now != plan.global_batch_size else ""
    sizes = f"{grows}{plan.global_batch_size} x {config.batch.seq_length}"
    samples = max(0, plan.train_samples - run.progress.consumed_train_samples)
    tokens = samples * config.batch.seq_length
    lines = (
        f"model: {plan.family.name}, {size:,} parameters"
        + (f", {active:,} of them for a token" if active != size else "")
        + f", vocabulary of {plan.vocab_size:,}, padded to {plan.padded_vocab_size:,}",
        f"command: {_command(plan)}",
        f"format: {_format(plan)}",
        *_expert_wgrads_line(plan),
        f"layout: {plan.world_size} rank{'s' * (plan.world_size > 1)}: "
        + ", ".join(f"{name} {degree}" for name, degree in layout.items())
        + f", sharding {config.data_parallelism.sharding}",
        "devices: " + ", ".join(f"{number} x {name}" for name, number in devices.items()),
        f"seed: {config.run.seed}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"steps: {first} to {plan.train_iters} of {sizes} tokens, {tokens:,} tokens to read",
        *(_data_line(share) for share in shares),
        f"saves: {_saves(config)}",
        f"start: {sum(start.parts_s.values()):.1f} s: "
        + ", ".join(f"{part} {took_s:.1f}" for part, took_s in start.parts_s.items()),
    )
    row = {
        "parameters": size,
        "active_parameters": active,
        "format": _format(plan),
        "moe_wgrad_micro_batches": config.experts.num_wgrads_together
        if plan.expert_wgrads is None
        else plan.expert_wgrads.num_together,
        "world_size": plan.world_size,
        "layout": layout,
        "devices": dict(devices),
        "seed": config.run.seed,
        "versions": versions,
        "data": [asdict(share) for share in shares],
        "save_interval": config.saving.save_interval,
        "planned_gib": sum(planned_bytes(plan).values()) / 2**30,
        "options": changed_options(config),
        "start_s": start.parts_s,
    }
    return Header(lines=lines, row=row)


def _command(plan: Plan) -> str:
    """Return the command line that starts the run on each of its hosts."""
    ranks = launcher.read_environment()
    words = ["mcore-train"]
    if ranks.world_size > 1:
        hosts = ranks.world_size // ranks.local_world_size
        words = ["torchrun", "--nproc-per-node", str(ranks.local_world_size)]
        if hosts > 1:
            words += ["--nnodes", str(hosts), "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", f"{platform.node()}:29500"]  # torchrun's usual port
        words += ["-m", "mcore_train"]
    return shlex.join([*words, plan.family.name, *to_flags(changed_options(plan.config))])


def pace_line(run: Run, step_ms: float) -> str:
    """Describe the time of a step, and from it the time between saves and to the end.

    Args:
        run: the run at its current step.
        step_ms: mean time of the steps, without the first.
    """
    left = run.plan.train_iters - run.progress.iteration
    interval, is_saved = run.plan.config.saving.save_interval, run.plan.config.saving.save
    line = f"a step takes {step_ms:.3g} ms: {_duration(step_ms * left)} to the end"
    if is_saved and interval:
        return f"{line}, {_duration(step_ms * interval)} between saves"
    return f"{line}, without a save before" if is_saved else line


def read_shares(run: Run) -> Iterator[SourceShare]:
    """Yield the share of each stored dataset; nothing for batches of the caller."""
    if not run.datasets.sources:
        return
    dataset = run.datasets.train
    if run.plan.config.objective.reference_cache:
        dataset = dataset.dataset  # the dataset without the cached reference entries
    yield from _shares(dataset, run.plan.train_samples, run.plan.config.batch.seq_length)


def _shares(dataset: Any, num_samples: int, seq_length: int) -> Iterator[SourceShare]:
    if isinstance(dataset, OrderedBlend):
        for part, number in zip(dataset.datasets, dataset.ledger(num_samples), strict=True):
            yield from _shares(part, number, seq_length)
        return
    inner = dataset.epoch(0) if isinstance(dataset, EpochsDataset) else dataset
    lengths, ids = inner.sequences.lengths, inner.document_ids
    if isinstance(ids, range):
        ids = slice(ids.start, ids.stop)
    lengths = lengths[ids]
    tokens = int(lengths.sum(dtype=np.int64))
    epochs = num_samples * seq_length / max(1, tokens)
    if isinstance(dataset, EpochsDataset | PackedDataset):
        epochs = num_samples / dataset.per_epoch
    prefix = getattr(inner.sequences, "prefix", "")
    yield SourceShare(prefix=prefix, documents=len(lengths), tokens=tokens, epochs=epochs)


def _data_line(share: SourceShare) -> str:
    return (
        f"data: {share.prefix or 'mock data'}, {share.documents:,} documents, "
        f"{share.tokens:,} tokens to train on, read {share.epochs:.3g} times"
    )


def _duration(time_ms: float) -> str:
    minutes = time_ms / 60e3
    if minutes < 2:
        return f"{60 * minutes:.1f} s"
    return f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


def _expert_wgrads_line(plan: Plan) -> Iterator[str]:
    """Yield the choice for --moe-wgrad-micro-batches auto with its reason, if there is one."""
    if chosen := plan.expert_wgrads:
        yield (
            f"weight gradients of experts: {chosen.num_together} "
            f"micro-batch{'es' * (chosen.num_together > 1)} at once "
            f"(--moe-wgrad-micro-batches auto): {chosen.reason}"
        )


def _format(plan: Plan) -> str:
    fp8 = plan.config.fp8
    return f"{plan.dtype}, fp8 {fp8.fp8_recipe}" if fp8.fp8_format else plan.dtype


def _saves(config: TrainConfig) -> str:
    save, interval = config.saving.save, config.saving.save_interval
    if not save:
        return "none, without --save"
    return f"every {interval} steps to {save}" if interval else f"at the end, to {save}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions() -> dict[str, str]:
    from mcore_train import __version__

    versions = {"mcore-train": str(__version__), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["CUDA"] = str(torch.version.cuda)
    return versions | {"Python": platform.python_version()}
