"""Answers of a T5: each text is read whole, then its answer is written token by token."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.config import SamplingConfig
from mcore_infer.generation import stream
from mcore_infer.kv_cache import StaticCache
from mcore_infer.writing import NewToken
from mcore_models.protocol import LABELS, LM_LOSS, LanguageModel, MicroBatch, ModelState
from mcore_models.t5 import T5


def answered(
    model: Any,
    texts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    start: int,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Iterator[NewToken]:
    """Write an answer to each text; see ``generation.stream``.

    Args:
        model: a T5, whole, in eval mode.
        texts: token ids that the encoder reads, at least one each.
        sampling: how tokens are chosen, and how many.
        start: token that the decoder reads first.
        seed: row i draws from ``seed + i``.
        eod: id that ends a row; None: none does.
        stop: token sequences that end a row and are cut off.
    """
    device, longest = next(model.parameters()).device, max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    writer = T5Writer(model, ids.to(device), mask.to(device))
    return stream(writer, [[start]] * len(texts), sampling, seed=seed, eod=eod, stop=stop)


class T5Writer(LanguageModel):
    """A T5 that has read its texts, as a model of what comes next."""

    def __init__(
        self, model: T5, texts: Int[Tensor, "B S"], mask: Int[Tensor, "B S"] | None = None
    ) -> None:
        """Run the encoder.

        Args:
            model: whole, in eval mode.
            texts: token ids.
            mask: 1 for tokens, 0 for padding; None: no padding.
        """
        super().__init__()
        self.model, self.mask, self.stage = model, mask, model.stage
        self.config, self.vocab_size, self.tp = model.config, model.vocab_size, model.tp
        self.training = model.training
        with torch.no_grad():
            self.texts = model.read(texts, mask)

    def forward(
        self,
        x: Int[Tensor, "B R"],
        positions: None = None,
        state: ModelState | None = None,
        documents: None = None,
    ) -> tuple[Float[Tensor, "R B D"], Float[Tensor, ""]]:
        """Run the decoder on the next tokens; no auxiliary loss."""
        assert positions is None
        assert documents is None
        state = state or StaticCache(x.shape[1])
        hidden = self.model.write(x, self.texts, self.mask, state)
        return hidden, hidden.new_zeros(())

    def logits(self, hidden: Float[Tensor, "R B D"]) -> Float[Tensor, "R B v"]:
        """Score the vocabulary: this rank's slice of it."""
        return self.model.logits(hidden)

    def token_losses(
        self, hidden: Float[Tensor, "R B D"], labels: Int[Tensor, "B R"]
    ) -> Float[Tensor, "B R"]:
        """Cross-entropy of every token."""
        batch = MicroBatch({LABELS: labels})
        return self.model.unreduced_losses(hidden, batch)[LM_LOSS]

    def loss(
        self,
        hidden: Float[Tensor, "R B D"],
        labels: Int[Tensor, "B R"],
        weights: Float[Tensor, "B R"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B R"]]:
        """Weighted sum of token losses."""
        losses = self.token_losses(hidden, labels)
        return (losses * weights).sum(), losses.detach()
