"""Time to first token and between tokens while requests arrive as they please.

    python benchmarks/bench_load.py --name load-llama-3-8b-h200 --geometry llama-3-8b

Requests arrive by a Poisson process, at each of several rates, at an engine with random
weights, and none waits for another's end. Lengths of prompts and texts are drawn around their
means. A request's first token counts from its arrival, whatever the engine does then. One line
of medians and 99th percentiles a rate; ``tests/docs/load_picture.py`` draws them.
"""

import argparse
from collections.abc import Sequence

import poisson
import torch
from bench_decode import GEOMETRIES, build
from reporting import add_options, keep, versions

from mcore_infer import Engine, EngineConfig, NewToken, SamplingConfig, ScoreRequest
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
    warm(engine, model.vocab_size, options)
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
        means = options.prompt_tokens, options.new_tokens
        client = _Client(engine, model.vocab_size)
        case = poisson.measure(client, rate, options.seconds, *means)
        row["cases"][f"{rate:g} requests/s"] = {"requests_per_s": rate, **case}
        print(rate, case, flush=True)
    keep(options, row)


def warm(engine: Engine, vocab_size: int, options: argparse.Namespace) -> None:
    """Record every graph before anything is timed."""
    client = _Client(engine, vocab_size)
    for size in engine.decoder.sizes:
        poisson.run(client, [0.0] * size, 2, 4, seed=1)
    for size in engine.prompts.sizes:
        for _ in range(9):  # a graph is worth it from the ninth step on
            prompt = [1] * min(size, 2 * options.prompt_tokens)
            engine.add(prompt, SamplingConfig(num_tokens=1))
            for _ in engine.run():
                pass
    poisson.run(client, [0.0] * 4, options.prompt_tokens, options.new_tokens, seed=1)


class _Client:
    """An engine as ``poisson.run`` calls it."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size

    def add(self, prompt: Sequence[int], num_tokens: int, seed: int) -> int:
        sampling, scores = SamplingConfig(num_tokens=num_tokens), ScoreRequest(log_probs=False)
        return self.engine.add(prompt, sampling, seed=seed, scores=scores)

    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[int]:
        return [event.row for event in self.engine.step() if isinstance(event, NewToken)]


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
