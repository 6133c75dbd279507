"""One small training case, run under any layout: what every parity test compares.

Float64, tiny, and awkward on purpose: rows with unequal numbers of valid tokens, a whole
micro-batch with none, several micro-batches, a padded vocabulary, biases and norms that are
not at their initial values, clipping that bites, weight decay.
"""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import fill_parameter_
from mcore_parallel.sharding import named_parameters, named_shards
from mcore_parallel.testing import gather_logical
from mcore_train.assembly import Datasets, Run, assemble
from mcore_train.composition import compose
from mcore_train.config import LoadConfig
from mcore_train.loop import train_batches
from mcore_train.lr_schedule import learning_rate, weight_decay
from mcore_train.resolution import resolve
from mcore_train.resuming import load_run, model_shards, optimizer_shards, save_run
from mcore_train.step import backward, train_step

SEQ_LENGTH = 16
VOCAB_SIZE = 50
GLOBAL_BATCH_SIZE = 12
SAVED_STEP = 3
NUM_STEPS = 5

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "add_bias_linear": True,
    "make_vocab_size_divisible_by": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2,
    "moe_ffn_hidden_size": 24,
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class LayoutCase:
    """A layout and what it needs: flags beside the model's, and ranks."""

    world_size: int = 1
    micro_batch_size: int = 4
    flags: dict[str, Any] = field(default_factory=dict)


DENSE = {
    "one": LayoutCase(),
    "tp2": LayoutCase(2, flags={"tensor_model_parallel_size": 2}),
    "tp2_sp": LayoutCase(2, flags={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp4_two_kv_heads": LayoutCase(4, flags={"tensor_model_parallel_size": 4}),
    "pp2": LayoutCase(2, flags={"pipeline_model_parallel_size": 2}),
    "dp2": LayoutCase(2, 2),
    "cp2": LayoutCase(2, flags={"context_parallel_size": 2}),
    "zero_dp2": LayoutCase(2, 2, {"use_distributed_optimizer": True}),
    "tp2_pp2": LayoutCase(
        4, flags={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    ),
    "tp2_dp3": LayoutCase(6, 2, {"tensor_model_parallel_size": 2}),
    "pp2_dp2_strided": LayoutCase(
        4, 2, {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True}
    ),
}
"""Layouts of the dense model; each trains on the same twelve sequences a step."""

SPARSE = {
    "one": LayoutCase(1, 2, {**EXPERTS}),
    "ep2": LayoutCase(2, 2, {**EXPERTS, "expert_model_parallel_size": 2}),
    "ep2_tp2": LayoutCase(
        4,
        2,
        {
            **EXPERTS,
            "expert_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
    ),
}
"""Layouts of the model with experts. Their balancing loss is not linear in a micro-batch, so
all of them cut a step into the same micro-batches of two sequences."""


MODELS = {"dense": DENSE, "sparse": SPARSE}


@dataclass(frozen=True)
class Outcome:
    """What one layout computed; logical tensors, whole."""

    losses: list[float]
    """Of every step."""
    aux_loss: float
    grad_norm: float
    """Of the first step, before clipping."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, finished, before clipping."""
    updates: dict[str, torch.Tensor]
    """Weights after three steps minus weights before."""
    initial: dict[str, torch.Tensor]
    saved: str
    """Fingerprint of weights and optimizer as saved."""
    final: str
    """Fingerprint after all steps in one go."""
    resumed: str
    """Fingerprint after all steps, stopped and continued on the way."""


class Rows:
    """Sequences by number: random tokens, and masks that differ from row to row."""

    def __len__(self) -> int:
        return GLOBAL_BATCH_SIZE * NUM_STEPS

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        text = np.random.default_rng(sample).integers(0, VOCAB_SIZE, SEQ_LENGTH + 1)
        place = np.arange(SEQ_LENGTH)
        mask = (place < SEQ_LENGTH - 3 * (sample % 4)) & ((5 * place + sample) % 7 != 0)
        if sample % GLOBAL_BATCH_SIZE in (4, 5, 6, 7):
            mask[:] = False
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": mask.astype(np.float32),
            "position_ids": place,
        }


def build_run(
    case: LayoutCase,
    *,
    ctx: ParallelContext | None = None,
    save: str = "",
    load: str = "",
    seed: int = 1234,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Assemble the case on this rank, with nothing at a value that would hide a fault."""
    config = compose(
        {
            **MODEL,
            "seq_length": SEQ_LENGTH,
            "vocab_size": VOCAB_SIZE,
            "micro_batch_size": case.micro_batch_size,
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "train_iters": NUM_STEPS,
            "lr": 1e-2,
            "lr_decay_style": "cosine",
            "weight_decay": 0.1,
            "clip_grad": 0.5,
            "mock_data": True,
            "num_workers": 0,
            "save": save,
            "load": load,
            "seed": seed,
            **case.flags,
        }
    )
    ctx = ctx or ParallelContext.build(config.parallelism)
    plan = resolve(config, case.world_size)
    run = assemble(plan, ctx, datasets=Datasets(train=Rows()), dtype=dtype)
    for chunk in run.chunks:
        for named in named_parameters(chunk):
            if all(len(part.shape) == 1 for part in named.layout.parts):
                before = named.parameter.detach().clone()
                fill_parameter_(named, seed=seed + 1, std=0.2)
                with torch.no_grad():
                    named.parameter.add_(before)
    return run


def one_step(run: Run, batches) -> float:
    """Train one step; return the mean token loss over the whole step."""
    schedule, samples = run.plan.schedule, run.schedule_samples
    result = train_step(
        run, next(batches), learning_rate(schedule, samples), weight_decay(schedule, samples)
    )
    run.iteration += 1
    run.consumed_train_samples += GLOBAL_BATCH_SIZE
    run.schedule_samples += GLOBAL_BATCH_SIZE
    return world_loss(run, result.loss)


def world_loss(run: Run, share: torch.Tensor) -> float:
    """Sum a loss over data, context and pipeline ranks; equal on tensor ranks."""
    shares = gather_numbers(run, float(share))
    return sum(shares) / run.ctx.tp.size


def gather_numbers(run: Run, number: float) -> list[float]:
    """Collect one number from every rank."""
    if run.ctx.world.size == 1:
        return [number]
    numbers = [torch.zeros(1, dtype=torch.float64) for _ in range(run.ctx.world.size)]
    torch.distributed.all_gather(
        numbers, torch.tensor([number], dtype=torch.float64), group=run.ctx.world.group
    )
    return [float(n) for n in numbers]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Gather the whole model, by logical name."""
    found = {}
    for chunk in run.chunks:
        found |= named_shards(chunk, run.ctx.data_axes())
    return gather_logical(found, run.ctx.world)


def fingerprint(run: Run) -> str:
    """Hash every bit of weights and optimizer, whatever the layout."""
    state = gather_logical(model_shards(run) | optimizer_shards(run), run.ctx.world)
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_case(case: LayoutCase, folder: str, dtype: torch.dtype = torch.float64) -> Outcome:
    """Train, save on the way, continue from the save: everything that tests compare."""
    run = build_run(case, save=folder, dtype=dtype)
    initial = weights(run)
    batches = train_batches(run)
    losses = backward(run, first := next(batches))
    gradients = gather_logical(run.data_parallel.grad_shards(), run.ctx.world)
    norm = float(run.optimizer.grad_norm())
    aux_loss = sum(gather_numbers(run, float(losses.aux_loss)))
    told = [one_step(run, iter([first]))]
    told += [one_step(run, batches) for _ in range(SAVED_STEP - 1)]
    after = weights(run)
    saved = fingerprint(run)
    save_run(run)
    told += [one_step(run, batches) for _ in range(NUM_STEPS - SAVED_STEP)]
    final = fingerprint(run)
    again = build_run(case, ctx=run.ctx, seed=99, dtype=dtype)
    continue_to_end(again, folder)
    return Outcome(
        losses=told,
        aux_loss=aux_loss,
        grad_norm=norm,
        gradients=gradients,
        updates={name: after[name] - initial[name] for name in after},
        initial=initial,
        saved=saved,
        final=final,
        resumed=fingerprint(again),
    )


def continue_to_end(run: Run, folder: str) -> list[float]:
    """Load a checkpoint into a run of another seed and train the remaining steps."""
    load_step(run, folder)
    batches = train_batches(run)
    return [one_step(run, batches) for _ in range(NUM_STEPS - SAVED_STEP)]


def train_in_folder(model: str, name: str, folder: str) -> dict[str, Any] | None:
    """Run one named case on this rank; only rank 0 returns, plain data that pickles."""
    outcome = train_case(MODELS[model][name], str(Path(folder) / name))
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return {f.name: getattr(outcome, f.name) for f in fields(outcome)} if is_first else None


def load_from_all(model: str, name: str, folder: str) -> dict[str, tuple[str, list[float]]]:
    """Load what every layout saved into this one, without pickle, and train on.

    Returns:
        Layout that saved to the fingerprint as loaded, and the losses of the steps after.
    """
    run, found = build_run(MODELS[model][name], seed=99), {}
    for source in MODELS[model]:
        # The run still holds what it trained on from the source before: all of it must go.
        with no_pickle():
            load_step(run, str(Path(folder) / source))
        loaded = fingerprint(run)
        batches = train_batches(run)
        losses = [one_step(run, batches) for _ in range(NUM_STEPS - SAVED_STEP)]
        found[source] = (loaded, losses)
    return found


def load_step(run: Run, folder: str) -> None:
    """Point a run at a folder and load it."""
    run.plan = replace(
        run.plan, config=replace(run.plan.config, loading=LoadConfig(load=folder))
    )
    assert load_run(run)
    assert run.iteration == SAVED_STEP


@contextmanager
def no_pickle() -> Iterator[None]:
    """Make every way of reading a pickle raise."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a pickle was read")

    names = ("load", "loads", "Unpickler")
    before = [getattr(pickle, name) for name in names]
    for name in names:
        setattr(pickle, name, refuse)
    try:
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(pickle, name, function)


def train_in_two_contexts() -> list[list[float]]:
    """Train two models of different layouts in turn, in one process."""
    layouts = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    ]
    runs = [
        build_run(LayoutCase(4, 2 if number == 0 else 4, flags))
        for number, flags in enumerate(layouts)
    ]
    sources = [train_batches(run) for run in runs]
    losses: list[list[float]] = [[], []]
    for _ in range(NUM_STEPS):
        for number, run in enumerate(runs):
            losses[number].append(one_step(run, sources[number]))
    return losses
