"""The grouped product, and gradients put off, against the sequential product."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_moe import MoEConfig, MoELayer, grouped_linear, sequential_linear
from mcore_moe.experts import weight_gradient
from mcore_moe.experts.grouped_gemm import accumulating_linear
from mcore_moe.experts.weight_gradient import (
    Factors,
    has_grouped_kernel,
    merge_parts,
    rows_by_expert,
)
from mcore_moe.kernels.rows import expert_offsets, put_rows
from mcore_parallel.autograd.grad_slot import grad_slot

OFFSETS = [
    expert_offsets(torch.tensor(c)) for c in ([2, 0, 3], [0, 0, 5], [5, 0, 0], [0, 0, 0])
]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_gemm_equals_the_sequential_one_with_gradients(offsets, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(offsets[-1]), 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 16, 8, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(x.shape[0], 16, generator=generator).to(dtype)
    assert has_grouped_kernel(x, weight) == (dtype == torch.bfloat16)
    results = []
    for linear in (grouped_linear, sequential_linear):
        y = linear(x, weight, offsets)
        results.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grouped", [True, False])
def test_the_flag_makes_the_products_of_all_experts_one(grouped):
    config = MoEConfig(num_experts=4, moe_router_topk=2, moe_grouped_gemm=grouped)
    layer = MoELayer(16, 32, config, dtype=torch.bfloat16)
    with Operations() as seen:
        layer(torch.randn(8, 16, dtype=torch.bfloat16))
    assert ("_grouped_mm" in seen.names) == grouped


class Queue:
    """As ``mcore_parallel.WeightQueue``: keeps what is put off."""

    def __init__(self):
        self.works = []

    def put(self, work):
        self.works.append(work)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_gradients_reach_main_gradients_at_once_or_later(offsets, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(offsets[-1]), 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 16, 8, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(x.shape[0], 16, generator=generator).to(dtype)
    slot = grad_slot(weight)
    for linear in (grouped_linear, sequential_linear):
        slot.release()
        expected = torch.autograd.grad(linear(x, weight, offsets), (x, weight), grad)
        for queue, is_stale in ((Queue(), False), (None, False), (None, True)):
            ready, slot.queue, slot.is_stale = [], queue, is_stale
            slot.main = torch.ones_like(weight, dtype=torch.float64)
            slot.on_ready = lambda ready=ready: ready.append(True)
            halves = [
                0.5 * accumulating_linear(x, weight, offsets, linear=linear) for _ in "ab"
            ]
            y = halves[0] + halves[1]  # as of rows that are computed in two parts
            grad_x, of_weight = torch.autograd.grad(y, (x, weight), grad, allow_unused=True)
            assert of_weight is None
            if queue is not None:
                assert (slot.main == 1).all()
                with torch.no_grad():
                    for work in queue.works:
                        assert not ready
                        work()
                assert ready == [True]
            torch.testing.assert_close(grad_x, expected[0])
            added = (slot.main - (0.0 if is_stale else 1.0)).to(dtype)
            torch.testing.assert_close(added, expected[1], atol=1e-6, rtol=1.6e-2)


@pytest.mark.parametrize("gathered", [None, "grad", "x"])
def test_merged_micro_batches_hold_the_rows_of_each_expert_and_tell_the_host_no_size(
    monkeypatch, gathered
):
    generator, num_copied = torch.Generator().manual_seed(0), []

    def count_and_put(rows, x, places):
        num_copied.append(int((places < len(rows)).sum()))
        put_rows(rows, x, places)

    monkeypatch.setattr(weight_gradient, "put_rows", count_and_put)
    parts = []
    for counts in ([3, 0, 4, 1], [0, 0, 5, 0], [1, 2, 0, 9], [0, 0, 0, 0]):
        size = sum(counts) + 2  # of which two are of no expert
        sources = torch.randint(4, (size,), generator=generator, dtype=torch.int32)
        part = Factors(
            *(
                torch.randn(
                    4 if gathered == side else size, width, generator=generator
                ).double()
                for side, width in (("grad", 6), ("x", 5))
            ),
            expert_offsets(torch.tensor(counts)),
        )
        parts.append(part._replace(**{f"{gathered}_sources": sources} if gathered else {}))
    merged = merge_parts(parts)
    assert merged.offsets.tolist() == [0, 4, 6, 15, 25]
    assert merged.offsets.dtype == torch.int32
    # Rows of no expert are not copied.
    assert num_copied == [8, 5, 12, 0] * (1 if gathered else 2)
    in_order = [part.in_order() for part in parts]
    for side in (0, 1):
        shares = [rows_by_expert(part[side], part.offsets)[:-1] for part in in_order]
        want = torch.cat([torch.cat(share) for share in zip(*shares, strict=True)])
        assert torch.equal(merged.in_order()[side][:25], want)
        if gathered == ("grad", "x")[side]:
            assert torch.equal(merged[side], torch.cat([part[side] for part in parts]))
    monkeypatch.undo()
    without_numbers = merge_parts(
        [Factors(*(x if x is None else x.to("meta") for x in part)) for part in parts]
    )
    for got, want in zip(without_numbers, merged, strict=True):
        assert (got is None and want is None) or got.shape == want.shape


def test_rows_that_the_kernel_cannot_align_are_computed_all_the_same():
    x, weight = torch.randn(5, 3).bfloat16(), torch.randn(3, 7, 3).bfloat16()
    assert not has_grouped_kernel(x, weight)
    expected = sequential_linear(x, weight, OFFSETS[0])
    assert torch.equal(grouped_linear(x, weight, OFFSETS[0]), expected)
