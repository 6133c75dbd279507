"""Greedy or sampled answers of a T5: the encoder runs once a text, the decoder once a token.

This is the only decode loop outside the engine. All answers begin with the same token, so the
rows of a batch have equal lengths and share a ``StaticCache``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.sampling import choose
from mcore_infer.engine.stages import agree_on_tokens
from mcore_infer.generation import room
from mcore_infer.kv_cache import StaticCache
from mcore_infer.writing.sequence import NewToken, RunningSequence, TextRequest
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_parallel.collectives import all_gather


@torch.no_grad()
def answer_texts(
    model: Any,
    texts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    start: int,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Iterator[NewToken]:
    """Yield an answer to each text, token by token.

    Communicates over ``tp`` as the model does; all ranks of ``tp`` make the same call.

    Args:
        model: a ``T5`` on one stage, in eval mode.
        texts: token ids of the encoder, at least one each.
        sampling: how tokens are chosen, and how many.
        start: first token of the decoder.
        seed: row i draws from ``seed + i``.
        eod: id that ends a row; None: no id ends a row.
        stop: token sequences that end a row and are cut off.

    Raises:
        ValueError: if there is no text, or a text is empty.
    """
    if not texts or not all(texts):
        raise ValueError("generation needs prompts of at least one token each.")
    positions = model.config.max_position_embeddings
    num_tokens = room(positions, sampling.num_tokens, [start], name="the answer")
    rows = [
        RunningSequence(
            TextRequest(
                prompt=[start],
                sampling=sampling,
                num_tokens=num_tokens,
                seed=seed + i,
                eod=eod,
                stop=stop,
            )
        )
        for i in range(len(texts))
    ]
    device, longest = next(model.parameters()).device, max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    mask = mask.to(device)
    encoded = model.read(padded.to(device), mask)
    cache = StaticCache(num_tokens)
    tokens = torch.full((len(rows), 1), start, device=device)
    while True:
        hidden = model.write(tokens, encoded, mask, cache)  # [1, B, D]
        cache.advance(1)
        logits = all_gather(model.logits(hidden)[-1], model.tp, dim=-1)[:, : model.vocab_size]
        # Finished rows stay in the batch; their tokens are ignored.
        chosen = agree_on_tokens(choose(logits, rows), model.tp, model.pp)
        log_probs = token_log_probs(logits, chosen)
        pairs = zip(chosen.tolist(), log_probs.tolist(), strict=True)
        for i, (token, log_prob) in enumerate(pairs):
            if not rows[i].finish_reason:
                yield from rows[i].add(NewToken(i, token, log_prob))
        if all(row.finish_reason for row in rows):
            return
        tokens = chosen[:, None]
