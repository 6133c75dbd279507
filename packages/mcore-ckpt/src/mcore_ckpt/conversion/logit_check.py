"""The last check of a conversion: both sides compute the same logits, in transformers.

A side that is no Hugging Face folder is turned into one aside, under the family that its
weights came from. Needs the extra ``check``.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.conversion.conversion import ConvertOptions, convert
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.stores import as_path

ROUNDING = 1e-4
"""Largest difference of float32 logits, relative to the largest of them, for equal weights."""

CAST_ROUNDING = 5e-2
"""The same where one side's weights were cast to 16 bits."""

_LENGTH = 16


def compare_logits(
    one: tuple[str, Path],
    other: tuple[str, Path],
    *,
    config: str = "",
    bound: float = ROUNDING,
    seed: int = 0,
) -> float:
    """Compute logits of random tokens from two checkpoints, in float32 on the CPU.

    Models are held in memory whole, one at a time.

    Args:
        one: format and folder.
        other: the other's.
        config: config.json of the first, if it does not say which model it is.
        bound: largest difference allowed, relative to the largest logit.
        seed: of the tokens.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        ValueError: if transformers is missing, or a side is no causal language model.
        CheckpointError: if logits differ by more.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            "--check computes logits with transformers: pip install 'mcore-ckpt[check]'."
        ) from None
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            _hf_folder(*one, config, scratch, "one"),
            _hf_folder(*other, "", scratch, "two"),
        ]
        vocab = min(AutoConfig.from_pretrained(folder).vocab_size for folder in folders)
        tokens = torch.randint(
            vocab, (1, _LENGTH), generator=torch.Generator().manual_seed(seed)
        )
        first, second = (_logits(folder, tokens)[..., :vocab] for folder in folders)
    worst = ((first - second).abs().max() / first.abs().max()).item()
    if not worst <= bound:
        raise CheckpointError(
            f"logits of the two sides differ by {worst:.3g} of the largest: {bound:.3g} at most"
        )
    return worst


def _hf_folder(form: str, folder: Path, config: str, scratch: str, name: str) -> Path:
    if form == "hf":
        return as_path(folder)
    there = Path(scratch) / name
    convert(form, folder, "hf", there, ConvertOptions(config=config))
    return there


def _logits(folder: Path, tokens: Tensor) -> Float[Tensor, "B S V"]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits
