"""Requests that arrive by a Poisson process at an engine in this process, and their waits.

``bench_load.py`` gives it this repository's engine, ``peer_vllm.py`` vLLM's: the prompts, the
lengths, the arrivals and the clock are the same.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Protocol


class LoadedEngine(Protocol):
    """What the client calls of an engine."""

    vocab_size: int
    """Prompts are drawn below it."""

    def add(self, prompt: Sequence[int], num_tokens: int, seed: int) -> int:
        """Queue a request for exactly this number of tokens; return its number."""
        ...

    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        ...

    def step(self) -> Sequence[int]:
        """Compute one step; return the number of a request for each new token."""
        ...


def measure(
    engine: LoadedEngine, rate: float, seconds: float, prompt_tokens: int, new_tokens: int
) -> dict[str, float]:
    """Let requests arrive at a rate; those of the first fifth of the time warm up only.

    Args:
        engine: has no requests.
        rate: requests a second.
        seconds: in which requests arrive; the last of them run on.
        prompt_tokens: mean of the prompts.
        new_tokens: mean of the texts.
    """
    draw = random.Random(0)
    arrivals, at = [], 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        arrivals.append(at)
    first, between, tokens, duration = run(engine, arrivals, prompt_tokens, new_tokens, seed=2)
    begin = int(len(arrivals) / 5)
    first = sorted(first[begin:])
    between = sorted(gap for gaps in between[begin:] for gap in gaps)
    return {
        "requests": len(arrivals),
        "tokens_per_s": round(tokens / duration, 1),
        **{f"first_ms_p{p}": round(1e3 * _quantile(first, p), 2) for p in (50, 99)},
        **{f"between_ms_p{p}": round(1e3 * _quantile(between, p), 2) for p in (50, 99)},
    }


def run(
    engine: LoadedEngine,
    arrivals: Sequence[float],
    prompt_tokens: int,
    new_tokens: int,
    seed: int,
) -> tuple[list[float], list[list[float]], int, float]:
    """Run requests that arrive at given seconds.

    Returns:
        Each request's time to its first token and between its tokens, tokens of all, and
        the seconds until the last.
    """
    draw = random.Random(seed)
    first, between = [math.nan] * len(arrivals), [list[float]() for _ in arrivals]
    last: dict[int, float] = {}
    places: dict[int, int] = {}
    tokens, waiting = 0, list(enumerate(arrivals))[::-1]
    begin = time.perf_counter()
    while waiting or engine.has_work():
        now = time.perf_counter() - begin
        while waiting and waiting[-1][1] <= now:
            place, _ = waiting.pop()
            length = _length(draw, prompt_tokens)
            prompt = [draw.randrange(engine.vocab_size) for _ in range(length)]
            places[engine.add(prompt, _length(draw, new_tokens), place)] = place
        if not engine.has_work():
            time.sleep(max(0.0, waiting[-1][1] - (time.perf_counter() - begin)))
            continue
        requests = engine.step()
        now = time.perf_counter() - begin
        for request in requests:
            tokens += 1
            place = places[request]
            if request in last:
                between[place].append(now - last[request])
            else:
                first[place] = now - arrivals[place]
            last[request] = now
    return first, between, tokens, time.perf_counter() - begin


def _length(draw: random.Random, mean: int) -> int:
    """A length around a mean: half to one and a half of it, all as likely."""
    return draw.randint(max(1, mean // 2), max(1, 3 * mean // 2))


def _quantile(ordered: list[float], percent: int) -> float:
    return (
        ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else math.nan
    )
