"""Bucket layouts as numbers, and the memory behind them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.buckets import (
    ALIGNMENT,
    build_buckets,
    plan_buckets,
    shard_ranges,
)
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import NamedParameter, whole_layout

AXIS = Axis("tp", 2, 0, None, (0, 1))


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=20),
    bucket_size=st.integers(0, 900),
    multiple=st.sampled_from([128, 384, 640]),
)
def test_every_tensor_has_its_own_aligned_place(sizes, bucket_size, multiple):
    plans = plan_buckets(sizes, bucket_size=bucket_size, end_multiple=multiple)
    assert [i for plan in plans for i in plan.members] == list(range(len(sizes)))
    for plan in plans:
        end = 0
        for member, start in zip(plan.members, plan.starts, strict=True):
            assert start % ALIGNMENT == 0
            assert end <= start < end + ALIGNMENT
            end = start + sizes[member]
        assert plan.size % multiple == 0
        assert end <= plan.size < end + multiple


def test_a_bucket_closes_when_it_reaches_its_size():
    plans = plan_buckets([64, 64, 200, 8], bucket_size=128)
    assert [plan.members for plan in plans] == [(0, 1), (2,), (3,)]
    assert len(plan_buckets([64, 64, 200, 8], bucket_size=0)) == 1


def test_ranks_own_equal_ranges_even_where_all_is_padding():
    assert shard_ranges(12, 3) == ((0, 4), (4, 8), (8, 12))
    with pytest.raises(
        ValueError, match="a bucket of 12 elements cannot be split evenly over 5 ranks"
    ):
        shard_ranges(12, 5)


def named(name, *shape, dtype=torch.float32, data="dense", **axes):
    layout = replace(
        whole_layout(name, shape, axes.get("partial", AXIS), axes.get("partial", AXIS))
    )
    if "partial" not in axes:
        layout = whole_layout(name, shape)
    layout = replace(layout, data=data, tied=axes.get("tied", layout.tied))
    return NamedParameter(name, nn.Parameter(torch.randn(shape).to(dtype)), layout)


def built(parameters, **options):
    config = DataParallelConfig(**options)
    return build_buckets([(0, p) for p in parameters], ParallelContext.single(), config)


def names(bucket):
    return [slot.named.name for slot in bucket.slots]


def test_parameters_lie_in_backward_order():
    (bucket,) = built([named("a", 3), named("b", 2, 2), named("c", 1)])
    assert names(bucket) == ["c", "b", "a"]
    assert [slot.start for slot in bucket.slots] == [0, 64, 128]


def test_what_cannot_travel_together_has_its_own_bucket():
    buckets = built(
        [
            named("tied", 4, 2, tied=AXIS),
            named("norm", 4, partial=AXIS),
            named("first", 4, 4),
            named("expert", 4, 4, data="expert"),
            named("half", 4, 4, dtype=torch.bfloat16),
            named("last", 4, 4),
        ]
    )
    assert [names(b) for b in buckets] == [
        ["half"],
        ["expert"],
        ["last", "first"],
        ["norm"],
        ["tied"],
    ]
    assert [b.is_late for b in buckets] == [False, False, False, True, True]
    assert [b.kind for b in buckets] == ["dense", "expert", "dense", "dense", "dense"]


def test_parameters_and_main_gradients_are_views_of_the_bucket():
    weight = named("weight", 4, 3)
    before = weight.parameter.detach().clone()
    (bucket,) = built([weight])
    assert torch.equal(weight.parameter, before)
    bucket.params.fill_(2.0)
    bucket.grads.fill_(3.0)
    assert weight.parameter.eq(2.0).all()
    assert grad_slot(weight.parameter).main.eq(3.0).all()


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.bfloat16, {}, torch.float32),
        (torch.bfloat16, {"grad_reduce_in_bf16": True}, torch.bfloat16),
        (torch.float32, {"grad_reduce_in_bf16": True}, torch.float32),
        (torch.float64, {}, torch.float64),
    ],
)
def test_main_gradients_are_at_least_float32_unless_asked(dtype, options, expected):
    (bucket,) = built([named("weight", 4, dtype=dtype)], **options)
    assert bucket.grads.dtype == expected


def test_buckets_are_one_without_overlap_and_may_be_padded_for_nccl():
    many = [named(str(i), 100) for i in range(5)]
    assert len(built(many)) == 1
    (bucket,) = built([named("a", 5)], ddp_pad_buckets_for_high_nccl_busbw=True)
    assert bucket.size == 65536
    many = [named(str(i), 100) for i in range(5)]
    assert len(built(many, overlap_grad_reduce=True, ddp_bucket_size=150)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ddp_bucket_size": -1}, "--ddp-bucket-size -1 must be 0"),
        (
            {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": True},
            "contradict: leave one out",
        ),
        ({"overlap_param_gather": True}, "no effect without --use-distributed-optimizer"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataParallelConfig(**options)
