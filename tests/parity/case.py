"""One small training case, run under any layout: what every parity test compares.

Float64, tiny, and awkward on purpose: rows with unequal numbers of valid tokens, a whole
micro-batch with none, several micro-batches, a padded vocabulary, biases and norms that are
not at their initial values, clipping that bites, weight decay.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import Run
from mcore_train.batches.micro_batches import train_batches
from mcore_train.composition import compose
from mcore_train.layout_check.rows import Rows
from mcore_train.layout_check.trial import (
    Trial,
    build_run,
    fingerprint,
    load_folder,
    run_trial,
    train_one,
)
from mcore_train.resolution import Plan, resolve

SEQ_LENGTH = 16
VOCAB_SIZE = 50
GLOBAL_BATCH_SIZE = 12
SAVED_STEP = 1
NUM_STEPS = 3
"""Two steps after the save: the loss of the second shows what the optimizer got back."""

ROWS = Rows(
    seq_length=SEQ_LENGTH,
    vocab_size=VOCAB_SIZE,
    global_batch_size=GLOBAL_BATCH_SIZE,
    num_steps=NUM_STEPS,
    masked=range(4, 8),
)

MODEL: dict[str, Any] = {
    "num_layers": 2,
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
    "scaled_pp2": LayoutCase(2, flags={"pipeline_model_parallel_size": 2, "fp16": True}),
    "tp2": LayoutCase(2, flags={"tensor_model_parallel_size": 2}),
    "tp2_sp": LayoutCase(2, flags={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp4_two_kv_heads": LayoutCase(4, flags={"tensor_model_parallel_size": 4}),
    "pp2": LayoutCase(2, flags={"pipeline_model_parallel_size": 2}),
    "dp2": LayoutCase(2, 2),
    "cp2": LayoutCase(2, flags={"context_parallel_size": 2}),
    "zero_dp2": LayoutCase(2, 2, {"use_distributed_optimizer": True}),
    "zero3_dp3": LayoutCase(3, 2, {"use_torch_fsdp2": True}),
    "zero2_tp2_sp": LayoutCase(
        4,
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    "tp2_pp2": LayoutCase(
        4, flags={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    ),
    "tp2_dp3": LayoutCase(6, 2, {"tensor_model_parallel_size": 2}),
    "pp2_dp2_strided": LayoutCase(
        4, 2, {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True}
    ),
}
"""Layouts of the dense model; each trains on the same twelve sequences a step."""

LONG = {"tp2_dp3", "pp2_dp2_strided", "zero3_ep2_tp2"}
"""Those of the long suite: others nearly hold them."""

_SPARSE: dict[str, Any] = {**EXPERTS, "global_batch_size": 8}
SPARSE = {
    "one": LayoutCase(1, 2, {**_SPARSE}),
    "ep2": LayoutCase(2, 2, {**_SPARSE, "expert_model_parallel_size": 2}),
    "ep2_tp2": LayoutCase(
        4,
        2,
        {
            **_SPARSE,
            "expert_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
    ),
    "zero3_dp2": LayoutCase(2, 2, {**_SPARSE, "use_torch_fsdp2": True}),
    "zero3_ep2_tp2": LayoutCase(
        4,
        2,
        {
            **_SPARSE,
            "use_torch_fsdp2": True,
            "expert_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
}
"""Layouts of the model with experts. Their balancing loss is not linear in a micro-batch, so
all of them cut a step into the same micro-batches of two sequences: four, which is enough."""


_FP8: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "fp8_format": "hybrid"}

_DELAYED: dict[str, Any] = {
    **_FP8,
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 2,
    "fp8_amax_compute_algo": "max",
}
_ROWWISE: dict[str, Any] = {**_FP8, "fp8_recipe": "rowwise"}

FP8 = {
    "one": LayoutCase(flags=_FP8),
    "four_layers": LayoutCase(flags={**_FP8, "num_layers": 4}),
    "unrounded": LayoutCase(flags={**_FP8, "num_layers": 4, "fp8_format": ""}),
    "first_last": LayoutCase(flags={**_FP8, "num_layers": 4, "first_last_layers_bf16": True}),
    "recomputed": LayoutCase(flags={**_FP8, "recompute_granularity": "full"}),
    "tp2_sp": LayoutCase(
        2, flags={**_FP8, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "cp2": LayoutCase(2, flags={**_FP8, "context_parallel_size": 2}),
    "pp2_zb": LayoutCase(
        2,
        flags={**_FP8, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    ),
    "delayed": LayoutCase(flags=_DELAYED),
    "delayed_tp2_sp_recomputed": LayoutCase(
        2,
        flags={
            **_DELAYED,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "recompute_granularity": "full",
        },
    ),
    "delayed_pp2_zb": LayoutCase(
        2,
        flags={**_DELAYED, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    ),
    # The first step has no history, so micro-batches must be those of one rank.
    "delayed_dp3": LayoutCase(3, flags={**_DELAYED, "use_distributed_optimizer": True}),
    "zero3_dp3": LayoutCase(3, flags={**_FP8, "use_torch_fsdp2": True}),
    "rowwise": LayoutCase(flags=_ROWWISE),
    "rowwise_tp2": LayoutCase(2, flags={**_ROWWISE, "tensor_model_parallel_size": 2}),
    "rowwise_tp2_cp2": LayoutCase(
        4,
        flags={**_ROWWISE, "tensor_model_parallel_size": 2, "context_parallel_size": 2},
    ),
}
"""Layouts of a dense model in fp8, whose sizes on a rank are multiples of 16. In float64 the
same fp8 numbers come out of every layout: the rest of its arithmetic is too exact to round
one of them elsewhere."""


MODELS = {"dense": DENSE, "sparse": SPARSE, "fp8": FP8}


def build_plan(case: LayoutCase, *, seed: int = 1234) -> Plan:
    """Resolve a case for its world."""
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
            "seed": seed,
            **case.flags,
        }
    )
    return resolve(config, case.world_size)


def build_case(
    case: LayoutCase, *, seed: int = 1234, dtype: torch.dtype = torch.float64
) -> Run:
    """Assemble the case on this rank."""
    plan = build_plan(case, seed=seed)
    ctx = ParallelContext.build(plan.config.parallelism)
    return build_run(plan, ctx, ROWS, dtype=dtype)


def train_case(case: LayoutCase, folder: str, dtype: torch.dtype = torch.float64) -> Trial:
    """Train, save on the way, continue from the save: everything that tests compare."""
    plan = build_plan(case)
    ctx = ParallelContext.build(plan.config.parallelism)
    return run_trial(plan, ctx, ROWS, dtype=dtype, folder=Path(folder), saved_step=SAVED_STEP)


def train_rest(run: Run) -> list[float]:
    """Train the steps after the saved one; return their losses."""
    batches = train_batches(run)
    return [train_one(run, next(batches)) for _ in range(NUM_STEPS - SAVED_STEP)]


def train_in_folder(
    model: str, name: str, folder: str, dtype: torch.dtype = torch.float64
) -> dict[str, Any] | None:
    """Run one named case on this rank; only rank 0 returns, plain data that pickles."""
    trial = train_case(MODELS[model][name], str(Path(folder) / name), dtype)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return {f.name: getattr(trial, f.name) for f in fields(trial)} if is_first else None


def trained(world_size: int, *arguments: Any) -> Trial:
    """Run ``train_in_folder`` with these arguments in a world; return what rank 0 computed."""
    results = run_ranks(train_in_folder, world_size, *arguments, check_shapes=False)
    return Trial(**results[0])


def load_from(
    model: str, name: str, folder: str, sources: Sequence[str]
) -> dict[str, tuple[str, list[float]]]:
    """Load what other layouts saved into this one, without pickle, and train on.

    Returns:
        Layout that saved to the fingerprint as loaded, and the losses of the steps after.
    """
    run, found = build_case(MODELS[model][name], seed=99), {}
    for source in sources:
        # The run still holds what it trained on from the source before: all of it must go.
        with no_pickle():
            run = load_folder(run, Path(folder) / source)
        assert run.progress.iteration == SAVED_STEP
        found[source] = (fingerprint(run, with_loss_scale=False), train_rest(run))
    return found


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
        build_case(LayoutCase(4, 2 if number == 0 else 4, flags))
        for number, flags in enumerate(layouts)
    ]
    sources = [train_batches(run) for run in runs]
    losses: list[list[float]] = [[], []]
    for _ in range(NUM_STEPS):
        for number, run in enumerate(runs):
            losses[number].append(train_one(run, next(sources[number])))
    return losses
