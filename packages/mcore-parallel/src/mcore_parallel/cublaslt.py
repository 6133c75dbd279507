"""Matrix products of NVIDIA's cublasLt by algorithm, through ctypes.

The library is the one that torch has loaded: nothing is built and nothing else is installed.
cublasLt proposes several algorithms for a product, the one that it thinks fastest first; torch
takes the first. Here each can be called, so that they can be timed (``tuned_products``).

Names and numbers: NVIDIA, cuBLAS 13 documentation, "Using the cuBLASLt API".
"""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

MAX_PROPOSALS = 8
WORKSPACE_BYTES = 32 * 2**20
"""What torch itself gives cublasLt on Hopper."""
ALIGNMENT = 16
"""Bytes at which all memory begins that the proposals are asked for."""

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_32F = 68  # cublasComputeType_t
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t


class CublasLtError(RuntimeError):
    """cublasLt is missing or refused a call."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix as cublasLt sees its memory: column by column."""

    rows: int
    columns: int
    leading: int
    """Elements from one column to the next."""
    is_transposed: bool
    """Whether the product takes it transposed."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Product:
    """``out = a b``, or ``out += a b``, in cublasLt's terms: ``out' = b' a'`` by columns.

    A row-major matrix read by columns is its transpose, so the factors change places.
    """

    first: Stored
    second: Stored
    result: Stored
    adds: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        inner = self.first.rows if self.first.is_transposed else self.first.columns
        return 2 * self.result.rows * self.result.columns * inner


def describe(
    a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], out: Float[Tensor, "M N"], *, adds: bool
) -> Product | None:
    """Describe a product of factors with any strides; None if cublasLt cannot take it so.

    It takes float16 and bfloat16 factors of one dtype, each with one dimension contiguous, and
    a row-major result of their dtype or float32.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        return None
    if out.dtype not in (a.dtype, torch.float32):
        return None
    first, second, result = _stored(b), _stored(a), _stored(out)
    if first is None or second is None or result is None or result.is_transposed:
        return None
    return Product(first, second, result, adds)


def _stored(matrix: Tensor) -> Stored | None:
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    if across == 1 and down >= columns:
        return Stored(columns, rows, down, False, matrix.dtype)
    if down == 1 and across >= rows:
        return Stored(rows, columns, across, True, matrix.dtype)
    return None


class _Proposal(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``; the algorithm is opaque."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Algorithms:
    """What cublasLt proposes for one product on one device, each ready to be called."""

    def __init__(self, product: Product) -> None:
        """Ask for proposals on the current device.

        Raises:
            CublasLtError: if the library is missing or refuses the product.
        """
        self._library = _library()
        self._handle = _handle(torch.cuda.current_device())
        self._description = self._describe(product)
        self._first, self._second, self._result = (
            self._layout(product.first),
            self._layout(product.second),
            self._layout(product.result),
        )
        self._alpha, self._beta = c_float(1.0), c_float(1.0 if product.adds else 0.0)
        self._proposals = self._propose()

    def __len__(self) -> int:
        """Count the proposals."""
        return len(self._proposals)

    def run(self, number: int, a: Tensor, b: Tensor, out: Tensor, workspace: Tensor) -> None:
        """Enqueue the product on the current stream.

        Args:
            number: of the proposal, from 0.
            a: as described.
            b: as described.
            out: written, or added to.
            workspace: ``WORKSPACE_BYTES`` that nothing else on the device uses meanwhile.

        Raises:
            CublasLtError: if cublasLt refuses.
        """
        status = self._library.cublasLtMatmul(
            self._handle,
            self._description,
            ctypes.byref(self._alpha),
            b.data_ptr(),
            self._first,
            a.data_ptr(),
            self._second,
            ctypes.byref(self._beta),
            out.data_ptr(),
            self._result,
            out.data_ptr(),
            self._result,
            self._proposals[number].algorithm,
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )
        _check(status, "cublasLtMatmul")

    def _describe(self, product: Product) -> c_void_p:
        description = c_void_p()
        create = self._library.cublasLtMatmulDescCreate
        _check(create(ctypes.byref(description), _COMPUTE_32F, 0), "cublasLtMatmulDescCreate")
        set_attribute = self._library.cublasLtMatmulDescSetAttribute
        for attribute, stored in ((_TRANSA, product.first), (_TRANSB, product.second)):
            value = c_int32(int(stored.is_transposed))
            status = set_attribute(description, attribute, ctypes.byref(value), 4)
            _check(status, "cublasLtMatmulDescSetAttribute")
        return description

    def _layout(self, stored: Stored) -> c_void_p:
        layout = c_void_p()
        status = self._library.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout),
            _TYPES[stored.dtype],
            stored.rows,
            stored.columns,
            stored.leading,
        )
        _check(status, "cublasLtMatrixLayoutCreate")
        return layout

    def _propose(self) -> list[_Proposal]:
        preference, size = c_void_p(), c_uint64(WORKSPACE_BYTES)
        library = self._library
        status = library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        _check(status, "cublasLtMatmulPreferenceCreate")
        try:
            status = library.cublasLtMatmulPreferenceSetAttribute(
                preference, _MAX_WORKSPACE_BYTES, ctypes.byref(size), 8
            )
            _check(status, "cublasLtMatmulPreferenceSetAttribute")
            found, count = (_Proposal * MAX_PROPOSALS)(), c_int()
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                self._description,
                self._first,
                self._second,
                self._result,
                self._result,
                preference,
                MAX_PROPOSALS,
                found,
                ctypes.byref(count),
            )
            _check(status, "cublasLtMatmulAlgoGetHeuristic")
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        return [proposal for proposal in found[: count.value] if proposal.state == 0]


@cache
def _library() -> ctypes.CDLL:
    """Find the library among those that torch has loaded, and declare what is called."""
    version = (torch.version.cuda or "").partition(".")[0]
    name = f"libcublasLt.so.{version}"
    try:
        library = ctypes.CDLL(name)
        for function, arguments in _signatures().items():
            getattr(library, function).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise CublasLtError(f"{name} cannot be used: {error}") from error
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


@cache
def _handle(device: int) -> c_void_p:
    del device  # a handle belongs to the device that is current
    torch.cuda.current_blas_handle()  # loads cublas, and with it cublasLt
    handle = c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


def _check(status: int, function: str) -> None:
    if status:
        raise CublasLtError(f"{function} returned {status} (cublasStatus_t)")
