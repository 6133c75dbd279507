"""Products by tuned algorithms: the same numbers, by memory as cublasLt reads it."""

import numpy as np
import pytest
import torch

from mcore_parallel.cublaslt import describe
from mcore_parallel.tuned_products import (
    LEAST_FLOPS,
    choices,
    fastest,
    finalists,
    multiply,
    multiply_rows,
    plain_product,
    tuned_products,
)

LAYOUTS = ["plain", "transposed", "slice", "transposed slice"]


def stored(rows, columns, layout, dtype=torch.bfloat16, device="cpu"):
    """A random matrix in memory as the layout says."""
    generator = torch.Generator().manual_seed(rows + 7 * columns)
    wide = 8 * ("slice" in layout)
    shape = (columns, rows + wide) if "transposed" in layout else (rows, columns + wide)
    values = torch.randn(shape, generator=generator).to(device, dtype)
    return values[:, :rows].t() if "transposed" in layout else values[:, :columns]


def by_columns(matrix, description):
    """Read a factor's memory as cublasLt does, from its description alone."""
    flat = matrix.as_strided((matrix.untyped_storage().nbytes() // matrix.itemsize,), (1,), 0)
    values = flat.float().numpy()
    strides = (values.itemsize, values.itemsize * description.leading)
    shape = (description.rows, description.columns)
    read = np.lib.stride_tricks.as_strided(values, shape, strides)
    return read.T if description.is_transposed else read


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_cublaslt_is_told_where_each_element_lies(a_layout, b_layout):
    a, b = stored(24, 40, a_layout), stored(40, 56, b_layout)
    out = torch.zeros(24, 64)[:, :56]
    product = describe(a, b, out, adds=True)
    assert product.flops == 2 * 24 * 40 * 56
    assert (product.result.rows, product.result.columns, product.result.leading) == (56, 24, 64)
    got = by_columns(b, product.first) @ by_columns(a, product.second)
    np.testing.assert_allclose(got.T, (a.float() @ b.float()).numpy(), rtol=1e-5, atol=1e-5)


def test_what_cublaslt_cannot_take_is_left_to_torch():
    a, b = stored(8, 8, "plain"), stored(8, 8, "plain")
    out = torch.empty(8, 8, dtype=torch.bfloat16)
    assert describe(a, b, out, adds=False) is not None
    assert describe(a.float(), b.float(), out.float(), adds=False) is None
    assert describe(a, b.half(), out, adds=False) is None
    assert describe(a, b, out.double(), adds=False) is None
    assert describe(a, b, out.t(), adds=False) is None
    every_other = torch.empty(8, 16, dtype=torch.bfloat16)[:, ::2]
    assert describe(every_other, b, out, adds=False) is None
    assert describe(a, b.expand(8, 8)[:1].expand(8, 8), out, adds=False) is None


def test_the_median_decides_and_torchs_own_product_stays_where_nothing_beats_it():
    assert fastest({-1: [9.0, 2.0, 2.0, 2.0], 0: [1.0, 2.1, 2.1, 2.1]}) == -1
    assert (
        fastest({-1: [1.0, 2.0, 2.0, 2.0], 0: [9.0, 1.9, 1.9, 9.0], 1: [1.0, 1.8, 1.8, 3.0]})
        == 1
    )
    assert fastest({-1: [1.0, 2.0, 2.0, 2.0], 0: [1.0, 1.995, 1.995, 1.995]}) == -1


def test_torchs_own_product_is_always_among_the_finalists():
    times = {-1: [9.0, 9.0], 0: [1.0, 3.0], 1: [9.0, 2.0], 2: [1.0, 4.0]}
    assert finalists(times, 2) == [-1, 1, 0]
    assert finalists({-1: [1.0, 1.0]}, 2) == [-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_a_product_on_a_cpu_is_torchs_whether_tuned_or_not(dtype, adds):
    a, b = stored(16, 24, "transposed", dtype), stored(24, 32, "plain", dtype)
    before = torch.randn(16, 32, dtype=torch.promote_types(dtype, torch.float32))
    want = a.to(before.dtype) @ b.to(before.dtype) + (before if adds else 0)
    with tuned_products():
        got = multiply(a, b, out=before.clone(), adds=adds)
        rows = multiply_rows(a.reshape(2, 8, 24), b)
    torch.testing.assert_close(got, want)
    assert torch.equal(rows, a.reshape(2, 8, 24) @ b)
    assert torch.equal(multiply(a, b), a @ b)


@pytest.fixture
def with_choices():
    with tuned_products():
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "adds"),
    [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)],
    ids=["bf16", "float32", "added"],
)
def test_a_tuned_product_is_its_plain_twin(a_layout, b_layout, dtype, adds, with_choices):
    a = stored(2048, 4096, a_layout, device="cuda")
    b = stored(4096, 3584, b_layout, device="cuda")
    before = torch.randn(2048, 3584, device="cuda").to(dtype)
    want = before.clone()
    plain_product(a, b, want, adds=adds)
    got = multiply(a, b, out=before.clone(), adds=adds)
    again = multiply(a, b, out=before.clone(), adds=adds)
    assert describe(a, b, want, adds=adds) in dict(choices())
    assert torch.equal(got, again)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
def test_every_proposal_gives_the_product():
    from mcore_parallel.cublaslt import WORKSPACE_BYTES, Algorithms

    a, b = (
        stored(2048, 4096, "plain", device="cuda"),
        stored(4096, 3584, "transposed", device="cuda"),
    )
    total = torch.randn(2048, 3584, device="cuda")
    want = total.double() + a.double() @ b.double()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    algorithms = Algorithms(describe(a, b, total, adds=True))
    assert len(algorithms) > 1
    for number in range(len(algorithms)):
        got = total.clone()
        algorithms.run(number, a, b, got, workspace)
        assert (got.double() - want).norm() / want.norm() < 1e-5


@pytest.mark.gpu
def test_small_products_unaligned_ones_and_deterministic_ones_stay_torchs(with_choices):
    known = len(choices())
    a, b = stored(64, 64, "plain", device="cuda"), stored(64, 64, "plain", device="cuda")
    assert LEAST_FLOPS > 2 * 64**3
    assert torch.equal(multiply(a, b), a @ b)
    flat = torch.randn(4096 * 4096 + 1, device="cuda").bfloat16()
    shifted = flat[1:].view(4096, 4096)
    assert torch.equal(multiply(shifted, shifted), shifted @ shifted)
    whole = flat[:-1].view(4096, 4096)
    try:
        torch.use_deterministic_algorithms(True)
        multiply(whole, whole)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(choices()) == known


@pytest.mark.gpu
def test_a_tuned_product_can_be_recorded_in_a_graph(with_choices):
    a, b = (
        stored(4096, 4096, "plain", device="cuda"),
        stored(4096, 4096, "plain", device="cuda"),
    )
    out = torch.empty_like(a)
    with torch.cuda.stream(torch.cuda.Stream()):
        want = multiply(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            multiply(a, b, out=out)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, want)
