"""fp8 GEMMs that add to their output, by NVIDIA's cublasLt through ctypes.

torch's scaled GEMM overwrites its output, so a weight's gradient would be a temporary that
another kernel adds to the main gradient: 12 more bytes of memory traffic per weight and
micro-batch. cublasLt adds in the GEMM's epilogue. The module calls the cublasLt that torch has
loaded; nothing is compiled or installed.

Names and numbers: NVIDIA, cuBLAS 13 documentation, "Using the cuBLASLt API".
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, wave

WORKSPACE_BYTES = 32 * 2**20
"""torch's own workspace size for cublasLt on Hopper."""

_TYPES = {  # cudaDataType_t
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F = 68  # cublasComputeType_t
_TRANSA, _A_SCALE, _B_SCALE = 3, 17, 18  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE, _ALIGNMENTS = 1, (7, 8)  # cublasLtMatmulPreferenceAttributes_t


def _add_plain(
    total: Float[Tensor, "M N"],
    a: Shaped[Tensor, "M K"],
    b: Shaped[Tensor, "N K"],
    a_scale: Float[Tensor, " 1"],
    b_scale: Float[Tensor, " 1"],
) -> None:
    total.copy_(total.float() + a_scale * b_scale * (a.float() @ b.float().t()))


def _kind(total: Tensor, a: Tensor) -> tuple[torch.dtype, torch.dtype] | None:
    return (total.dtype, a.dtype) if total.data_ptr() % 16 == 0 else None


def _samples(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float8_e5m2,
) -> Iterator[Sample]:
    rows, columns, inner = 64, 96, 128
    a = wave(rows, inner, device=device, dtype=torch.float32).to(grad_dtype)
    b = wave(columns, inner, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = (torch.full((1,), scale, device=device) for scale in (0.5, 3.0))
    yield Sample(wave(rows, columns, device=device, dtype=dtype), a, b, *scales)


@optional_kernel(
    "cublasLt's fp8 GEMM that adds",
    reference=_add_plain,
    kind=_kind,
    samples=_samples,
    packages=("nvidia-cublas",),
)
def add_scaled_matmul(
    total: Float[Tensor, "M N"],
    a: Shaped[Tensor, "M K"],
    b: Shaped[Tensor, "N K"],
    a_scale: Float[Tensor, " 1"],
    b_scale: Float[Tensor, " 1"],
) -> None:
    """Add the scaled matrix product of a and the transpose of b to ``total`` in place.

    Args:
        total: float32 or bfloat16, contiguous, at a multiple of 16 bytes.
        a: fp8, contiguous.
        b: fp8, contiguous.
        a_scale: multiplies a; float32.
        b_scale: multiplies b; float32.

    Raises:
        RuntimeError: if cublasLt is missing or refuses the sizes.
    """
    (rows, inner), columns = a.shape, b.shape[0]
    # 256 bytes is the alignment that cublasLt assumes by default.
    alignment = 256 if total.data_ptr() % 256 == 0 else 16
    dtypes = a.dtype, b.dtype, total.dtype
    plan = _plan(rows, columns, inner, *dtypes, alignment, torch.cuda.current_device())
    plan.run(total, a, b, a_scale, b_scale)


class _Proposal(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``; the algorithm is opaque."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Plan:
    """cublasLt's description of a GEMM and the algorithm that its heuristic proposes.

    cublasLt is column-major, so it sees each of our row-major matrices as its transpose. We ask
    for ``total' = b a'``: b is the first factor and gets the flag "transposed", because
    cublasLt sees b'. Both factors are then contiguous along the summed dimension, as fp8
    requires.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        inner: int,
        a_dtype: torch.dtype,
        b_dtype: torch.dtype,
        dtype: torch.dtype,
        alignment: int,
        device: int,
    ) -> None:
        self._handle = _handle(device)
        self._description = c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._description), _COMPUTE_32F, 0)
        self._set(_TRANSA, c_int32(1))
        self._first = _layout(b_dtype, inner, columns)
        self._second = _layout(a_dtype, inner, rows)
        self._result = _layout(dtype, columns, rows)
        self._one = c_float(1.0)
        self._algorithm = self._propose(alignment).algorithm

    def run(
        self, total: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor
    ) -> None:
        """Enqueue the GEMM on the current stream."""
        self._set(_A_SCALE, c_void_p(b_scale.data_ptr()))
        self._set(_B_SCALE, c_void_p(a_scale.data_ptr()))
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=total.device)
        _call(
            "cublasLtMatmul",
            self._handle,
            self._description,
            ctypes.byref(self._one),
            b.data_ptr(),
            self._first,
            a.data_ptr(),
            self._second,
            ctypes.byref(self._one),
            total.data_ptr(),
            self._result,
            total.data_ptr(),
            self._result,
            self._algorithm,
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )

    def _set(self, attribute: int, value: c_int32 | c_void_p) -> None:
        size = ctypes.sizeof(value)
        description = self._description
        function = "cublasLtMatmulDescSetAttribute"
        _call(function, description, attribute, ctypes.byref(value), size)

    def _propose(self, alignment: int) -> _Proposal:
        preference, proposal, count = c_void_p(), _Proposal(), c_int()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        function = "cublasLtMatmulPreferenceSetAttribute"
        try:
            workspace = c_uint64(WORKSPACE_BYTES)
            _call(function, preference, _MAX_WORKSPACE, ctypes.byref(workspace), 8)
            for attribute in _ALIGNMENTS:
                _call(function, preference, attribute, ctypes.byref(c_uint32(alignment)), 4)
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                self._description,
                self._first,
                self._second,
                self._result,
                self._result,
                preference,
                1,
                ctypes.byref(proposal),
                ctypes.byref(count),
            )
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value or proposal.state:
            raise RuntimeError("cublasLt has no algorithm for an fp8 GEMM that adds")
        return proposal


_plan = cache(_Plan)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    reference = ctypes.byref(layout)
    _call("cublasLtMatrixLayoutCreate", reference, _TYPES[dtype], rows, columns, rows)
    return layout


@cache
def _library() -> ctypes.CDLL:
    """Load the cublasLt that torch uses, and declare the functions' argument types."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        for function, arguments in _signatures().items():
            getattr(library, function).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{name} cannot be used: {error}") from error
    return library


def _signatures() -> dict[str, list[type]]:
    pointer = c_void_p
    return {
        "cublasLtCreate": [pointer],
        "cublasLtMatmulDescCreate": [pointer, c_int, c_int],
        "cublasLtMatmulDescSetAttribute": [pointer, c_int, pointer, c_size_t],
        "cublasLtMatrixLayoutCreate": [pointer, c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatmulPreferenceCreate": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, c_int, pointer, c_size_t],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulAlgoGetHeuristic": [*(pointer,) * 7, c_int, pointer, pointer],
        "cublasLtMatmul": [*(pointer,) * 14, c_size_t, pointer],
    }


def _call(function: str, *arguments: object) -> None:
    if status := getattr(_library(), function)(*arguments):
        raise RuntimeError(f"{function} returned {status} (cublasStatus_t)")


@cache
def _handle(device: int) -> c_void_p:
    del device  # only a cache key: cublasLtCreate uses the current device
    torch.cuda.current_blas_handle()  # loads cublas, and with it cublasLt
    handle = c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle
