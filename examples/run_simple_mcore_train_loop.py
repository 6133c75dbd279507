"""The smallest whole training loop from the parts, on any layout, with save and load.

    python examples/run_simple_mcore_train_loop.py
    torchrun --nproc_per_node=2 examples/run_simple_mcore_train_loop.py \\
        --tensor-model-parallel-size 2

Runs on CPU with gloo and on GPUs with nccl. `mcore-train gpt` is the same loop with recipes,
logs and everything else around it.
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_data.datasets.mock import MockGPTDataset
from mcore_data.loading.loader import build_loader
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
from mcore_parallel.collectives import all_reduce
from mcore_parallel.launch.launcher import initialize, shut_down
from mcore_parallel.pipeline_parallel.runner import StageOutput, run_schedule
from mcore_parallel.pipeline_parallel.schedule import one_f_one_b
from mcore_parallel.pipeline_parallel.stages import split_layers

SEQ_LENGTH, VOCAB_SIZE, MICRO_BATCH_SIZE, NUM_MICROBATCHES = 64, 128, 2, 2


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train five steps, save, train one more, load, train it again; return the losses."""
    parser = argparse.ArgumentParser(description="Train a small GPT on mock data.")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    layout = ParallelConfig(**vars(parser.parse_args(argv)))

    # This rank's place in the mesh, and its groups.
    ctx = ParallelContext.build(layout, initialize())

    # A model: this rank's stage of it, and of each matrix this rank's share.
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    stage = split_layers(config.num_layers, ctx.pp.size)[ctx.pp.rank]
    model = GPT(config, ctx, vocab_size=VOCAB_SIZE, stage=stage)

    # Gradients that are summed over data ranks, and an optimizer sharded over them.
    data_parallel = DataParallel(
        [model], ctx, DataParallelConfig(use_distributed_optimizer=True)
    )
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    shards = {
        **{f"model.{name}": shard for name, shard in named_shards(model).items()},
        **{f"optimizer.{name}": shard for name, shard in optimizer.named_shards().items()},
    }

    dataset = MockGPTDataset(sequence_length=SEQ_LENGTH, vocab_size=VOCAB_SIZE)
    loader = iter(
        build_loader(
            dataset,
            micro_batch_size=MICRO_BATCH_SIZE,
            dp_rank=ctx.dp.rank,
            dp_size=ctx.dp.size,
        )
    )
    actions = one_f_one_b(ctx.pp.size, NUM_MICROBATCHES)[ctx.pp.rank]

    def train_step(batches: list[dict[str, Tensor]]) -> float:
        """Train on one global batch and return its loss."""
        num_valid = all_reduce(
            torch.stack([b["loss_mask"].sum() for b in batches]).sum(), ctx.dp_cp
        )
        reported = torch.zeros((), device=ctx.device)

        def forward(x: Tensor | None, microbatch: int) -> StageOutput:
            batch = batches[microbatch]
            hidden, _aux = model(batch["tokens"] if x is None else x)
            if not stage.has_loss:
                return StageOutput(hidden)
            loss, _ = model.loss(hidden, batch["labels"], batch["loss_mask"] / num_valid)
            reported.add_(loss.detach())
            return StageOutput(loss)

        data_parallel.zero_grad()
        shape = (SEQ_LENGTH, MICRO_BATCH_SIZE, config.hidden_size)
        run_schedule(actions, {0: forward}, ctx.pp, shape=shape, device=ctx.device)
        data_parallel.finish()
        optimizer.step(1e-2, 0.1, clip_coefficient(optimizer.grad_norm(), 1.0))
        # Everything sums: parts of the loss over data ranks, zeros from stages without one.
        return all_reduce(all_reduce(reported, ctx.dp_cp), ctx.pp).item()

    def next_batches() -> list[dict[str, Tensor]]:
        """Draw this rank's micro-batches of a step."""
        return [
            {name: value.to(ctx.device) for name, value in next(loader).items()}
            for _ in range(NUM_MICROBATCHES)
        ]

    losses = [train_step(next_batches()) for _ in range(5)]
    with tempfile.TemporaryDirectory() as own:
        # One folder for all ranks: that of rank 0, whose name all get.
        folder = _from_first_rank(own, ctx)
        save(folder, 5, shards, world=ctx.world, extra={"num_steps": optimizer.num_steps})
        last = next_batches()
        losses.append(train_step(last))
        optimizer.num_steps = load(folder, shards, world=ctx.world)["num_steps"]
        optimizer.refresh()
        again = train_step(last)
        _from_first_rank(own, ctx)  # no rank leaves before all have read
    if again != losses[-1]:
        raise RuntimeError(f"the step after loading gave {again}, not {losses[-1]}")
    if ctx.global_rank == 0:
        print("losses", *(f"{loss:.6f}" for loss in losses))
    return losses


def _from_first_rank(text: str, ctx: ParallelContext) -> str:
    """Return rank 0's text on every rank."""
    texts = [text]
    if ctx.world.size > 1:
        torch.distributed.broadcast_object_list(texts, src=0, group=ctx.world.group)
    return texts[0]


if __name__ == "__main__":
    main()
    shut_down()
