"""Patches of the interpreters of Triton 3.6 and 3.9: new NumPy, half the time, GPUs' rounding.

Most of its time went into names of types that nobody reads, and into checks for overflow whose
result is dropped unless Triton debugs. Its casts to bfloat16 cut numbers off, and those to fp8
round ties up and lose carries; torch's casts round to the nearest even number, as GPUs do.
"""

import functools

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from triton.language import core


@functools.cache
def prepare() -> None:
    """Patch the interpreter of this process, once."""
    _let_loops_run_with_new_numpy()
    _let_functions_of_kernels_start_at_once()
    _name_tuples_when_asked()
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter._convert_float = _cast_by_torch
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    known, pointer = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda dtype: (
        pointer if dtype.scalar.is_ptr() else known(dtype.scalar)
    )


def _splat(builder, block_type, scalar):
    """Fill a block with a scalar and keep the array's dtype.

    Triton takes the dtype of its handle, which for a comparison is that of what was compared:
    Triton 3.9 refuses such integers as a mask.
    """
    values = np.full(block_type.shape, scalar.data.reshape(-1)[0], scalar.data.dtype)
    return interpreter.TensorHandle(values, scalar.dtype.scalar)


def _cast_by_torch(values, given, wanted, rounding_mode):
    """Cast an array of a Triton dtype to another; returns the bits as unsigned integers."""
    assert rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    bits = np.ascontiguousarray(values).view(_integer(given))
    cast = torch.from_numpy(bits).view(dtypes[given.name]).float().to(dtypes[wanted.name])
    integer = _integer(wanted)
    return cast.view(getattr(torch, integer)).numpy().view(f"u{integer}")


def _integer(dtype):
    return f"int{dtype.primitive_bitwidth}"


def _let_loops_run_with_new_numpy() -> None:
    """Triton 3.6 makes an int of a loop's bound, an array of one element: NumPy forbids it."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _let_functions_of_kernels_start_at_once() -> None:
    """Triton patches its language again at every call of one; a module's first is enough."""
    patched = set()

    def call(function, *args, **kwargs):
        module = function.fn.__module__
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _name_tuples_when_asked() -> None:
    """Every tensor's shape is a tuple of Triton's, which spells out the type of its members."""

    as_told, of_fields = core.tuple.__init__, core.tuple.__getattr__

    def begin(self, args, type=None):
        if type is None:
            self.values = list(args)
        else:
            as_told(self, args, type)

    def find(self, name):
        if name != "type":
            return of_fields(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = begin, find
