"""Borders of packed documents: plain numbers, checked against masks made token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from warm_ranks import run_ranks

from mcore_parallel.context_parallel.packed_sequences import (
    DocumentPieces,
    Documents,
    own_ranges,
)
from mcore_parallel.mesh import Axis


def numbers(rows, length):
    """Number of the document of every token."""
    return [
        [sum(border <= token for border in borders[1:-1]) for token in range(length)]
        for borders in rows
    ]


@st.composite
def packed(draw):
    length = 4 * draw(st.integers(2, 6))
    inner = st.sets(st.integers(1, length - 1))
    rows = [[0, *sorted(draw(inner)), length] for _ in range(draw(st.integers(1, 2)))]
    return rows, length


@settings(max_examples=60, deadline=None)
@given(packed(), st.integers(0, 1))
def test_pieces_of_a_rank_are_the_documents_of_its_tokens_in_their_order(case, rank):
    rows, length = case
    axis = Axis("cp", 2, rank, None, (0, 1))
    own = own_ranges(length, axis)
    for row, whole in enumerate(numbers(rows, length)):
        mine = [whole[token] for chunk in own for token in chunk]
        pieces = Documents(rows).within(row, own)
        changes = [i for i in range(1, len(mine)) if mine[i] != mine[i - 1]]
        assert pieces.borders == (0, *changes, len(mine))
        first = [mine.index(number) for number in mine]
        assert pieces.first_seen().tolist() == first


@settings(max_examples=60, deadline=None)
@given(packed(), st.data())
def test_what_a_document_shares_with_an_earlier_range_is_a_rectangle(case, data):
    rows, length = case
    a, b, c, d = sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
    if a == b or c == d:
        return
    whole = numbers(rows, length)[0]
    found = Documents(rows).shared(0, range(c, d), range(a, b))
    expected = {(q, k) for q in range(c, d) for k in range(a, b) if whole[q] == whole[k]}
    pairs = set() if found is None else {(q, k) for q in found[0] for k in found[1]}
    assert pairs == expected


def test_cu_seqlens_of_a_batch_are_read_and_laid_end_to_end():
    cu_seqlens = torch.tensor([[0, 3, 8, 8, 8], [0, 1, 2, 7, 8]], dtype=torch.int32)
    documents = Documents.from_cu_seqlens(cu_seqlens)
    assert [pieces.borders for pieces in documents.rows] == [(0, 3, 8), (0, 1, 2, 7, 8)]
    flat = documents.flat()
    assert flat.borders == (0, 3, 8, 9, 10, 15, 16)
    assert flat.longest == 5
    made = flat.cu_seqlens(torch.device("cpu"))
    assert made.dtype == torch.int32
    assert made.tolist() == list(flat.borders)
    assert documents.flat().cu_seqlens(torch.device("cpu")) is made
    alone = DocumentPieces([0, 7]).cu_seqlens(torch.device("cpu"))
    assert alone.dtype == torch.int32
    assert alone.tolist() == [0, 7]


@pytest.mark.parametrize("borders", [[0], [1, 4], [0, 4, 4], [0, 5, 4]])
def test_borders_that_do_not_ascend_from_zero_are_refused(borders):
    with pytest.raises(ValueError, match="must ascend from 0"):
        DocumentPieces(borders)


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="equal lengths"):
        Documents([[0, 4], [0, 5]])


def borders_of_one_row():
    try:
        Documents.from_cu_seqlens(torch.tensor([0, 3, 8]))
    except ValueError as error:
        return str(error)


def test_borders_without_rows_are_refused_with_what_to_write():
    (told,) = run_ranks(borders_of_one_row, 1, check_shapes=False)
    assert "pass cu_seqlens.unsqueeze(0)" in told
