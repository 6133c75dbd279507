"""The same sums on GPUs: two ranks over nccl against one, in float64. Needs two GPUs."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.launch.launcher import initialize, launch_local, shut_down
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.pipeline_parallel.runner import StageOutput, run_schedule
from mcore_parallel.pipeline_parallel.schedule import interleaved, one_f_one_b
from mcore_parallel.pipeline_parallel.stages import split_layers, stages_of_rank
from mcore_parallel.sharding import named_shards
from mcore_parallel.testing.ranks import gather_logical

LAYERS, ROWS, HIDDEN, MICROBATCHES = 4, 64, 96, 6
EXACT = 1e-10
ZERO = DataParallelConfig(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    ddp_bucket_size=10_000,
)


class Chunk(nn.Module):
    def __init__(self, stage, device):
        super().__init__()
        self.stage = stage
        self.blocks = nn.ModuleDict()
        for i in stage.layers:
            torch.manual_seed(i)
            self.blocks[str(i)] = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64).to(device)

    def forward(self, x):
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return x


def stage_function(chunk, inputs):
    def stage(x, microbatch):
        out = chunk(inputs[microbatch] if x is None else x)
        return StageOutput(out.square().mean() if chunk.stage.has_loss else out)

    return stage


def train(ctx, pp=1, vpp=1, config=None):
    """Weights after three steps over the same six micro-batches under any layout."""
    stages = stages_of_rank(split_layers(LAYERS, pp, vpp=vpp), ctx.pp.rank)
    chunks = [Chunk(stage, ctx.device) for stage in stages]
    data_parallel = DataParallel(chunks, ctx, config or DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    mine = range(ctx.dp.rank, MICROBATCHES, ctx.dp.size)
    build = interleaved(pp, len(mine), vpp) if vpp > 1 else one_f_one_b(pp, len(mine))
    norms = []
    for step in range(3):
        data_parallel.zero_grad()
        inputs = []
        for m in mine:
            generator = torch.Generator().manual_seed(100 * step + m)
            x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=generator)
            inputs.append(x.to(ctx.device))
        with data_parallel.no_sync():
            run_schedule(
                build[ctx.pp.rank],
                {i: stage_function(chunk, inputs) for i, chunk in enumerate(chunks)},
                ctx.pp,
                shape=(ROWS, HIDDEN),
                dtype=torch.float64,
                device=ctx.device,
                before_last_backward=data_parallel.start_sync,
            )
        data_parallel.finish()
        norms.append(optimizer.grad_norm())
        optimizer.step(0.01, 0.1)
        data_parallel.check_weights()
    data_parallel.wait_params()
    shards = {}
    for chunk in chunks:
        shards.update(named_shards(chunk, ctx.data_axes()))
    return torch.stack(norms).cpu(), gather_logical(shards, ctx.world)


def compare_layouts():
    device = initialize("cuda")
    norms, weights = train(ParallelContext.single(device))
    for pp, vpp, config in ((1, 1, None), (1, 1, ZERO), (2, 1, None), (2, 2, ZERO)):
        parallel = ParallelConfig(pipeline_model_parallel_size=pp)
        found_norms, found = train(ParallelContext.build(parallel, device), pp, vpp, config)
        torch.testing.assert_close(found_norms, norms, rtol=EXACT, atol=0.0)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=EXACT, atol=EXACT)
        print(f"pp {pp} vpp {vpp} {config}: equal", flush=True)
    shut_down()


@pytest.mark.gpu
def test_two_gpus_equal_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert launch_local([sys.executable, str(Path(__file__))], 2) == 0


if __name__ == "__main__" and "RANK" in os.environ:
    compare_layouts()
