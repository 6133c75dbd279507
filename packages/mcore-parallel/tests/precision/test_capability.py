"""What GPUs multiply in, told by their compute capability."""

import re

import pytest

from mcore_parallel.precision.capability import best_format, bf16_problem, fp8_problem
from mcore_parallel.precision.config import Fp8Config

VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


def test_the_format_follows_from_what_the_gpu_multiplies_in():
    assert best_format(None) == best_format((6, 1)) == "fp32"
    assert best_format(VOLTA) == best_format(TURING) == "fp16"
    assert {best_format(c) for c in (AMPERE, ADA, HOPPER, BLACKWELL)} == {"bf16"}


@pytest.mark.parametrize(
    ("capability", "recipe", "words"),
    [
        (AMPERE, "tensorwise", "needs a GPU with fp8 tensor cores .* and this GPU has none"),
        (ADA, "delayed", ""),
        (ADA, "rowwise", "Hopper or later for rowwise"),
        (HOPPER, "rowwise", ""),
        (HOPPER, "blockwise", ""),
        (BLACKWELL, "blockwise", "runs on Hopper only, and this is this GPU: use tensorwise"),
    ],
)
def test_what_a_gpu_has_not_is_answered_with_what_it_has(capability, recipe, words):
    problem = fp8_problem(
        Fp8Config(fp8_format="e4m3", fp8_recipe=recipe), capability, "this GPU"
    )
    assert bool(problem) == bool(words)
    assert not words or re.search(words, problem)
    assert "use --fp16" in bf16_problem(TURING, "this GPU")
    assert "use --precision auto" in bf16_problem((6, 1), "this GPU")
    assert bf16_problem(capability, "this GPU") == ""
