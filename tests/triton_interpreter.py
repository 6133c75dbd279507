"""Triton's interpreter, made to run on a new NumPy and in half its time.

Of Triton 3.6. What is left out has no effect on what a kernel computes: most of the time went
into names of types that nobody reads, and into checks for overflow whose result is dropped
unless Triton debugs.
"""

import functools

import numpy as np
import triton.runtime.interpreter as interpreter
from triton.language import core


@functools.cache
def prepare() -> None:
    """Patch the interpreter of this process, once."""
    _let_loops_run_with_new_numpy()
    _let_functions_of_kernels_start_at_once()
    _name_tuples_when_asked()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    known, pointer = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda dtype: (
        pointer if dtype.scalar.is_ptr() else known(dtype.scalar)
    )


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
