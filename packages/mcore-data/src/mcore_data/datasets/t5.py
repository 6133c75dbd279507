"""T5 samples (span corruption): sentinels replace spans of a text, from ``--split-sentences``.

The encoder reads the text with each span replaced by a different sentinel; the decoder predicts
``s0 span0 s1 span1 ...`` and the end. As in Megatron, and unlike Hugging Face, no sentinel
follows the last span. A sample depends on seed and index only.

Reference:
    Raffel et al. 2019, Exploring the Limits of Transfer Learning. arXiv:1910.10683.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.bert import Sentences
from mcore_data.datasets.masking import SentenceOptions, choose_spans, word_continuations
from mcore_data.datasets.sentence_map import SentenceMapSpec, build_sentence_map
from mcore_data.tokenizers.protocol import Tokenizer

_T5_MASKING = SentenceOptions(max_ngram=10, geometric=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Ids:
    """Special ids of T5 samples.

    Attributes:
        bos: first input id of the decoder.
        eos: last label of the decoder.
        pad: id that pads a sample.
        sentinels: ids that replace spans, in the order of use.
        continues: for each id whether it continues a word; None: no id does.
    """

    bos: int
    eos: int
    sentinels: tuple[int, ...]
    pad: int = 0
    continues: NDArray[np.bool_] | None = None

    @staticmethod
    def of(tokenizer: Tokenizer) -> "T5Ids":
        """Look up the special ids of a tokenizer.

        Raises:
            ValueError: if the tokenizer has no sentinels, no end of document, or neither a
                beginning nor a padding id.
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
                "T5 needs a tokenizer with an end-of-text token, and with a beginning-of-text "
                "or a padding token: choose another --tokenizer-model."
            )
        return T5Ids(
            bos=begin,
            eos=tokenizer.eod,
            pad=tokenizer.pad or 0,
            sentinels=tuple(sentinels),
            continues=word_continuations(tokenizer),
        )


def decoder_start(tokenizer: Tokenizer) -> int | None:
    """Return the first input id of a T5 decoder: bos, else padding as in published T5s."""
    return tokenizer.pad if tokenizer.bos is None else tokenizer.bos


class T5Dataset:
    """Map-style dataset of span corruption as numpy arrays, in Megatron's names.

    A sample has ``text_enc`` (int64 [S]), ``text_dec`` and ``labels`` (int64 [decoder
    length]), ``loss_mask`` (float32, 1 on real labels), ``enc_mask`` and ``dec_mask`` (int64,
    1 for tokens) and ``truncated`` (int64 scalar).

    Args:
        sentences: the stored sentences.
        ids: special ids.
        sequence_length: S, length of the encoder's rows.
        decoder_sequence_length: length of the decoder's rows.
        seed: seed of all random choices.
        num_samples: smallest number of samples; 0 means one epoch.
        document_ids: documents to use; None means all.
        masking: how spans are chosen, and how many samples are short.

    Raises:
        ValueError: if there is no document, or the decoder is too short for the spans.
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
        masking: SentenceOptions = _T5_MASKING,
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
                f"--decoder-seq-length {decoder_sequence_length} is too short for up to "
                f"{longest} masked tokens and as many sentinels: raise it to "
                f"{1 + 2 * longest}, or lower --mask-prob."
            )
        spec = SentenceMapSpec(
            max_length=sequence_length - 2,
            short_seq_prob=masking.short_seq_prob,
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
        encoder, targets = cut_spans(text, spans, self.ids.sentinels)
        E, D = self.sequence_length, self.decoder_sequence_length
        real = np.arange(D) <= len(targets)
        return {
            "text_enc": _padded(encoder, E, self.ids.pad),
            "text_dec": _padded([self.ids.bos, *targets], D, self.ids.pad),
            "labels": _padded([*targets, self.ids.eos], D, self.ids.pad),
            "loss_mask": real.astype(np.float32),
            "enc_mask": (np.arange(E) < len(encoder)).astype(np.int64),
            "dec_mask": real.astype(np.int64),
            "truncated": np.array(len(whole) > target, np.int64),
        }

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Return the sentences of a sample as (sentence, 0, number of tokens)."""
        first, stop, _ = self.map[sample].tolist()
        return [(i, 0, int(self.sequences.lengths[i])) for i in range(first, stop)]


def cut_spans(
    text: NDArray[np.int64], spans: Sequence[tuple[int, int]], sentinels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the encoder's text, with sentinels, and the decoder's, with the spans."""
    encoder: list[int] = []
    decoder: list[int] = []
    end = 0  # of the previous span
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        encoder += [*text[end:start].tolist(), sentinel]
        decoder += [sentinel, *text[start:stop].tolist()]
        end = stop
    return [*encoder, *text[end:].tolist()], decoder


def _padded(tokens: Sequence[int], length: int, pad: int) -> NDArray[np.int64]:
    row = np.full(length, pad, np.int64)
    row[: len(tokens)] = tokens
    return row
