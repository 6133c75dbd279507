"""Distributed checkpoints: save under one layout, load under any other, speak many formats.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_ROOMS: dict[str, str] = {
    "AsyncSaver": "async_saving",
    "CheckpointError": "errors",
    "ConvertOptions": "conversion",
    "FolderLock": "locking",
    "HFView": "hf_saving",
    "Index": "index",
    "LocalConfig": "config",
    "LocalSaver": "local_saving",
    "PlanCache": "saving",
    "Report": "conversion",
    "RetentionConfig": "config",
    "StrictnessConfig": "config",
    "average": "rewriting",
    "convert": "conversion",
    "hf_to_mcore": "conversion",
    "hf_view": "hf_saving",
    "latest_step": "paths",
    "load": "loading",
    "mcore_to_hf": "conversion",
    "prune": "retention",
    "read_index": "index",
    "read_tensor": "loading",
    "reshard": "rewriting",
    "resolve_folder": "paths",
    "save": "saving",
    "step_folder": "paths",
    "torch_model_shards": "dtensors",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> object:
    """Import the room that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-ckpt")
        except PackageNotFoundError:
            return "0+source"
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__"])
