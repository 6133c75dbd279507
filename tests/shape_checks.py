"""Annotated shapes, checked in tests at a small part of the usual cost.

jaxtyping's import hook decorates every function and checks every call, which takes longer than
tests of tiny tensors do. Whether a call keeps to its annotations depends on the shapes and
dtypes that go in and come out: here a function is prepared at its first call, and checked once
for each set of shapes and dtypes of its arguments. Functions without annotated arrays are left
as they are.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

CHECKED_PACKAGES = ("mcore_parallel", "mcore_moe", "mcore_models", "mcore_ckpt", "mcore_infer")


def install_shape_checks() -> None:
    """Check the annotated arrays of our packages' modules that are imported from now on.

    Raises:
        ImportError: if beartype is not installed.
    """
    import beartype  # noqa: F401 - the hook imports it by name, in each module
    import jaxtyping

    # What the hook puts before every function and class.
    once = functools.partial(_checked_once, jaxtyping.jaxtyped)
    jaxtyping.jaxtyped = once  # pyrefly: ignore[bad-assignment]
    jaxtyping.install_import_hook(list(CHECKED_PACKAGES), "beartype.beartype")


def _checked_once(jaxtyped: Callable[..., Any], *, typechecker: Any) -> Callable[..., Any]:
    """Return a decorator of functions and classes, in place of ``jaxtyped``'s."""
    check = functools.partial(jaxtyped, typechecker=typechecker)

    def decorate(decorated: Any) -> Any:
        if not inspect.isclass(decorated):
            return _lazily(decorated, check) if _has_arrays(decorated) else decorated
        if dataclasses.is_dataclass(decorated) and _has_arrays(decorated.__init__):
            decorated.__init__ = _lazily(decorated.__init__, check)
        return decorated

    return decorate


def _lazily(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """Check the calls whose arguments are of kinds that no call before had."""
    checked: Callable[..., Any] | None = None
    seen: set[tuple[Any, ...]] = set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        key = *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items())
        if key in seen:
            return function(*args, **kwargs)
        checked = checked or check(function)
        result = checked(*args, **kwargs)
        seen.add(key)
        return result

    return call


def _kind(value: Any) -> Any:
    """Return what decides whether an argument keeps to its annotation."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_kind, value)
    if hasattr(type(value), "shape"):  # A module takes long to say that it has none.
        return type(value), value.shape, getattr(value, "dtype", None)
    return type(value)


def _has_arrays(function: Callable[..., Any]) -> bool:
    return any(map(_is_array, function.__annotations__.values()))


def _is_array(annotation: Any) -> bool:
    """Whether an annotation is an array's with a shape, or has one within."""
    if isinstance(annotation, str):
        return "Tensor," in annotation
    if hasattr(annotation, "array_type") and hasattr(annotation, "dims"):
        return True
    return any(map(_is_array, typing.get_args(annotation)))
