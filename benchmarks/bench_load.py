"""Time to first token and between tokens while requests arrive as they please.

    python benchmarks/bench_load.py --name load-llama-3-8b-h200 --geometry llama-3-8b

Requests arrive by a Poisson process, at each of several rates, at an engine with random
weights, and none waits for another's end. Lengths of prompts and texts are drawn around their
means. A request's first token counts from its arrival, whatever the engine does then. One line
of medians and 99th percentiles a rate; ``tests/docs/load_picture.py`` draws them.
"""

import argparse
import math
import random
import time

import torch
from bench_decode import GEOMETRIES, build
from reporting import add_options, keep, versions

from mcore_infer import Engine, EngineConfig, NewToken, SamplingConfig, ScoreRequest
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

PAGE = 64


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(options.geometry, ParallelContext.single(device))
    longest = 2 * (options.prompt_tokens + options.new_tokens)
    engine = Engine(
        model,
        EngineConfig(
            max_requests=options.max_requests,
            max_tokens=options.max_tokens,
            max_sequence_tokens=longest,
            page_tokens=PAGE,
            prefix_cache=False,
        ),
    )
    warm(engine, options)
    row = {
        "name": options.name,
        **versions(options),
        "geometry": options.geometry,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "max_requests": options.max_requests,
        "seconds": options.seconds,
        "cases": {},
    }
    for rate in options.rates:
        case = measure(engine, options, rate)
        row["cases"][f"{rate:g} requests/s"] = {"requests_per_s": rate, **case}
        print(rate, case, flush=True)
    keep(options, row)


def warm(engine: Engine, options: argparse.Namespace) -> None:
    """Record every graph before anything is timed."""
    short = argparse.Namespace(prompt_tokens=2, new_tokens=4)
    for size in engine.decoder.sizes:
        run(engine, short, [0.0] * size, seed=1)
    for size in engine.prompts.sizes:
        for _ in range(9):  # a graph is worth it from the ninth step on
            prompt = [1] * min(size, 2 * options.prompt_tokens)
            engine.add(prompt, SamplingConfig(num_tokens=1))
            for _ in engine.run():
                pass
    run(engine, options, [0.0] * 4, seed=1)


def measure(engine: Engine, options: argparse.Namespace, rate: float) -> dict[str, float]:
    """Let requests arrive at a rate; those of the first fifth of the time warm up only."""
    draw = random.Random(0)
    arrivals, at = [], 0.0
    while (at := at + draw.expovariate(rate)) < options.seconds:
        arrivals.append(at)
    first, between, tokens, seconds = run(engine, options, arrivals, seed=2)
    begin = int(len(arrivals) / 5)
    first = sorted(first[begin:])
    between = sorted(gap for gaps in between[begin:] for gap in gaps)
    return {
        "requests": len(arrivals),
        "tokens_per_s": round(tokens / seconds, 1),
        **{f"first_ms_p{p}": round(1e3 * _quantile(first, p), 2) for p in (50, 99)},
        **{f"between_ms_p{p}": round(1e3 * _quantile(between, p), 2) for p in (50, 99)},
    }


def run(
    engine: Engine, options: argparse.Namespace, arrivals: list[float], seed: int
) -> tuple[list[float], list[list[float]], int, float]:
    """Run requests that arrive at given seconds.

    Returns:
        Each request's time to its first token and between its tokens, tokens of all, and
        the seconds until the last.
    """
    draw = random.Random(seed)
    model = engine.model
    assert isinstance(model, GPT)
    first, between = [math.nan] * len(arrivals), [list[float]() for _ in arrivals]
    last: dict[int, float] = {}
    places: dict[int, int] = {}
    tokens, waiting = 0, list(enumerate(arrivals))[::-1]
    begin = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - begin
        while waiting and waiting[-1][1] <= now:
            place, _ = waiting.pop()
            prompt = [
                draw.randrange(model.vocab_size)
                for _ in range(_length(draw, options.prompt_tokens))
            ]
            number = engine.add(
                prompt,
                SamplingConfig(num_tokens=_length(draw, options.new_tokens)),
                seed=place,
                scores=ScoreRequest(log_probs=False),
            )
            places[number] = place
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1][1] - (time.perf_counter() - begin)))
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            if not isinstance(event, NewToken):
                continue
            tokens += 1
            place = places[event.row]
            if event.row in last:
                between[place].append(now - last[event.row])
            else:
                first[place] = now - arrivals[place]
            last[event.row] = now
    return first, between, tokens, time.perf_counter() - begin


def _length(draw: random.Random, mean: int) -> int:
    """A length around a mean: half to one and a half of it, all as likely."""
    return draw.randint(max(1, mean // 2), max(1, 3 * mean // 2))


def _quantile(ordered: list[float], percent: int) -> float:
    return (
        ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else math.nan
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", default="load")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3-8b")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16, 24])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-requests", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
