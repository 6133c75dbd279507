"""Which format a folder of tensors is in, by its files."""

from pathlib import Path

from mcore_ckpt.formats.dcp import METADATA
from mcore_ckpt.formats.megatron.legacy import is_legacy
from mcore_ckpt.storage.paths import HF_CONFIG, is_complete, is_peft_folder


def folder_format(folder: Path) -> str:
    """Recognize by its files which format a folder of tensors is in; empty: in none."""
    if is_complete(folder):
        return "mcore"
    if (folder / "metadata.json").is_file() or is_legacy(folder):
        return "megatron"
    if (folder / METADATA).is_file():
        return "dcp"
    return "hf" if (folder / HF_CONFIG).is_file() or is_peft_folder(folder) else ""
