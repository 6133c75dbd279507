"""Corpora to tokens on disk, tokens on disk to training samples.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_EXPORTS: dict[str, str] = {
    "BERTDataset": "datasets.bert",
    "BlendedDataset": "datasets.blending",
    "GPTDataset": "datasets.gpt",
    "IndexedDataset": "indexed.reader",
    "IndexedWriter": "indexed.writer",
    "MockGPTDataset": "datasets.mock",
    "PackedDataset": "datasets.packing",
    "RunData": "tracing.explaining",
    "SFTDataset": "datasets.chat",
    "T5Dataset": "datasets.t5",
    "build_gpt_datasets": "datasets.from_flags",
    "build_sentence_datasets": "datasets.sentence_datasets",
    "build_loader": "loading.loader",
    "load_tokenizer": "tokenizers.building",
    "merge_pairs": "indexed.merging",
    "preprocess": "preprocessing.preprocessing",
    "read_manifest": "indexed.manifest",
    "train_tokenizer": "preprocessing.tokenizer_training",
    "verify_pair": "indexed.inspection",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    """Import the room that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-data")
        except PackageNotFoundError:
            return "0+source"
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__"])
