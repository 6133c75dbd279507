"""A program under many layouts is held to one rank, and what is off is named."""

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding
from mcore_parallel.testing.layout_comparison import compare_layouts, tensor_errors

TENSOR = ParallelConfig(tensor_model_parallel_size=2)
LAYOUTS = [(2, TENSOR), (2, ParallelConfig())]


def gradients_and_loss(ctx, mistake):
    """A step over two batches, with what people get wrong."""
    table = VocabParallelEmbedding(6, 3, axis=ctx.tp, dtype=torch.float64)
    table.reset_parameters(0)
    data_parallel = DataParallel(
        [table], ctx, DataParallelConfig(use_distributed_optimizer=True)
    )
    ids = torch.tensor([[0, 5], [3, 5]])[ctx.dp.rank :: ctx.dp.size]
    loss = table(ids).square().sum() / (ids.numel() if mistake == "own count" else 4)
    loss.backward()
    data_parallel.finish()
    found = dict(data_parallel.grad_shards())
    found["loss"] = loss if mistake == "own loss" else all_reduce(loss.detach(), ctx.dp)
    if mistake == "nan" and ctx.world.size > 1:
        found["loss"] = torch.full((), torch.nan)
    if mistake == "one rank off":
        found["loss"] = found["loss"] * (1.0 + 1e-6 * ctx.world.rank)
    if mistake == "more" and ctx.tp.size > 1:
        found["norm"] = torch.ones(())
    if mistake == "raises" and ctx.world.rank == 1:
        raise KeyError("the reason")
    return found


def test_layouts_that_agree_say_how_closely():
    errors = compare_layouts(gradients_and_loss, LAYOUTS, "none", run=run_ranks)
    assert set(errors) == {"weight", "loss"}
    assert max(errors.values()) <= 1e-14


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("own count", r"on 2 ranks, ParallelConfig\(.*: weight is off by 1\.0e\+00"),
        ("own loss", r"loss is off by .* 1\.0e-10 is allowed; of 2 tensors 1 are further off"),
        ("one rank off", r"loss is off by 1\.0e-06"),
        ("nan", "loss is off by nan"),
        ("more", r"tensor_model_parallel_size=2.*: tensors on one side only: norm"),
    ],
)
def test_what_is_off_is_named(mistake, told):
    with pytest.raises(AssertionError, match=told):
        compare_layouts(gradients_and_loss, LAYOUTS, mistake, run=run_ranks)


def test_a_rank_that_fails_is_told_with_its_reason():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*the reason"):
        compare_layouts(gradients_and_loss, LAYOUTS, "raises", run=run_ranks)


def test_more_may_be_allowed():
    errors = compare_layouts(
        gradients_and_loss, LAYOUTS, "one rank off", tolerance=1e-5, run=run_ranks
    )
    assert errors["loss"] == pytest.approx(1e-6)


def test_a_tensor_of_nothing_is_measured_on_the_scale_of_the_model():
    expected = {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}
    found = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-4])}
    assert tensor_errors(found, expected)["b"] == pytest.approx(0.1)


def test_tensors_on_one_side_only_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"one side only: b"):
        tensor_errors({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


def test_another_shape_is_infinitely_wrong():
    assert tensor_errors({"a": torch.ones(1)}, {"a": torch.ones(2)})["a"] == float("inf")
