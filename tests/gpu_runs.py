"""Small trainings on one GPU, with batches that are drawn there: for tests of its steps."""

import torch

from mcore_models.protocol import MicroBatch
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import Run, assemble
from mcore_train.composition import compose
from mcore_train.resolution import resolve

SMALL = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "train_iters": 6,
    "lr": 1e-3,
    "bf16": True,
    "mock_data": True,
    "vocab_size": 1000,
    "num_workers": 0,
}
"""What all of them have; sizes are the test's."""


def build(**changes) -> Run:
    """Assemble a run of ``SMALL`` and these flags on the GPU."""
    plan = resolve(compose(SMALL | changes), 1)
    return assemble(plan, ParallelContext.single("cuda"))


def batches(run: Run, seed: int, count: int = 2, masked: float = 0.0) -> list[MicroBatch]:
    """Draw a step's micro-batches; ``masked`` of the labels do not count."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    config = run.plan.config.batch
    shape = (config.micro_batch_size, config.seq_length)

    def draw():
        return torch.randint(0, 1000, shape, device="cuda", generator=generator)

    mask = (torch.rand(shape, device="cuda", generator=generator) >= masked).float()
    return [
        MicroBatch(
            run.chunks[0].prepare({"tokens": draw(), "labels": draw(), "loss_mask": mask})
        )
        for _ in range(count)
    ]
