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
from mcore_infer.config import SamplingConfig
from mcore_infer.kv_cache import StaticCache
from mcore_infer.sampling import choose, token_log_probs
from mcore_infer.stages import agreed, from_last_stage, last_stage_logits, run_stages
from mcore_infer.writing import Generation, NewToken, Writing
from mcore_models.protocol import LanguageModel

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

    Communicates over ``tp`` and ``pp`` (and the axes of its experts): all its ranks call it
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
    """Turn a prompt into tokens; an empty one becomes what begins a document."""
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


def stop_ids(
    tokenizer: Tokenizer, sampling: SamplingConfig, ends: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token sequences that end a text and are cut off.

    Args:
        tokenizer: turns stop words into tokens, as they would stand inside a text.
        sampling: stop words, and whether a text goes on behind its end.
        ends: tokens besides the tokenizer's end of document that end a text.
    """
    words = [tokenizer.encode(w, add_special_tokens=False) for w in sampling.stop_words]
    return words if sampling.ignore_eod else [*words, *([token] for token in ends)]


def next_logits(
    model: LanguageModel, tokens: Tensor, cache: StaticCache | None = None
) -> Float[Tensor, "B V"]:
    """Score the token after the last of each row, whole vocabulary without padding.

    All-gathers the vocabulary over ``tp``; see ``last_stage_logits`` for stages.

    Args:
        model: whole or a stage, in eval mode.
        tokens: ``[B, S]``; with a cache those that it does not hold yet.
        cache: is extended by the tokens.
    """
    with torch.no_grad():
        hidden = run_stages(model, tokens, state=cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return last_stage_logits(model, hidden[-1].unsqueeze(1))  # [S, B, D] -> [B, 1, D]


def room(
    model: LanguageModel, wanted: int, prompt: Sequence[int], limit: int = 0, name: str = "it"
) -> int:
    """Return how many tokens can be written after a prompt, and warn where that is fewer.

    Args:
        model: its positions are a limit.
        wanted: tokens to write.
        prompt: token ids.
        limit: tokens of prompt and text together; 0: the model's positions alone.
        name: of the prompt, for messages.

    Raises:
        ValueError: if not one can.
    """
    limits = {
        "--inference-max-seq-length": limit,
        "--max-position-embeddings": model.config.max_position_embeddings,
    }
    known = {flag: tokens for flag, tokens in limits.items() if tokens}
    flag = min(known, key=known.__getitem__, default="")
    length, limit = len(prompt), known.get(flag, 0)
    if not limit or length + wanted <= limit:
        return wanted
    if length >= limit:
        raise ValueError(
            f"{name} has {length} tokens: the maximum context length was exceeded "
            f"({flag} {limit}, one of them to be written). Shorten it."
        )
    log.warning(
        "%s has %d tokens: %d more fit into %s %d, not %d",
        name,
        length,
        limit - length,
        flag,
        limit,
        wanted,
    )
    return limit - length


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
        if sampling.beam_width:
            raise ValueError("beam search needs an engine: see build_engine.")
        self.model, self.sampling = model, sampling
        self.device = next(model.parameters()).device
        self.rows = [
            Writing(
                prompt,
                sampling,
                num_tokens=room(model, sampling.num_tokens, prompt, name=f"prompt {i}"),
                seed=seed + i,
                eod=eod,
                stop=stop,
            )
            for i, prompt in enumerate(prompts)
        ]
        self.cache = StaticCache(max(len(r.prompt) + r.num_tokens for r in self.rows))

    def run(self) -> Iterator[NewToken]:
        begin = min(len(row.prompt) for row in self.rows)
        tokens = torch.tensor([row.prompt[:begin] for row in self.rows], device=self.device)
        while True:
            logits = next_logits(self.model, tokens, self.cache)
            chosen = self._choose(logits)
            log_probs = from_last_stage(token_log_probs(logits, chosen), self.model.pp)
            yield from self._take(chosen, log_probs)
            if all(row.finish_reason for row in self.rows):
                return
            tokens = self._next_tokens(chosen)[:, None]

    def _is_writing(self, row: Writing) -> bool:
        return not row.finish_reason and self.cache.length >= len(row.prompt)

    def _choose(self, logits: Tensor) -> Tensor:
        # Rows that are not writing keep their draws; what is chosen for them is ignored.
        chosen = logits.new_zeros(len(self.rows), dtype=torch.int64)
        rows = [i for i, row in enumerate(self.rows) if self._is_writing(row)]
        index = torch.tensor(rows, device=self.device)
        if rows:
            chosen[index] = choose(logits[index], [self.rows[i] for i in rows])
        return agreed(chosen, self.model)

    def _take(self, chosen: Tensor, log_probs: Tensor) -> Iterator[NewToken]:
        pairs = zip(self.rows, chosen.tolist(), log_probs.tolist(), strict=True)
        for i, (row, token, log_prob) in enumerate(pairs):
            if self._is_writing(row):
                yield from row.add(NewToken(i, token, log_prob))

    def _next_tokens(self, chosen: Tensor) -> Tensor:
        # Finished rows keep decoding; their output is ignored.
        position = self.cache.length
        forced = [r.prompt[position] if position < len(r.prompt) else -1 for r in self.rows]
        prompt = torch.tensor(forced, device=self.device)
        return torch.where(prompt >= 0, prompt, chosen)
