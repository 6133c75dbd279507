"""Plans are pure: thousands of random cuts, each covered once and found again."""

import subprocess
import sys
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.save_load.tensor_exchange import Move, rounds
from mcore_ckpt.storage.boxes import cover_problems, intersect, small_spans, span
from mcore_ckpt.storage.index import StoredBox, TensorEntry
from mcore_ckpt.storage.shard_plans import (
    Claim,
    name_problems,
    plan_reads,
    plan_sharing,
    plan_writes,
)

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def cuts(draw, shape):
    """An exact cover of a tensor: boxes cut in two again and again."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, lengths = boxes[number]
        wide = [dim for dim, n in enumerate(lengths) if n > 1]
        if not wide:
            continue
        dim = draw(st.sampled_from(wide))
        at = draw(st.integers(1, lengths[dim] - 1))
        low = (*lengths[:dim], at, *lengths[dim + 1 :])
        high = (*lengths[:dim], lengths[dim] - at, *lengths[dim + 1 :])
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes[number : number + 1] = [(offsets, low), (moved, high)]
    return boxes


@st.composite
def shapes_with_cuts(draw):
    shape = draw(shapes)
    return shape, draw(cuts(shape)), draw(cuts(shape))


def claim(shape, boxes, owner=True, dtype="F32"):
    return Claim(shape, dtype, owner, tuple(boxes))


@settings(max_examples=40, deadline=None)
@given(shapes_with_cuts(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_element_is_written_once_by_a_rank_that_holds_it(case, num_ranks, random):
    shape, boxes, _ = case
    holders = [[box for box in boxes if random.random() < 0.6] for _ in range(num_ranks)]
    holders[0] += [box for box in boxes if not any(box in held for held in holders)]
    plan = plan_writes([{"w": claim(shape, held)} for held in holders])
    written = [write.box for mine in plan for write in mine]
    assert sorted(written) == sorted(boxes)
    for held, mine in zip(holders, plan, strict=True):
        assert all(write.box in held for write in mine)


@settings(max_examples=40, deadline=None)
@given(shapes_with_cuts())
def test_any_cut_is_read_from_any_other(case):
    shape, saved, wanted = case
    entry = TensorEntry(shape, "F32", tuple(StoredBox("f", 0, *box) for box in saved))
    for box in wanted:
        reads = plan_reads(entry, box)
        assert sum(prod(read.box[1]) for read in reads) == prod(box[1])
        for read in reads:
            assert intersect(read.box, saved[read.chunk]) == read.box
            assert intersect(read.box, box) == read.box


@settings(max_examples=40, deadline=None)
@given(shapes_with_cuts(), st.integers(0, 50))
def test_a_box_too_few_or_too_many_is_always_noticed(case, pick):
    shape, boxes, others = case
    assert not cover_problems(shape, boxes)
    lost = boxes[pick % len(boxes)]
    assert "in no box" in cover_problems(shape, [box for box in boxes if box != lost])[0]
    more = [box for box in others if box not in boxes]
    if more:
        assert "overlap" in cover_problems(shape, [*boxes, more[0]])[0]


@settings(max_examples=40, deadline=None)
@given(shapes_with_cuts(), st.integers(1, 40))
def test_small_spans_are_small_and_cover_the_box(case, limit):
    shape, boxes, _ = case
    for box in boxes:
        parts = list(small_spans(shape, box, limit))
        assert sum(prod(lengths) for _, lengths in parts) == prod(box[1])
        for part in parts:
            first, stop = span(shape, part)
            assert stop - first <= max(limit, 1)
            assert intersect(part, box) == part
        # In memory order, without overlap: concatenated they are the box.
        starts = [span(shape, part)[0] for part in parts]
        assert starts == sorted(starts)


def test_bytes_are_balanced_over_replicas_around_what_is_forced():
    boxes = [((i,), (1,)) for i in range(30)]
    shared = {f"w{i}": claim((100 + i,), [((0,), (100 + i,))]) for i in range(40)}
    ranks = [dict(shared) for _ in range(4)]
    ranks[0]["only here"] = claim((900,), [((0,), (900,))])
    ranks[3]["rows"] = claim((30,), boxes)
    plan = plan_writes(ranks)
    loads = [sum(prod(write.box[1]) for write in mine) for mine in plan]
    assert max(loads) - min(loads) <= 139
    assert sum(loads) == 900 + 30 + sum(100 + i for i in range(40))


def test_the_plan_does_not_depend_on_the_order_of_names():
    one = {name: claim((4,), [((0,), (4,))]) for name in "abcdef"}
    other = dict(reversed(one.items()))
    assert plan_writes([one, one]) == plan_writes([other, other])


def test_items_of_wide_dtypes_come_first_in_a_file():
    claims = {
        name: claim((3,), [((0,), (3,))], dtype=dtype)
        for name, dtype in zip("abcd", ("U8", "F64", "BF16", "F32"), strict=True)
    }
    assert [write.name for write in plan_writes([claims])[0]] == ["b", "d", "c", "a"]


def test_only_the_owners_boxes_count():
    box, half = ((0,), (4,)), ((0,), (2,))
    owner, copy = {"w": claim((4,), [box])}, {"w": claim((4,), [half], owner=False)}
    assert [len(mine) for mine in plan_writes([copy, owner])] == [0, 1]
    with pytest.raises(ValueError, match="w: 4 of 4 elements are in no box"):
        plan_writes([copy])


PLANNING = """
import json, time
from mcore_ckpt.storage.shard_plans import Claim, plan_writes

ranks = [
    {
        f"w{i}": Claim(
            (64, 8), "F32", True, tuple(((16 * rank + 4 * j, 0), (4, 8)) for j in range(4))
        )
        for i in range(1000)
    }
    for rank in range(4)
]
start = time.process_time()
texts = [json.dumps({name: one.to_json() for name, one in mine.items()}) for mine in ranks]
told = [{n: Claim.from_json(v) for n, v in json.loads(text).items()} for text in texts]
plan = plan_writes(told)
print(time.process_time() - start, *(len(mine) for mine in plan))
"""


def test_four_thousand_chunks_a_rank_are_planned_in_less_than_a_second():
    # In a process of its own: types are not checked at run time there.
    done = subprocess.run(
        [sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True
    )
    seconds, *counts = done.stdout.split()
    assert float(seconds) < 0.8
    assert counts == ["4000"] * 4


@settings(max_examples=30, deadline=None)
@given(shapes_with_cuts(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_what_several_ranks_of_a_host_want_is_read_once_a_host(case, num_ranks, random):
    shape, boxes, _ = case
    wanted = [[box for box in boxes if random.random() < 0.7] for _ in range(num_ranks)]
    hosts = [random.choice(["a", "b"]) for _ in range(num_ranks)]
    plan = plan_sharing([{"w": claim(shape, held)} for held in wanted], hosts, {"w"})
    got = {(one.write.box, rank) for one in plan for rank in one.others}
    for host in ("a", "b"):
        for box in boxes:
            ranks = [r for r in range(num_ranks) if hosts[r] == host and box in wanted[r]]
            readers = [rank for rank in ranks if (box, rank) not in got]
            assert len(readers) == min(1, len(ranks))
    for one in plan:
        assert {hosts[rank] for rank in (one.reader, *one.others)} == {hosts[one.reader]}
        assert one.write.box in wanted[one.reader]
        assert one.num_bytes == 4 * prod(one.write.box[1])


def test_readers_of_one_host_read_about_as_many_bytes():
    wanted = {f"w{i}": claim((100 + i,), [((0,), (100 + i,))]) for i in range(40)}
    plan = plan_sharing([wanted] * 4, ["a"] * 4, wanted.keys())
    loads = [sum(one.num_bytes for one in plan if one.reader == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 4 * 139


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 90)), max_size=40),
    st.integers(1, 200),
)
def test_rounds_keep_order_and_bound_what_each_rank_sends_and_gets(moves, limit):
    listed = [Move(*move, key=number) for number, move in enumerate(moves)]
    cut = list(rounds(listed, limit))
    assert [move for batch in cut for move in batch] == listed
    for batch in cut:
        for rank in range(4):
            sent = [move.room_bytes for move in batch if move.source == rank]
            got = [move.room_bytes for move in batch if move.target == rank]
            assert all(sum(side) <= limit or len(side) == 1 for side in (sent, got))


def test_of_long_lists_of_names_the_front_is_hinted():
    missing, unexpected = name_problems(
        (f"w.{i}.a" for i in range(2_000)), (f"w.{i}.b" for i in range(2_000))
    )
    assert len(missing) == len(unexpected) == 2_000
    assert "(nearest there: " in missing[0]
    assert "nearest" not in missing[-1]
