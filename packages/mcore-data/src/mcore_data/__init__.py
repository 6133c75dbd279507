"""Corpora to tokens on disk, tokens on disk to training samples.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_ROOMS: dict[str, str] = {
    "BERTDataset": "bert",
    "BlendedDataset": "blending",
    "GPTDataset": "gpt",
    "IndexedDataset": "indexed",
    "IndexedWriter": "indexed_writing",
    "MockBERTDataset": "mock",
    "MockFIMDataset": "mock",
    "MockGPTDataset": "mock",
    "MockPackedDataset": "mock",
    "MockSFTDataset": "mock",
    "MockT5Dataset": "mock",
    "PackedDataset": "packing",
    "RunData": "explaining",
    "SFTDataset": "chat",
    "T5Dataset": "t5",
    "build_gpt_datasets": "datasets",
    "build_loader": "loader",
    "load_tokenizer": "tokenizer",
    "merge_pairs": "merging",
    "preprocess": "preprocessing",
    "read_manifest": "manifest",
    "train_tokenizer": "tokenizer_training",
    "verify_pair": "inspection",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> object:
    """Import the room that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-data")
        except PackageNotFoundError:
            return "0+source"
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__"])
