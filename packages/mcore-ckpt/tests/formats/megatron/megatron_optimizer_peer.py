"""A program of its own: megatron-core trains tiny models on two ranks, saves, and goes on.

    python megatron_optimizer_peer.py save|load FOLDER LOCAL

``save`` trains three steps of each kind, saves into FOLDER and trains three more; ``load``
begins with other weights, loads FOLDER and trains those three. The rows to train on are
LOCAL/rows.safetensors; the losses go to LOCAL/VERB_KIND.json. Runs where megatron-core is
installed, on the CPU: it asks for a GPU in many places, and ``AsIfCuda`` answers.
"""

import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

KINDS = {
    "sharded": (torch.bfloat16, "fully_reshardable"),
    "sharded_fp32": (torch.float32, "fully_reshardable"),
    "whole": (torch.bfloat16, ""),
    "whole_fp32": (torch.float32, ""),
    "buckets": (torch.bfloat16, "dp_reshardable"),
}
"""Dtype of the weights, and the form of the distributed optimizer's state; empty: it is not
distributed."""

LOADED = ("sharded", "sharded_fp32")
"""Kinds that are loaded again."""

SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 14,
}
VOCAB_SIZE, SEQ_LENGTH, BATCH, STEPS, SAVED = 128, 16, 4, 6, 3
SCHEDULE = {
    "init_lr": 0.0,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_steps": BATCH,
    "lr_decay_steps": STEPS * BATCH,
    "lr_decay_style": "cosine",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": STEPS * BATCH,
    "wd_incr_style": "constant",
}


class AsIfCuda(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and calls it what is expected."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        is_type = function is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_type else found


class Nothing:
    """A stream, an event: whatever is asked of it, nothing is done."""

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        return self


def join(rank: int, world_size: int, meeting: Path) -> None:
    """Meet the other ranks, and prepare megatron-core for a machine without a GPU."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.stream = lambda *_: nullcontext()
    for name in ("current_stream", "default_stream", "Stream", "Event", "empty_cache"):
        setattr(torch.cuda, name, Nothing())
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=f"file://{meeting}"
    )
    os.environ.setdefault("LOCAL_RANK", str(rank))
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    # Torch's Adam, unlike Transformer Engine's, keeps its count of steps with each weight; a
    # load looks there for one that the format has for all.
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = (
        lambda self, parameter, tensors: set_state(self, parameter, {"step": None, **tensors})
    )


def main() -> None:
    """Start two ranks."""
    verb, folder, local = sys.argv[1:]
    mp.spawn(_rank, (verb, Path(folder), Path(local)), nprocs=2)


def _rank(rank: int, verb: str, folder: Path, local: Path) -> None:
    join(rank, 2, local.resolve() / f"meeting_{verb}")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rows = load_file(local / "rows.safetensors")
    for kind in KINDS if verb == "save" else LOADED:
        torch.manual_seed(100 + rank if verb == "save" else 200 + rank)
        with AsIfCuda():
            losses = _train(kind, verb, folder / kind, rows)
        if rank == 0:
            (local / f"{verb}_{kind}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def _train(kind: str, verb: str, place: Path, rows: dict[str, torch.Tensor]) -> list[float]:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    dtype, form = KINDS[kind]
    model, optimizer = _model_and_optimizer(dtype, bool(form))
    scheduler = OptimizerParamScheduler(optimizer, **SCHEDULE)
    metadata = {"chained_optim_avoid_prefix": True}
    metadata |= {"distrib_optim_sharding_type": form} if form else {}

    def state(is_loading: bool) -> dict:
        weights = model.module.sharded_state_dict(metadata=metadata)
        moments = optimizer.sharded_state_dict(weights, is_loading, metadata=metadata)
        return {"model": weights, "optimizer": moments}

    def step_on(step: int) -> float:
        mine = slice(step * BATCH, (step + 1) * BATCH)
        batch = {name: tensor[mine] for name, tensor in rows.items()}
        model.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
        each = model(batch["tokens"], positions, None, labels=batch["labels"]).float()
        loss = (each * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        scheduler.step(BATCH)
        return float(loss)

    if verb == "load":
        # Without a step torch's Adam has no state, and megatron-core fails to describe none.
        step_on(0)
        step = int((place / "latest_checkpointed_iteration.txt").read_text())
        loaded = dist_checkpointing.load(state(True), str(place / f"iter_{step:07d}"))
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        # It puts one count into the states of all weights, which each of them then raises.
        for own in optimizer.chained_optimizers[0].optimizer.state.values():
            own["step"] = own["step"].clone()
        scheduler.num_steps = 0  # a load counts on from here
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
        assert loaded["iteration"] == step == SAVED
        assert loaded["args"].consumed_train_samples == SAVED * BATCH
        return [step_on(step) for step in range(SAVED, STEPS)]
    losses = [step_on(step) for step in range(SAVED)]
    whole = state(False) | {"args": _arguments(), "iteration": SAVED}
    whole |= {"opt_param_scheduler": scheduler.state_dict(), "checkpoint_version": 3.0}
    place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(whole, str(place))
    return losses + [step_on(step) for step in range(SAVED, STEPS)]


def _model_and_optimizer(dtype: torch.dtype, is_sharded: bool) -> tuple:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    is_half = dtype == torch.bfloat16
    config = TransformerConfig(
        **SIZES,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=is_half,
        params_dtype=dtype,
    )
    model = GPTModel(
        config,
        specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    reducing = DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded, grad_reduce_in_fp32=True
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=SCHEDULE["max_lr"],
        min_lr=SCHEDULE["min_lr"],
        weight_decay=SCHEDULE["end_wd"],
        bf16=is_half,
        params_dtype=dtype,
        use_distributed_optimizer=is_sharded,
        clip_grad=1.0,
    )
    wrapped = DistributedDataParallel(config, reducing, model)
    return wrapped, get_megatron_optimizer(options, [wrapped])


def _arguments() -> Namespace:
    return Namespace(
        **SIZES,
        group_query_attention=True,
        max_position_embeddings=SEQ_LENGTH,
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
        consumed_train_samples=SAVED * BATCH,
        tensor_model_parallel_size=2,
    )


if __name__ == "__main__":
    main()
