"""Tokenizes corpora to files, and makes training samples from these files.

The front is lazy (PEP 562): importing it imports no module of the package, so a command that
only needs help text never loads torch.
"""

from mcore_base.lazy_front import lazy_front

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
    "SampleOptions": "datasets.arrangement",
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

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
