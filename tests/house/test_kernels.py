"""Triton kernels stay Triton's: the shape hook of the tests wraps everything but them."""

from importlib import import_module

import pytest
from house.sources import all_sources

pytest.importorskip("triton")

MODULES = sorted(
    source.name.removesuffix(".py").replace("/", ".")
    for source in all_sources()
    if "@triton.jit" in source.text
)


@pytest.mark.parametrize("name", MODULES)
def test_the_shape_hook_leaves_jit_functions_as_they_are_written(name):
    from triton.runtime import JITFunction

    module = import_module(name)
    found = {k: v for k, v in vars(module).items() if isinstance(v, JITFunction)}
    kernels = {k: v for k, v in found.items() if v.fn.__module__ == name}  # not imported ones
    assert kernels
    # A wrapped function has the wrapper's globals, in which there is no `tl`.
    homes = {k: vars(import_module(v.fn.__module__)) for k, v in kernels.items()}
    strange = [k for k, v in kernels.items() if v.fn.__globals__ is not homes[k]]
    assert not strange, f"put @no_type_check under @triton.jit of {strange} in {name}"
