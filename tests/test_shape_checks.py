"""Annotated shapes are checked for each new set of them, and only where there are any."""

import pytest
import torch
from jaxtyping import TypeCheckError

from mcore_parallel.context_parallel.zigzag import chunk_length
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def losses(*shape, labels):
    return vocab_parallel_cross_entropy(
        torch.zeros(*shape), torch.zeros(*labels, dtype=torch.int64), vocab_size=shape[-1]
    )


def test_a_call_of_other_shapes_is_checked_after_calls_that_were_right():
    for rows in (2, 3, 2):
        assert losses(rows, 2, 5, labels=(rows, 2)).shape == (rows, 2)
        for _ in range(2):
            with pytest.raises(TypeCheckError, match=r"parameters of .*vocab_parallel"):
                losses(rows, 2, 5, labels=(2, rows + 1))


def test_functions_without_annotated_arrays_are_left_as_they_are():
    assert not hasattr(chunk_length, "__wrapped__")
    assert hasattr(vocab_parallel_cross_entropy, "__wrapped__")
