"""T5 samples: spans of a text are cut out, sentinels stand in their places.

The encoder reads the text with each span replaced by a sentinel of its own; the decoder
writes ``s0 span0 s1 span1 ...`` and the end. Megatron's form: no sentinel follows the last
span, unlike Hugging Face's. From data of ``--split-sentences``; a sample depends on seed and
index alone.

Reference:
    Raffel et al. 2019, Exploring the Limits of Transfer Learning. arXiv:1910.10683.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.bert import Sentences
from mcore_data.datasets.masking import MaskingOptions, choose_spans, word_continuations
from mcore_data.datasets.sentence_map import SentenceMapSpec, build_sentence_map
from mcore_data.tokenizers.protocol import Tokenizer

_T5_MASKING = MaskingOptions(max_ngram=10, geometric=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Ids:
    """Ids that a T5 sample needs besides the text.

    Attributes:
        bos: what the decoder reads first.
        eos: what it writes last.
        pad: fills a sample.
        sentinels: ids that stand for spans, in the order of use.
        continues: for each id whether it goes on with a word; None where no id does.
    """

    bos: int
    eos: int
    sentinels: tuple[int, ...]
    pad: int = 0
    continues: NDArray[np.bool_] | None = None

    @staticmethod
    def of(tokenizer: Tokenizer) -> "T5Ids":
        """Look the ids up.

        Raises:
            ValueError: if the tokenizer has no sentinels, no end, or nothing to begin with.
        """
        sentinels = []
        while (number := tokenizer.token_id(f"<extra_id_{len(sentinels)}>")) is not None:
            sentinels.append(number)
        if not sentinels:
            raise ValueError(
                "the tokenizer has no sentinels <extra_id_0>, ...: add them by "
                "--vocab-extra-ids 100."
            )
        begin = decoder_start(tokenizer)
        if begin is None or tokenizer.eod is None:
            raise ValueError(
                "T5 needs a tokenizer with an end of text, and with a beginning or padding."
            )
        return T5Ids(
            bos=begin,
            eos=tokenizer.eod,
            pad=tokenizer.pad or 0,
            sentinels=tuple(sentinels),
            continues=word_continuations(tokenizer),
        )


def decoder_start(tokenizer: Tokenizer) -> int | None:
    """Return what a T5's decoder reads first: padding where texts have no beginning.

    Published T5s begin so.
    """
    return tokenizer.pad if tokenizer.bos is None else tokenizer.bos


class T5Dataset:
    """Map-style dataset of span corruption as numpy arrays, in Megatron's names.

    A sample has ``text_enc`` (int64 [S]), ``text_dec`` and ``labels`` (int64 [decoder
    length]), ``loss_mask`` (float32, 1 on real labels), ``enc_mask`` and ``dec_mask`` (int64,
    1 for tokens) and ``truncated`` (int64 scalar).

    Args:
        sentences: the stored sentences.
        ids: special ids.
        sequence_length: S, of the encoder.
        decoder_sequence_length: of the decoder.
        seed: of everything drawn.
        num_samples: samples wanted at least; 0 means one epoch.
        document_ids: documents to use; None means all.
        masking: which tokens are cut out.
        short_seq_prob: share of shorter samples.

    Raises:
        ValueError: if no document makes a sample, or the decoder may not hold what is cut
            out.
    """

    def __init__(
        self,
        sentences: Sentences,
        ids: T5Ids,
        *,
        sequence_length: int = 512,
        decoder_sequence_length: int = 128,
        seed: int = 1234,
        num_samples: int = 0,
        document_ids: Sequence[int] | range | None = None,
        masking: MaskingOptions = _T5_MASKING,
        short_seq_prob: float = 0.1,
    ) -> None:
        self.sequences = sentences
        self.ids = ids
        self.sequence_length = sequence_length
        self.decoder_sequence_length = decoder_sequence_length
        self.seed = seed
        self.masking = masking
        longest = max(1, round((sequence_length - 2) * masking.mask_prob))
        if 1 + 2 * longest > decoder_sequence_length:
            raise ValueError(
                f"a decoder of {decoder_sequence_length} tokens may not hold the {longest} "
                f"that are cut out with as many sentinels: raise "
                f"--decoder-seq-length to {1 + 2 * longest} or lower --mask-prob."
            )
        spec = SentenceMapSpec(
            max_length=sequence_length - 2,
            short_seq_prob=short_seq_prob,
            seed=seed,
            num_samples=num_samples,
        )
        self.map = build_sentence_map(
            sentences.lengths, sentences.documents, document_ids, spec
        )

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, sample: int) -> dict[str, NDArray[Any]]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        random = np.random.default_rng([self.seed, sample])
        first, stop, target = self.map[sample].tolist()
        whole = np.concatenate([self.sequences.get(i) for i in range(first, stop)])
        text = whole[:target].astype(np.int64)
        share = self.masking.mask_prob
        budget = max(1, min(int(share * target), round(len(text) * share)))
        spans = choose_spans(
            text,
            np.ones(len(text), bool),
            self.ids.continues,
            self.masking,
            budget,
            random,
            max_spans=len(self.ids.sentinels),
        )
        encoder, written = cut_spans(text, spans, self.ids.sentinels)
        E, D = self.sequence_length, self.decoder_sequence_length
        real = np.arange(D) <= len(written)
        return {
            "text_enc": _padded(encoder, E, self.ids.pad),
            "text_dec": _padded([self.ids.bos, *written], D, self.ids.pad),
            "labels": _padded([*written, self.ids.eos], D, self.ids.pad),
            "loss_mask": real.astype(np.float32),
            "enc_mask": (np.arange(E) < len(encoder)).astype(np.int64),
            "dec_mask": real.astype(np.int64),
            "truncated": np.array(len(whole) > target, np.int64),
        }

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Sentences that a sample is made of: (sentence, 0, number of tokens) of each."""
        first, stop, _ = self.map[sample].tolist()
        return [(i, 0, int(self.sequences.lengths[i])) for i in range(first, stop)]


def cut_spans(
    text: NDArray[np.int64], spans: Sequence[tuple[int, int]], sentinels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Text with sentinels in place of spans, and the sentinels each with its span."""
    kept: list[int] = []
    written: list[int] = []
    place = 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        kept += [*text[place:start].tolist(), sentinel]
        written += [sentinel, *text[start:stop].tolist()]
        place = stop
    return [*kept, *text[place:].tolist()], written


def _padded(tokens: Sequence[int], length: int, pad: int) -> NDArray[np.int64]:
    row = np.full(length, pad, np.int64)
    row[: len(tokens)] = tokens
    return row
