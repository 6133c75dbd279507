"""Time conversions of synthetic Llamas: a 7B from disk to disk, a 70B from memory to checksums.

    python benchmarks/bench_convert.py 7b --folder /scratch
    python benchmarks/bench_convert.py 70b

`7b` writes a Hugging Face folder of random weights, copies it plainly (the disk's bandwidth),
converts it to ours without the proof and with it, and back without; each in a process of its
own, whose peak memory is reported, files dropped from the page cache before. The folder needs
twice the model: 27 GB. `70b` generates weights as they are read, turns them into ours,
or ours into theirs, and sums them. Prints one JSON line.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from reporting import add_options, keep, versions
from torch import Tensor

from mcore_ckpt.families import find_family
from mcore_ckpt.formats.hf_folder import write_hf_folder
from mcore_ckpt.mapping.row_streams import Rows, slabs
from mcore_ckpt.mapping.rules import expand, native_table
from mcore_ckpt.mapping.views import RenamedRows, their_items
from mcore_ckpt.storage.files import Item, memory
from mcore_ckpt.storage.index import TensorEntry

SIZES = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
    },
}
BLOCK = 1 << 24
THREADS = 2


class Generated:
    """Rows of a model that exists only when read: windows of random bytes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.entries = {name: TensorEntry(shape, "BF16", ()) for name, shape in shapes.items()}
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(1 << 25, generator=generator).bfloat16()

    def dtype(self, name: str) -> str:
        """Return the dtype of every tensor."""
        return self.entries[name].dtype

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Copy a window of the noise, as a disk would fill memory."""
        shape = (stop - begin, *self.entries[name].shape[1:])
        count = torch.Size(shape).numel()
        first = (zlib.crc32(name.encode()) + begin * 64) % (len(self._noise) - count)
        return self._noise[first : first + count].clone().view(shape)


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """List a Llama's tensors."""
    D, F, V = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    groups = config.get("num_key_value_heads", config["num_attention_heads"])
    kv = D // config["num_attention_heads"] * groups
    shapes = {"model.embed_tokens.weight": (V, D)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}{n}.weight": (D,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}self_attn.{p}_proj.weight": (D, D) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (kv, D) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (F, D) for p in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (D, F)
    return shapes | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a small disk")
    add_options(parser)
    options = parser.parse_args()
    config = dict(SIZES[options.size])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    run = from_disk if options.size == "7b" else from_memory
    row = {
        "name": f"convert-{options.size}",
        **versions(options),
        "layers": config["num_hidden_layers"],
        **run(config, Path(options.folder)),
    }
    keep(options, row)


def from_memory(config: dict, _: Path) -> dict:
    """Turn generated weights into ours, and ours into theirs; sum them, two blocks at once."""
    theirs = Generated(shapes_of(config))
    description = find_family("llama").to_ours({"model_type": "llama", **config})
    links = expand(find_family("llama").table(description))
    turned: Rows = RenamedRows(links, theirs)
    ours = Generated({name: entry.shape for name, entry in turned.entries.items()})
    row: dict[str, float] = {}
    for name, items in {
        "hf_to_mcore": their_items(expand(native_table(turned.entries)), turned),
        "mcore_to_hf": their_items(links, ours),
    }.items():
        total, seconds = _summed(items)
        row["gb"] = round(total / 1e9, 1)
        row[f"{name}_gb_per_s"] = round(total / 1e9 / seconds, 2)
    row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return row


def _summed(items: Sequence[Item]) -> tuple[int, float]:
    """Sum items as they come; return bytes and seconds."""
    begin, total = time.perf_counter(), 0
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[Future[int]] = deque()
        for number, item in enumerate(items):
            for slab in item.slabs():
                waiting.append(pool.submit(zlib.crc32, memory(slab)))
                total += slab.nbytes
                if len(waiting) > THREADS:
                    waiting.popleft().result()
            if number % 80 == 0:
                sys.stderr.write(f"\r{total / 1e9:.0f} GB")
        while waiting:
            waiting.popleft().result()
    return total, time.perf_counter() - begin


def from_disk(config: dict, folder: Path) -> dict:
    """Write, copy and convert there and back; give bandwidths, and shares of the copy's."""
    home = folder / f"bench_convert.{os.getpid()}"
    home.mkdir(parents=True)
    try:
        source = Generated(shapes_of(config))
        items = [
            Item(name, "BF16", entry.shape, lambda name=name: slabs(source, name))
            for name, entry in source.entries.items()
        ]
        hf = home / "hf"
        hf.mkdir()
        write_hf_folder(hf, {"model_type": "llama", **config}, items, 5_000_000_000)
        size = sum(item.num_bytes for item in items)
        _forget(hf)
        begin = time.perf_counter()
        _copy(hf, home / "copy")
        copied = size / 1e9 / (time.perf_counter() - begin)
        shutil.rmtree(home / "copy")
        row = {"gb": round(size / 1e9, 2), "copy_gb_per_s": round(copied, 3)}

        def measure(name: str, *words: str | Path) -> None:
            seconds, peak = _converted(*words)
            rate = size / 1e9 / seconds
            row[f"{name}_gb_per_s"] = round(rate, 3)
            row[f"{name}_of_copy"] = round(rate / copied, 3)
            row[f"{name}_peak_gib"] = round(peak, 2)

        measure("hf_to_mcore", "hf-to-mcore", hf, home / "run", "--no-verify")
        shutil.rmtree(home / "run")
        measure("hf_to_mcore_proven", "hf-to-mcore", hf, home / "run")
        shutil.rmtree(hf)
        measure("mcore_to_hf", "mcore-to-hf", home / "run", home / "again", "--no-verify")
        return row
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _converted(direction: str, source: Path, output: Path, *words: str) -> tuple[float, float]:
    """Run the command; return its seconds without the start of Python, and peak GiB."""
    _forget(source)
    code = (
        "import sys, time, resource, mcore_ckpt.conversion.conversion as c\n"
        "begin = time.perf_counter()\n"
        "from mcore_ckpt.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "print(time.perf_counter() - begin, peak)\n"
    )
    ends = ("--input", str(source), "--output", str(output))
    command = [sys.executable, "-c", code, "convert", direction, *ends, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()[-2:]
    return float(seconds), float(peak)


def _copy(source: Path, target: Path) -> None:
    """Copy files in large blocks and make them durable."""
    target.mkdir()
    buffer = bytearray(BLOCK)
    for file in sorted(source.iterdir()):
        with file.open("rb", buffering=0) as one, (target / file.name).open("xb", 0) as two:
            while count := one.readinto(buffer):
                two.write(memoryview(buffer)[:count])
            os.fsync(two.fileno())


def _forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as one:
                os.fsync(one.fileno())
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
