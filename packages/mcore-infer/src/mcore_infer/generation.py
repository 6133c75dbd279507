"""Offline generation: builds an engine and continues a list of prompts.

``generate`` and ``stream`` size the engine's cache for their prompts; ``stream_texts`` uses the
options of the commands. The text of a prompt depends on its seed, not on the other prompts.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import InferenceConfig, SamplingConfig
from mcore_infer.engine.building import build_engine
from mcore_infer.engine.engine import Engine
from mcore_infer.engine.limits import EngineConfig, Scales
from mcore_infer.engine.stages import last_stage_logits, run_stages
from mcore_infer.errors import StructureError
from mcore_infer.kv_cache import StaticCache
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import Generation, NewToken, ScoreRequest
from mcore_infer.writing.structured import Grammars
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

log = logging.getLogger(__name__)

_MOST_ROWS = 256
"""Largest number of prompts that run together; further prompts wait."""
_GPU_PAGE_TOKENS = 64
_NO_SCORES = ScoreRequest(log_probs=False)
"""Request of no scores, which saves a log-softmax over the vocabulary for each token."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> list[Generation]:
    """Return the continuation of each prompt; ``stream`` describes the arguments."""
    return _results(*_queued(model, prompts, sampling, seed, eod, stop, ScoreRequest()))


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Iterator[NewToken]:
    """Yield the continuations of prompts, token by token.

    Communicates over ``tp``, ``pp`` and the axes of experts: all these ranks make the same call
    and get the same tokens.

    Args:
        model: whole or a stage, in eval mode; on a GPU its plain GEMMs are replaced, see
            ``Engine``.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen, and how many.
        seed: row i draws from ``seed + i``.
        eod: id that ends a row; None: no id ends a row.
        stop: token sequences that end a row and are cut off.

    Returns:
        Tokens in the order of their steps. A token that may begin a stop sequence is held back
        until later tokens decide whether it does.

    Raises:
        ValueError: if there is no prompt, an empty or too long one, or the model is in
            training mode.
    """
    return _tokens(*_queued(model, prompts, sampling, seed, eod, stop, ScoreRequest()))


def stream_texts(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    config: InferenceConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
    draft: LanguageModel | None = None,
    structure: Structure | None = None,
    grammars: Grammars | None = None,
    kv_scales: Mapping[int, Scales] = MappingProxyType({}),
    replicas: Axis = SINGLE,
    in_step: Axis = SINGLE,
) -> Iterator[NewToken]:
    """Yield continuations of prompts on an engine with the commands' options.

    Tokens have no log probabilities.

    Args:
        model: whole or a stage, in eval mode; see ``Engine``.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen, and how many.
        config: limits of the engine.
        seed: row i draws from ``seed + i``.
        eod: id that ends a row; None: no id ends a row.
        stop: token sequences that end a row and are cut off.
        draft: model that proposes tokens.
        structure: grammar of the texts; None: any text.
        grammars: compiles the structure.
        kv_scales: the checkpoint's scales of an fp8 cache, by layer.
        replicas: ranks with the same model. Each passes all prompts and continues every
            ``replicas.size``-th prompt, starting with its rank.
        in_step: all ranks of replicas that share experts, see ``Engine``.

    Raises:
        ValueError: if a prompt is empty, too long, or does not fit the cache.
        StructureError: if no token of the vocabulary continues a text within its structure.
    """
    engine = build_engine(model, config, draft, kv_scales, replicas, in_step)
    engine.grammars = grammars
    positions, limit = model.config.max_position_embeddings, engine.config.max_sequence_tokens
    # Requests are not numbered like prompts, because a beam search uses numbers for its steps.
    rows: dict[int, int] = {}
    for i, prompt in enumerate(prompts):
        request = engine.add(
            prompt,
            sampling,
            num_tokens=room(positions, sampling.num_tokens, prompt, limit, f"prompt {i}"),
            seed=seed + i,
            eod=eod,
            stop=stop,
            scores=_NO_SCORES,
            structure=structure,
        )
        rows[request] = i
        # Every replica adds all prompts, so that all replicas raise the same error.
        if i % replicas.size != replicas.rank:
            engine.abort(request)
    yield from _tokens(engine, rows)


def _queued(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seed: int,
    eod: int | None,
    stop: Sequence[Sequence[int]],
    scores: ScoreRequest,
) -> tuple[Engine, dict[int, int]]:
    """Build an engine whose cache fits the longest prompts and texts, and queue all prompts.

    Returns:
        The engine, and the row of each of its requests.
    """
    if not prompts or not all(prompts):
        raise ValueError("generation needs prompts of at least one token each.")
    positions = model.config.max_position_embeddings
    nums_tokens = [
        room(positions, sampling.num_tokens, prompt, name=f"prompt {i}")
        for i, prompt in enumerate(prompts)
    ]
    num_beams = max(1, sampling.beam_width)
    lengths = [
        len(p) + n for p, n in zip(prompts, nums_tokens, strict=True) for _ in range(num_beams)
    ]
    engine = build_offline_engine(model, lengths)
    rows = {}
    for i, (prompt, num_tokens) in enumerate(zip(prompts, nums_tokens, strict=True)):
        request = engine.add(
            prompt,
            sampling,
            num_tokens=num_tokens,
            seed=seed + i,
            eod=eod,
            stop=stop,
            scores=scores,
        )
        rows[request] = i
    return engine, rows


def build_offline_engine(model: LanguageModel, lengths: Sequence[int]) -> Engine:
    """Build an engine whose cache fits texts of these lengths, at most 256 at a time.

    Args:
        model: whole or a stage, in eval mode; see ``Engine``.
        lengths: number of tokens of each prompt and its text together.
    """
    longest, num_rows = max(lengths), min(len(lengths), _MOST_ROWS)
    # On a CPU each text has one page, so that its keys are contiguous and not gathered.
    is_cuda = next(model.parameters()).device.type == "cuda"
    page_tokens = _GPU_PAGE_TOKENS if is_cuda else longest
    num_pages = sum(-(-n // page_tokens) for n in sorted(lengths, reverse=True)[:num_rows])
    config = EngineConfig(
        max_requests=num_rows,
        max_sequence_tokens=longest,
        num_pages=num_pages,
        page_tokens=page_tokens,
        # Recording pays off for many texts only, and forbids other threads (training) to use
        # the device meanwhile.
        records_graphs=False,
    )
    return Engine(model, config)


def _results(engine: Engine, rows: Mapping[int, int]) -> list[Generation]:
    results = {rows[event[0]]: event[1] for event in engine.run() if isinstance(event, tuple)}
    return [results[i] for i in range(len(results))]


def _tokens(engine: Engine, rows: Mapping[int, int]) -> Iterator[NewToken]:
    """Run an engine until all requests end; yield tokens with the rows of their prompts."""
    for event in engine.run():
        if isinstance(event, NewToken):
            yield replace(event, row=rows[event.row])
        elif event[1].finish_reason == "error":
            raise StructureError(
                f"text {rows[event[0]]} cannot satisfy its --json-schema or --regex: no token "
                "of the vocabulary continues it."
            )


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    seed: int = 1234,
) -> list[str]:
    """Tokenize prompts and return their continuations as text.

    An empty prompt becomes the token that begins a document.

    Returns:
        The new text of each prompt, without special tokens.
    """
    eod = None if sampling.ignore_eod else tokenizer.eod
    ids, stop = [prompt_ids(tokenizer, p) for p in prompts], stop_ids(tokenizer, sampling)
    results = _results(*_queued(model, ids, sampling, seed, eod, stop, _NO_SCORES))
    return [tokenizer.decode(list(r.ids), skip_special_tokens=True) for r in results]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokenize a prompt; an empty prompt becomes the token that begins a document."""
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
        tokenizer: tokenizer of the texts; stop words are encoded without special tokens.
        sampling: stop words, and whether a text continues after an end of document.
        ends: tokens that end a text, in addition to the tokenizer's end of document.
    """
    words = [tokenizer.encode(w, add_special_tokens=False) for w in sampling.stop_words]
    return words if sampling.ignore_eod else [*words, *([token] for token in ends)]


def next_logits(
    model: LanguageModel, tokens: Tensor, cache: StaticCache | None = None
) -> Float[Tensor, "B V"]:
    """Return the logits of the token after each row, without padding of the vocabulary.

    All-gathers the vocabulary over ``tp``; stages before the last return zeros.

    Args:
        model: whole or a stage, in eval mode.
        tokens: ``[B, S]``; with a cache, the tokens after the cached tokens.
        cache: cache to which the tokens are appended.
    """
    with torch.no_grad():
        hidden = run_stages(model, tokens, state=cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return last_stage_logits(model, hidden[-1].unsqueeze(1))  # [S, B, D] -> [B, 1, D]


def room(
    positions: int, num_tokens: int, prompt: Sequence[int], limit: int = 0, name: str = "it"
) -> int:
    """Return the number of tokens to write after a prompt; warn if fewer fit than requested.

    Args:
        positions: number of positions of the model; 0: no limit.
        num_tokens: requested number of tokens.
        prompt: token ids.
        limit: largest number of tokens of prompt and text together; 0: the model's positions.
        name: name of the prompt in messages.

    Raises:
        ValueError: if no token fits.
    """
    limits = {
        "--inference-max-seq-length": limit,
        "--max-position-embeddings": positions,
    }
    set_limits = {flag: tokens for flag, tokens in limits.items() if tokens}
    flag = min(set_limits, key=set_limits.__getitem__, default="")
    length, limit = len(prompt), set_limits.get(flag, 0)
    if not limit or length + num_tokens <= limit:
        return num_tokens
    if length >= limit:
        raise ValueError(
            f"{name} has {length} tokens: the maximum context length was exceeded "
            f"({flag} {limit}, one of them to be written). Shorten it."
        )
    log.warning(
        "%s has %d tokens: %d more fit into %s %d, instead of the requested %d",
        name,
        length,
        limit - length,
        flag,
        limit,
        num_tokens,
    )
    return limit - length
