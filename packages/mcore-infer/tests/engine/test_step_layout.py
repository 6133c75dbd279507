"""A step's rows and page tables in memory that is kept from step to step."""

import random

import torch

from mcore_infer.engine.step_layout import DecodeTensors
from mcore_infer.engine.step_plans import Chunk, Step


def test_a_step_is_laid_out_as_in_new_memory_whatever_was_there_before():
    """Requests come and go, and pages go from one to another."""
    rng, cpu = random.Random(0), torch.device("cpu")
    kept = DecodeTensors(4, 3, cpu)
    for _ in range(200):
        chunks = []
        for slot in range(rng.randrange(5)):
            pages = tuple(rng.sample(range(3), rng.randint(1, 3)))
            begin = 2 * len(pages) - rng.randint(1, 2)
            chunk = Chunk(0, slot, begin, (rng.randrange(9),), pages, wants_token=True)
            chunks.append(chunk)
        new = DecodeTensors(4, 3, cpu)
        for tensors in (kept, new):
            tensors.fill(Step(tuple(chunks), ()), 2, (3, 4))
        for name in ("tokens", "positions", "places", "lengths", "slots"):
            assert torch.equal(getattr(kept, name), getattr(new, name))
        for row, length in enumerate(new.lengths.tolist()):
            used = -(-length // 2)
            assert torch.equal(kept.tables[row, :used], new.tables[row, :used])
