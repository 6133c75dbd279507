"""Each example runs, on one rank and on several, with equal numbers."""

import importlib.util

import pytest
from docs.blocks import ROOT

from mcore_parallel.testing import run_ranks

SMALL = [
    *("--num-layers", "2", "--hidden-size", "48", "--num-attention-heads", "4"),
    *("--vocab-size", "96", "--sequence-length", "16", "--steps", "3"),
]


def run_example(name, arguments):
    """Load an example by its path and run it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


def test_the_guides_first_program_gives_equal_losses_on_one_rank_and_two():
    single = run_example("first_program", SMALL)
    arguments = [*SMALL, "--tensor-model-parallel-size", "2"]
    for losses in run_ranks(run_example, 2, "first_program", arguments):
        assert losses == pytest.approx(single, rel=1e-5)
    assert single[-1] < single[0]


@pytest.mark.parametrize(
    "layout",
    [[], ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]],
)
def test_the_simple_loop_trains_and_resumes_on_one_rank_and_two(layout):
    name = "run_simple_mcore_train_loop"
    world_size = 2 if layout else 1
    answers = run_ranks(run_example, world_size, name, layout)
    assert all(losses == answers[0] for losses in answers)
    assert len(answers[0]) == 6
    assert answers[0][-1] < answers[0][0]
