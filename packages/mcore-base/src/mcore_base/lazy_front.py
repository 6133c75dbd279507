"""Package fronts that import a module when a public name of it is first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


def lazy_front(
    package: str, rooms: Mapping[str, str], facades: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``, which know its version too.

    Args:
        package: ``__name__`` there.
        rooms: for each public name the module below the package that owns it.
        facades: modules that are public names themselves, by that name.
    """
    modules = facades or {}

    def owned(name: str) -> object:
        if name == "__version__":
            return package_version(package)
        if name in modules:
            return import_module(f"{package}.{modules[name]}")
        if name not in rooms:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{rooms[name]}"), name)

    return owned, lambda: sorted([*rooms, *modules, "__version__"])


def package_version(package: str) -> str:
    """Return the version of a package of ours, or what stands for one that is not installed."""
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "0+source"
