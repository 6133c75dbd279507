"""Writing text: prompts go in together, then one token a row and step.

Rows of a batch stand at equal positions, so prompts of different lengths need no padding:
all are read up to the length of the shortest, then a row whose prompt goes on is given its
next token where others are given the one they chose. What comes out equals writing each
prompt alone, and equals reading the whole text anew for every token.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.cache import StaticCache
from mcore_infer.config import SamplingConfig
from mcore_infer.sampling import log_probs_of, sample
from mcore_infer.writing import Generation, NewToken, Writing
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_gather, all_reduce

log = logging.getLogger(__name__)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> list[Generation]:
    """Write after each prompt; see ``stream`` for the arguments."""
    writer = _Writer(model, prompts, sampling, seed, eod, stop)
    for _ in writer.run():
        pass
    return [row.result() for row in writer.rows]


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Iterator[NewToken]:
    """Write after each prompt, token by token.

    Communicates over the model's ``tp`` (and the axes of its experts): all its ranks call it
    with equal arguments and all see the same tokens.

    Args:
        model: whole, in eval mode.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen, and how many.
        seed: row i draws from ``seed + i``.
        eod: id that ends a row; None: none does.
        stop: token sequences that end a row and are cut off.

    Yields:
        Tokens in the order of writing; one that may be the beginning of a stop sequence is
        held back until that is decided.

    Raises:
        ValueError: if there is no prompt, an empty or too long one, or the model is in
            training mode.
    """
    return _Writer(model, prompts, sampling, seed, eod, stop).run()


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    seed: int = 1234,
) -> list[str]:
    """Write after each prompt in words; an empty prompt begins a document.

    Returns:
        The new text of each prompt, special tokens left out.
    """
    results = generate(
        model,
        [prompt_ids(tokenizer, prompt) for prompt in prompts],
        sampling,
        seed=seed,
        eod=None if sampling.ignore_eod else tokenizer.eod,
        stop=stop_ids(tokenizer, sampling),
    )
    return [tokenizer.decode(list(r.ids), skip_special_tokens=True) for r in results]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Turn a prompt into tokens; an empty one becomes what begins a document.

    Raises:
        ValueError: if it is empty and the tokenizer has neither a begin nor an end token.
    """
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if begin is None:
        raise ValueError(
            "the prompt is empty, and this tokenizer has no token that begins a document: "
            "give a --prompt."
        )
    return [begin]


def stop_ids(tokenizer: Tokenizer, sampling: SamplingConfig) -> list[list[int]]:
    """Turn stop words into tokens, as they would stand inside a text."""
    return [tokenizer.encode(w, add_special_tokens=False) for w in sampling.stop_words]


def next_logits(
    model: LanguageModel, tokens: Tensor, cache: StaticCache | None = None
) -> Float[Tensor, "B V"]:
    """Score the token after the last of each row, whole vocabulary without padding.

    All-gathers the vocabulary over ``tp``.

    Args:
        model: whole, in eval mode.
        tokens: ``[B, S]``; with a cache those that it does not hold yet.
        cache: is extended by the tokens.
    """
    with torch.no_grad():
        hidden, _ = model(tokens, state=cache)
        logits = model.logits(hidden[-1:])[0]  # [S, B, D] -> [B, V/tp]
        if cache is not None:
            cache.advance(tokens.shape[1])
        return all_gather(logits, model.tp, dim=-1)[:, : model.vocab_size]


class _Row(Writing):
    """One prompt and what is written after it."""

    def __init__(
        self,
        prompt: list[int],
        num_tokens: int,
        seed: int,
        eod: int | None,
        stop: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(num_tokens, seed, eod, stop)
        self.prompt = prompt


class _Writer:
    """A batch of rows and the cache they share."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seed: int,
        eod: int | None,
        stop: Sequence[Sequence[int]],
    ) -> None:
        if model.training:
            raise ValueError("generation needs a model in eval mode: call model.eval() first.")
        if not prompts or not all(prompts):
            raise ValueError("generation needs prompts of at least one token each.")
        self.model, self.sampling = model, sampling
        self.device = next(model.parameters()).device
        self.rows = [
            _Row(list(p), self._room(i, len(p)), seed + i, eod, stop)
            for i, p in enumerate(prompts)
        ]
        self.cache = StaticCache(max(len(r.prompt) + r.num_tokens for r in self.rows))

    def _room(self, row: int, length: int) -> int:
        """Return how many tokens a row may write within the model's positions."""
        limit, wanted = self.model.config.max_position_embeddings, self.sampling.num_tokens
        if not limit or length + wanted <= limit:
            return wanted
        if length >= limit:
            raise ValueError(
                f"prompt {row} has {length} tokens: the maximum context length was exceeded "
                f"(--max-position-embeddings {limit}, one of them to be written). Shorten it."
            )
        log.warning(
            "prompt %d has %d tokens: %d more fit into --max-position-embeddings %d, not %d",
            row,
            length,
            limit - length,
            limit,
            wanted,
        )
        return limit - length

    def run(self) -> Iterator[NewToken]:
        begin = min(len(row.prompt) for row in self.rows)
        tokens = torch.tensor([row.prompt[:begin] for row in self.rows], device=self.device)
        while True:
            logits = next_logits(self.model, tokens, self.cache)
            chosen = self._choose(logits)
            yield from self._take(chosen, log_probs_of(logits, chosen))
            if all(row.finish_reason for row in self.rows):
                return
            tokens = self._next_tokens(chosen)[:, None]

    def _is_writing(self, row: _Row) -> bool:
        return not row.finish_reason and self.cache.length >= len(row.prompt)

    def _choose(self, logits: Tensor) -> Tensor:
        draws = torch.zeros(len(self.rows), dtype=torch.float64)
        if self.sampling.top_k != 1:
            for i, row in enumerate(self.rows):
                if self._is_writing(row):
                    draws[i] = row.draw()
        chosen = sample(logits, self.sampling, draws.to(self.device))
        # One rank decides: kernels that round differently must not part the ranks' texts.
        tp = self.model.tp
        return all_reduce(chosen if tp.rank == 0 else torch.zeros_like(chosen), tp)

    def _take(self, chosen: Tensor, log_probs: Tensor) -> Iterator[NewToken]:
        pairs = zip(self.rows, chosen.tolist(), log_probs.tolist(), strict=True)
        for i, (row, token, log_prob) in enumerate(pairs):
            if self._is_writing(row):
                for released, its_log_prob in row.add(token, log_prob):
                    yield NewToken(i, released, its_log_prob)

    def _next_tokens(self, chosen: Tensor) -> Tensor:
        # Finished rows keep decoding; their output is ignored.
        position = self.cache.length
        forced = [r.prompt[position] if position < len(r.prompt) else -1 for r in self.rows]
        prompt = torch.tensor(forced, device=self.device)
        return torch.where(prompt >= 0, prompt, chosen)
