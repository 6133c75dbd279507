"""Replicas of a model that come and go while it trains: TorchFT around mcore's parts.

    torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    torchrun --master-port 29600 examples/torchft_replicas.py --replica 0 &
    torchrun --master-port 29601 examples/torchft_replicas.py --replica 1

Each replica is a world of its own, of one or more ranks, and averages its gradients with those
of the replicas that are there. One that is killed leaves the others training; started again, it
takes weights, moments and the step from a living one. The number of sequences of a step follows
the number of replicas, which is why `mcore-train` restarts jobs instead: its batches and the
order of its data do not depend on what failed.
"""

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo  # pyrefly: ignore[missing-import]

from mcore_data.datasets.mock import MockGPTDataset
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel import (
    AdamConfig,
    AdamW,
    DataParallel,
    DataParallelConfig,
    DistributedOptimizer,
    ParallelConfig,
    ParallelContext,
    clip_coefficient,
    named_shards,
)
from mcore_parallel.launch.launcher import initialize, shut_down

SEQ_LENGTH, VOCAB_SIZE = 64, 128
TIMEOUT = timedelta(seconds=20)


def main(argv: Sequence[str] | None = None) -> float:
    """Train to the last step, whoever comes and goes; return the sum of the weights."""
    parser = argparse.ArgumentParser(description="Train replicas of a small GPT.")
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=0.0, help="between two steps")
    options = parser.parse_args(argv)

    ctx = ParallelContext.build(ParallelConfig(), initialize("cpu"))
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    model = GPT(config, ctx, vocab_size=VOCAB_SIZE)
    data_parallel = DataParallel([model], ctx, DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    shards = {**named_shards(model), **optimizer.named_shards()}

    def state() -> dict[str, Any]:
        """Return what a replica that comes back needs."""
        tensors = {name: [p.data for p in shard.pieces] for name, shard in shards.items()}
        return {"tensors": tensors, "num_steps": optimizer.num_steps}

    def load(found: dict[str, Any]) -> None:
        """Take over the state of a living replica."""
        for name, pieces in found["tensors"].items():
            for piece, data in zip(shards[name].pieces, pieces, strict=True):
                piece.data.copy_(data)
        optimizer.num_steps = found["num_steps"]
        optimizer.refresh()

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,  # a replica that comes back trains on current weights
        replica_id=f"replica-{options.replica}",
        timeout=TIMEOUT,
    )
    dataset = MockGPTDataset(sequence_length=SEQ_LENGTH, vocab_size=VOCAB_SIZE)
    try:
        while manager.current_step() < options.steps:
            manager.start_quorum()
            # Replicas that take part share out the next samples.
            sample = manager.batches_committed() + (manager.participating_rank() or 0)
            batch = {
                name: torch.as_tensor(value)[None] for name, value in dataset[sample].items()
            }
            data_parallel.zero_grad()
            hidden, _ = model(batch["tokens"])
            weights = batch["loss_mask"] / batch["loss_mask"].sum()
            loss, _ = model.loss(hidden, batch["labels"], weights)
            loss.backward()
            data_parallel.finish()
            for unit in data_parallel.units:  # means over the replicas that are there
                manager.allreduce(unit.own_grads()).wait()
            # False if a replica was lost in this step: it is computed again.
            if manager.should_commit():
                optimizer.step(1e-3, 0.1, clip_coefficient(optimizer.grad_norm(), 1.0))
                step, present = manager.current_step(), manager.num_participants()
                print(
                    f"step {step} with {present} replicas, loss {loss.item():.4f}", flush=True
                )
            time.sleep(options.pause_s)
    finally:
        manager.shutdown()
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"weights {total:.12f}", flush=True)
    ctx.destroy()
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    shut_down()
