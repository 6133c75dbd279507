"""Fill-in-the-middle: cuts a document into three parts and reorders them.

A rewritten document is ``PRE prefix SUF suffix MID middle`` or, in suffix-prefix-middle
order, ``PRE SUF suffix MID prefix middle``. The two cuts are between characters, so the text is
decoded, cut and encoded again. Each sample has its own random generator, so a sample does not
depend on the order of reading (in Megatron it does, since all samples draw from one stream).

Reference:
    Bavarian et al. 2022, Efficient Training of Language Models to Fill in the Middle.
    arXiv:2207.14255.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_data.config import FIMConfig
from mcore_data.tokenizers.protocol import Tokenizer

_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Rewrites the parts of a sample; a ``transform`` of ``GPTDataset``.

    Attributes:
        tokenizer: tokenizer of the stored tokens.
        config: shares and token names.
        prefix: id before the prefix.
        middle: id before the middle.
        suffix: id before the suffix.
        pad: id that pads a sample.
        split: id at which documents are cut into fragments; None: documents are not cut.
    """

    tokenizer: Tokenizer
    config: FIMConfig
    prefix: int
    middle: int
    suffix: int
    pad: int
    split: int | None = None

    @staticmethod
    def build(tokenizer: Tokenizer | None, config: FIMConfig) -> "FillInMiddle":
        """Look up the ids of the config's tokens."""
        if tokenizer is None:
            raise ValueError("--fim-data decodes and encodes text: give --tokenizer-model.")
        roles = ("prefix", "middle", "suffix", "pad")
        ids = {role: _token_id(tokenizer, f"fim_{role}_token", config) for role in roles}
        split = None
        if config.fim_split_sample:
            split = _token_id(tokenizer, "fim_split_sample", config)
        return FillInMiddle(tokenizer, config, **ids, split=split)

    def __call__(
        self, part: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Rewrite one document's part with probability ``fim_rate``; an end token stays last.

        With ``split`` the draw decides for the whole part, and a second draw for each fragment.
        """
        config = self.config
        eod = self.tokenizer.eod
        has_end = len(part) > 0 and eod is not None and part[-1] == eod
        text = part[:-1] if has_end else part
        end = part[-1:] if has_end else part[:0]
        if self.split is None:
            return np.concatenate([self.permute(text, random, config.fim_rate), end])
        if random.random() >= config.fim_rate:
            return part
        rate = config.fim_fragment_rate or config.fim_rate
        cuts = np.flatnonzero(text == self.split)
        pieces = []
        for fragment in np.split(text, cuts):
            head = fragment[:1] if len(fragment) and fragment[0] == self.split else text[:0]
            pieces += [head, self.permute(fragment[len(head) :], random, rate)]
        return np.concatenate([*pieces, end])

    def permute(
        self, tokens: NDArray[np.int64], random: np.random.Generator, rate: float
    ) -> NDArray[np.int64]:
        """Rewrite one text with probability ``rate``."""
        if not len(tokens) or random.random() >= rate:
            return tokens
        text = self.tokenizer.decode(tokens.tolist())
        if _BROKEN in text:  # the part begins or ends inside a character
            return tokens
        if self.config.fim_no_prefix and text.startswith(self.config.fim_no_prefix):
            return tokens
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        prefix, middle, suffix = (
            self.tokenizer.encode(piece, add_special_tokens=False)
            for piece in (text[:first], text[first:second], text[second:])
        )
        if random.random() < self.config.fim_spm_rate:
            order = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            order = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(order, np.int64)


def _token_id(tokenizer: Tokenizer, field: str, config: FIMConfig) -> int:
    name = getattr(config, field)
    number = tokenizer.token_id(name)
    if number is None:
        raise ValueError(
            f"--{field.replace('_', '-')} {name} is not a token of the tokenizer: name one of "
            "its tokens, or add this one by --tokenizer-special-tokens."
        )
    return number
