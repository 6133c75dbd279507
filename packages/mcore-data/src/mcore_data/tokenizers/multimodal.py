"""A Hugging Face tokenizer for texts with images: one token for an image, and tags around it.

Only text is encoded here. An image is the token ``<image>``, which a vision model replaces by
its image embeddings. The chat template writes the text of a chat (``chat.py``).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mcore_data.tokenizers.hf import HFTokenizer, open_hf_tokenizer
from mcore_data.tokenizers.protocol import MARKER

IMAGE = "<image>"
TAGS = {"": ("", ""), "nvlm": ("<Image>", "</Image>"), "internvl": ("<img>", "</img>")}
"""Texts before and after ``<image>``, by Megatron's ``--image-tag-type``."""


class MultimodalTokenizer(HFTokenizer):
    """An ``HFTokenizer`` that inserts tags around each ``<image>`` before encoding.

    Tags are ordinary text unless they are also special tokens.

    Args:
        core: the tokenizer.
        config: as in ``HFTokenizer``.
        special_tokens: special tokens that were added to ``core``, for ``save``.
        image_tag_type: a key of ``TAGS``.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        special_tokens: Sequence[str] = (IMAGE,),
        image_tag_type: str = "",
    ) -> None:
        super().__init__(core, config)
        self.image_tag_type = image_tag_type
        self._special_tokens = tuple(special_tokens)
        self._tagged = IMAGE.join(TAGS[image_tag_type])

    @classmethod
    def open(
        cls, path: str | Path, special_tokens: Sequence[str], image_tag_type: str
    ) -> "MultimodalTokenizer":
        """Open a folder or file as ``open_hf_tokenizer`` does, with its errors."""
        plain = open_hf_tokenizer(path, special_tokens)
        if image_tag_type and plain.token_id(IMAGE) is None:
            raise ValueError(
                f"--image-tag-type {image_tag_type} needs the token {IMAGE}: add it to "
                "--tokenizer-special-tokens."
            )
        return cls(plain.core, plain.config, special_tokens, image_tag_type)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with tags around its images."""
        return super().encode(self._tag(text), add_special_tokens=add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of many texts, with tags around their images."""
        tagged = list(map(self._tag, texts))
        return super().encode_batch(tagged, add_special_tokens=add_special_tokens)

    def fingerprint(self) -> str:
        """Return a hash of the tokenizer and the tags."""
        return hashlib.sha256((super().fingerprint() + self._tagged).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the files of ``HFTokenizer.save`` and the type of the tags."""
        super().save(folder)
        fields = {
            "tokenizer_type": "MultimodalTokenizer",
            "tokenizer_model": "tokenizer.json",
            "tokenizer_special_tokens": self._special_tokens,
            "image_tag_type": self.image_tag_type,
        }
        (Path(folder) / MARKER).write_text(json.dumps(fields, indent=2) + "\n")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.text, self.config, self._special_tokens, self.image_tag_type)

    def _tag(self, text: str) -> str:
        return text.replace(IMAGE, self._tagged) if self.image_tag_type else text


def _rebuild(
    text: str, config: dict[str, Any], special_tokens: tuple[str, ...], image_tag_type: str
) -> MultimodalTokenizer:
    core = tokenizers.Tokenizer.from_str(text)
    return MultimodalTokenizer(core, config, special_tokens, image_tag_type)
