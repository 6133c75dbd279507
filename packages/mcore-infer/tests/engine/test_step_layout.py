"""A step's rows and page tables in memory that is kept from step to step."""

import random

import torch

from mcore_infer.engine.model_runner import decode_sizes, size_to_run
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.step_layout import DecodeTensors


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
            tensors.fill(Step(tuple(chunks)), 2, (3, 4))
        for name in ("tokens", "positions", "places", "lengths", "slots"):
            assert torch.equal(getattr(kept, name), getattr(new, name))
        for row, length in enumerate(new.lengths.tolist()):
            used = -(-length // 2)
            assert torch.equal(kept.tables[row, :used], new.tables[row, :used])


def test_a_size_that_is_rarely_needed_runs_in_a_larger_graph_that_is_there():
    """Texts that end one after the other, of 16 together: their graphs are not all recorded."""
    sizes, recorded, steps = decode_sizes(16), {8, 16}, {}
    for num_rows, count in ((16, 50), (7, 2), (6, 3), (4, 9), (3, 8), (2, 7), (9, 1)):
        for _ in range(count):
            fitting = [size for size in sizes if size >= num_rows]
            steps[fitting[0]] = steps.get(fitting[0], 0) + 1
            size = size_to_run(fitting, recorded, steps[fitting[0]])
            assert size >= num_rows
            recorded.add(size)
    assert recorded == {4, 8, 16}  # nine steps of 4 rows; the other sizes had fewer
    assert size_to_run([1, 2, 4], set(), 1) == 1
