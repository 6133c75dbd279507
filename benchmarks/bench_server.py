"""``mcore-infer serve`` under many clients, on one rank and on several.

    python benchmarks/bench_server.py --name server-h200-x2 --ranks 1 2

A random model is saved and served; clients stream greedy texts all at once, every tenth leaves
in the middle, and /health is requested meanwhile. Each case says how long first tokens and
/health took, how many texts came, whether all pages came back, and how many texts are those of
the first case.
"""

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from reporting import add_options, keep, versions

from mcore_ckpt.save_load.saving import save
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_models.config import TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.gpt import GPT
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards


def main() -> None:
    """Serve on each number of ranks and keep what clients saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", default="server")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    options = parser.parse_args()
    row = {"name": options.name, **versions(options), "cases": {}}
    row |= {
        key: getattr(options, key) for key in ("clients", "tokens", "num_layers", "hidden_size")
    }
    first: Sequence[str] = ()
    with tempfile.TemporaryDirectory() as folder:
        run = save_random(Path(folder), options)
        for ranks in options.ranks:
            with served(run, ranks, options.clients) as port:
                texts, case = measure(port, options)
            first = first or texts
            case["texts_as_on_the_first"] = sum(
                a == b for a, b in zip(texts, first, strict=True)
            )
            row["cases"][f"{ranks} ranks"] = case
    keep(options, row)


def save_random(folder: Path, options: argparse.Namespace) -> Path:
    """Save a model of random weights that reads bytes; return its run."""
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.hidden_size // 64,
        num_query_groups=max(2, options.hidden_size // 256),
        max_position_embeddings=1024,
        init_method_std=0.15,
    )
    description = ModelDescription(config=config, vocab_size=ByteTokenizer.vocab_size)
    model = GPT(config, ParallelContext.single(), vocab_size=ByteTokenizer.vocab_size)
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    ByteTokenizer().save(folder / "tokenizer")
    extra, folders = {"model": description.to_dict()}, {"tokenizer": folder / "tokenizer"}
    save(folder / "run", 1, shards, world=SINGLE, extra=extra, folders=folders)
    return folder / "run"


@contextmanager
def served(run: Path, ranks: int, clients: int) -> Iterator[int]:
    """Start a server; give its port, and end it behind."""
    command = ["-m", "mcore_infer", "serve", "--load", str(run), "--port", "0"]
    command += ["--max-queued-requests", str(2 * clients + 64)]
    if ranks > 1:
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *command,
        ]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("serving ")), "")
        found = re.search(r":(\d+)$", said.strip())
        if not found:
            raise SystemExit("the server did not start")
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure(port: int, options: argparse.Namespace) -> tuple[list[str], dict[str, object]]:
    """Let all clients write at once, two times; return the texts and what they waited for."""
    health: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            begin = time.perf_counter()
            assert send(port, "GET", "/health")[0] == 200
            health.append(time.perf_counter() - begin)
            time.sleep(0.005)

    with ThreadPoolExecutor(options.clients + 1) as pool:
        list(pool.map(lambda i: stream(port, i, options.tokens), range(options.clients)))
        watching = pool.submit(watch)
        begin = time.perf_counter()
        found = list(
            pool.map(lambda i: stream(port, i, options.tokens), range(options.clients))
        )
        seconds = time.perf_counter() - begin
        is_over.set()
        watching.result()
    for _ in range(500):
        lines = send(port, "GET", "/metrics")[1].decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        if values["mcore_pages_free"] == values["mcore_pages"]:
            break
        time.sleep(0.02)
    texts = [text for number, (text, _) in enumerate(found) if number % 10 != 9]
    return texts, {
        "texts": sum(bool(text) for text in texts),
        "expected_texts": len(texts),
        "pages_free": int(values["mcore_pages_free"]),
        "pages": int(values["mcore_pages"]),
        "tokens_per_s": round(len(texts) * options.tokens / seconds, 1),
        "first_token_ms": spread([first for _, first in found]),
        "health_ms": spread(health),
        "health_requests": len(health),
    }


def stream(port: int, number: int, tokens: int) -> tuple[str, float]:
    """Stream one text; return it and the seconds to its first event; every tenth leaves."""
    body = {"prompt": f"{number:03} is", "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begin, first, texts = time.perf_counter(), 0.0, []
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        first = first or time.perf_counter() - begin
        if number % 10 == 9:
            break
        if line.startswith(b"data: {"):
            texts.append(json.loads(line[6:])["choices"][0]["text"])
    connection.close()
    return "".join(texts), first


def send(port: int, method: str, path: str) -> tuple[int, bytes]:
    """Send one request without a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(method, path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    return {"p50": round(1e3 * p50, 1), "p99": round(1e3 * p99, 1)}


if __name__ == "__main__":
    main()
