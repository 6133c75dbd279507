"""Lazy package fronts: a module is imported when one of its public names is used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


def lazy_front(
    package: str, rooms: Mapping[str, str], facades: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package; they include ``__version__``.

    Args:
        package: ``__name__`` of the package.
        rooms: module below the package that defines each public name.
        facades: modules below the package that are public themselves, by public name.
    """
    modules = facades or {}

    def get_attribute(name: str) -> object:
        if name == "__version__":
            return package_version(package)
        if name in modules:
            return import_module(f"{package}.{modules[name]}")
        if name not in rooms:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{rooms[name]}"), name)

    return get_attribute, lambda: sorted([*rooms, *modules, "__version__"])


def package_version(package: str) -> str:
    """Return the installed version of an mcore package; "0+source" if not installed."""
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "0+source"
