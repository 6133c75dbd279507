"""Time ``mcore-data preprocess`` on real text, beside the ways it replaces.

    python benchmarks/bench_preprocess.py --ranks tokenizer.model --case bpe-sample

Text is gathered from the sources and documents of installed packages (``--roots``). Every run
is a fresh process, timed from its start to its end, imports, tokenizer and the flush to the
disk included ("cold"). Prints one JSON line a case: tokens/s over some repeats, peak memory of
all its processes together. With ``--parts`` one process does the work, and the line has the
processor seconds of each part of it, which other load on the machine changes less.

Cases: bpe-sample, bpe-full, bpe-off (Llama-3 byte pairs through the command), bpe-start (the
same on one line, which is the cost of starting), bpe-reference (the tokenizers library in the
same command), bpe-line-at-a-time (a pool that is given one line after the other and returns
lists, as the reference script works), wordpiece, wordpiece-reference, sentencepiece,
sentencepiece-reference, and bpe-memory: many times the text under changing alphabets, so that
new words come to the end, for its peak memory.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import resource
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reporting import add_options, host_versions, keep, spread

from mcore_base.command_line import parse
from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.preprocessing.sources import find_inputs, read_blocks
from mcore_data.preprocessing.tokenizing import build_tools

CASES = (
    "bpe-sample",
    "bpe-full",
    "bpe-off",
    "bpe-start",
    "bpe-reference",
    "bpe-line-at-a-time",
    "bpe-memory",
    "wordpiece",
    "wordpiece-reference",
    "sentencepiece",
    "sentencepiece-reference",
)
_ALPHABETS = 8
_TEXTS = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".html", ".js", ".c", ".json", ".pm"}
_LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


def main() -> None:
    """Run the cases of the command line."""
    options = _options()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / f"text-{options.megabytes}.jsonl"
    if not corpus.exists():
        gather(corpus, options.megabytes * 1_000_000, options.roots)
    run = run_parts if options.parts else run_case
    for case in options.case:
        keep(options, run(case, corpus, folder, options))


def gather(path: Path, wanted_bytes: int, roots: list[str]) -> None:
    """Write text files of installed packages as JSON lines, each content once."""
    seen: set[int] = set()
    total = 0
    with path.open("w", encoding="utf-8") as out:
        for root in roots:
            for file in sorted(Path(root).rglob("*")):
                if file.suffix not in _TEXTS or not file.is_file():
                    continue
                try:
                    text = file.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                if not 200 <= len(text) <= 400_000 or hash(text) in seen:
                    continue
                seen.add(hash(text))
                total += out.write(
                    json.dumps({"text": text, "name": file.name}, ensure_ascii=False) + "\n"
                )
                if total >= wanted_bytes:
                    return
    if total < wanted_bytes:
        path.unlink()
        raise SystemExit(
            f"only {total / 1e6:.0f} MB of text under {' '.join(roots)}: add --roots"
        )


def run_case(case: str, corpus: Path, folder: Path, options: argparse.Namespace) -> dict:
    """Time one case, each repeat in a process of its own."""
    tokenizer = _tokenizer_flags(case, folder, corpus, options)
    sources = _sources(case, corpus, options)
    before = host_versions(options)
    runs = [
        run_once(case, sources, tokenizer, folder, options)
        for _ in range(1 if case.endswith("memory") else options.repeats)
    ]
    facts = runs[0]["facts"]
    tokens = facts["tokens"]
    text_bytes = sum(source.stat().st_size for source in sources)
    rates = [tokens / run["seconds"] / 1e6 for run in runs]
    return {
        "name": f"preprocess-{case}{options.suffix}",
        **before,
        "tokenizers": version("tokenizers"),
        "engine": facts["tokenizer"]["engine"],
        "workers": options.workers,
        "megabytes": round(text_bytes / 1e6, 1),
        "documents": facts["documents"],
        "mtokens": round(tokens / 1e6, 2),
        "repeats": len(runs),
        **spread(rates, "mtokens_per_s", 2),
        **spread([run["seconds"] for run in runs], "seconds"),
        **spread([run["cpu_seconds"] for run in runs], "cpu_seconds"),
        "peak_mib": round(max(run["peak"] for run in runs) / 2**20),
        "verification": facts["verification"],
    }


def run_parts(case: str, corpus: Path, folder: Path, options: argparse.Namespace) -> dict:
    """Measure the processor time of each part of the work, in this process, cold."""
    seconds = dict.fromkeys(("start", "parse", "engine", "verify", "join", "hash"), 0.0)
    source = _sources(case, corpus, options)[0]

    def timed(part: str, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        result = work(*arguments, **named)
        seconds[part] += time.process_time() - began
        return result

    def encode_all(job: PreprocessConfig, tokenizer: TokenizerConfig) -> int:
        encoder = timed("start", build_tools, job, tokenizer).encoder
        digest, num_tokens = hashlib.sha256(), 0
        for block in read_blocks(find_inputs(job.input)[0], job.json_keys):
            (texts,) = timed("parse", block.parse, job.json_keys).columns
            ids = timed("engine", encoder.engine.encode, texts)
            if encoder.verifier:
                seed = (block.start,)
                timed("verify", encoder.verifier.check, texts, ids, seed=seed, describe=str)
            stored = timed("join", encoder._store, texts, ids)
            timed("hash", digest.update, stored.tokens)
            num_tokens += len(stored.tokens)
        return num_tokens

    engine = "reference" if case.endswith("reference") else options.engine
    words = ["--input", str(source), "--output-prefix", str(folder / "parts"), "--append-eod"]
    words += ["--engine", engine, *_tokenizer_flags(case, folder, corpus, options)]
    num_tokens = parse(encode_all, "bench_preprocess", words)
    worker_s = seconds["parse"] + seconds["engine"] + seconds["verify"] + seconds["join"]
    return {
        "name": f"preprocess-{case}-parts{options.suffix}",
        **host_versions(options),
        "tokenizers": version("tokenizers"),
        "megabytes": round(source.stat().st_size / 1e6, 1),
        "mtokens": round(num_tokens / 1e6, 2),
        **{f"{part}_cpu_s": round(value, 3) for part, value in seconds.items()},
        "engine_mtokens_per_cpu_s": round(num_tokens / seconds["engine"] / 1e6, 2),
        "worker_mtokens_per_cpu_s": round(num_tokens / worker_s / 1e6, 2),
    }


def run_once(
    case: str,
    sources: list[Path],
    tokenizer: list[str],
    folder: Path,
    options: argparse.Namespace,
) -> dict:
    """One run of a case from the start of its process to the end."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        prefix = f"{out}/out"
        if case.endswith("line-at-a-time"):
            command = [sys.executable, __file__, "--line-at-a-time", str(sources[0]), prefix]
            command += ["--tokenizer-json", str(_saved(tokenizer, folder))]
            command += ["--workers", str(options.workers)]
        else:
            command = [sys.executable, "-m", "mcore_data", "preprocess"]
            command += ["--input", *map(str, sources)]
            command += ["--output-prefix", prefix, "--append-eod", *tokenizer]
            command += ["--workers", str(options.workers)]
            engine = "reference" if case.endswith("reference") else options.engine
            command += ["--engine", engine]
            for mode in ("full", "off"):
                command += ["--verify", mode] if case.endswith(mode) else []
        cpu_began, began = _cpu_seconds(), time.perf_counter()
        peak = _watch(command)
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - cpu_began
        facts = json.loads(Path(f"{prefix}_text_document.manifest.json").read_text())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": peak, "facts": facts}


def line_at_a_time(source: str, prefix: str, tokenizer_json: str, workers: int) -> None:
    """Encode one line after the other in a pool and write one document after the other."""
    from mcore_data.indexed.manifest import write_manifest
    from mcore_data.indexed.writer import IndexedWriter

    documents = tokens = 0
    with (
        open(source, encoding="utf-8") as lines,
        multiprocessing.Pool(workers, _open_tokenizer, (tokenizer_json,)) as pool,
        IndexedWriter(f"{prefix}_text_document", "int32") as writer,
    ):
        for ids in pool.imap(_encode_line, lines, 32):
            writer.add_document(ids)
            documents += 1
            tokens += len(ids)
    write_manifest(
        f"{prefix}_text_document",
        {
            "documents": documents,
            "tokens": tokens,
            "tokenizer": {"engine": "tokenizers, line at a time"},
            "verification": {},
        },
    )


def _open_tokenizer(path: str) -> None:
    import tokenizers

    _open_tokenizer.core = tokenizers.Tokenizer.from_file(path)


def _encode_line(line: str) -> list[int]:
    core = _open_tokenizer.core
    return [*core.encode(json.loads(line)["text"]).ids, core.get_vocab_size() - 1]


def _tokenizer_flags(
    case: str, folder: Path, corpus: Path, options: argparse.Namespace
) -> list[str]:
    if case.startswith("bpe"):
        return [
            *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", options.ranks),
            *("--tiktoken-pattern", "gpt4", "--tiktoken-num-special-tokens", "0"),
            *("--tokenizer-special-tokens", *_LLAMA3_SPECIAL),
        ]
    if case.startswith("wordpiece"):
        kind = "BertWordPieceLowerCase"
        return ["--tokenizer-type", kind, "--vocab-file", options.bert_vocab]
    model = folder / "sentencepiece.model"
    if not model.exists():
        _train_sentencepiece(corpus, model)
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]


def _train_sentencepiece(corpus: Path, model: Path) -> None:
    """Train byte pairs with byte fallback, as Llama 2's model is, on the first lines."""
    import sentencepiece

    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(400), strict=False)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([row for text in texts for row in text.split("\n") if row]),
        model_prefix=str(model.with_suffix("")),
        vocab_size=8000,
        model_type="bpe",
        character_coverage=0.9995,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )


def _saved(flags: list[str], folder: Path) -> Path:
    """The tokenizer of the flags as a tokenizer.json."""
    from mcore_data.tokenizers.tiktoken_ranks import build_tiktoken

    model = flags[flags.index("--tokenizer-model") + 1]
    tokenizer = build_tiktoken(
        model, pattern="gpt4", num_special_tokens=0, special_tokens=_LLAMA3_SPECIAL
    )
    tokenizer.save(folder / "bpe")
    return folder / "bpe" / "tokenizer.json"


def _sources(case: str, corpus: Path, options: argparse.Namespace) -> list[Path]:
    """The inputs of a case: the corpus, its first lines, or many copies of it."""
    if case.endswith("memory"):
        variants = [_scrambled(corpus, number) for number in range(_ALPHABETS)]
        copies = -(-options.memory_gigabytes * 1_000_000_000 // corpus.stat().st_size)
        return [variants[number % _ALPHABETS] for number in range(copies)]
    if case.endswith("start"):
        return [_head(corpus, 0)]
    slow = case.endswith(("reference", "line-at-a-time", "full"))
    return [_head(corpus, options.slow_megabytes) if slow else corpus]


def _head(corpus: Path, megabytes: int) -> Path:
    """The first lines of the corpus, one at least, for cases that would take minutes."""
    path = corpus.with_name(f"head-{megabytes}.jsonl")
    if not path.exists():
        with corpus.open("rb") as file:
            data = file.read(megabytes * 1_000_000)
            path.write_bytes(data + file.readline())
    return path


def _scrambled(corpus: Path, number: int) -> Path:
    """The corpus under another alphabet; letters of keys and of JSON's escapes stay."""
    path = corpus.with_name(f"scrambled-{number}.jsonl")
    letters = "".join(sorted(set(string.ascii_lowercase) - set("textnamebfru")))
    others = list(letters)
    random.Random(number).shuffle(others)
    table = bytes.maketrans(letters.encode(), "".join(others).encode())
    if not path.exists():
        with corpus.open("rb") as source, path.open("wb") as out:
            while data := source.read(1 << 24):
                out.write(data.translate(table))
    return path


def _watch(command: list[str]) -> int:
    """Run a command; return the peak of its processes' memory, shared pages counted once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_pss, _family(process.pid))))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return peak


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_seconds() -> float:
    """Processor time of all finished children, in user and system mode."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _options() -> argparse.Namespace:
    spec = find_spec("llama_models")
    found = (
        str(Path(spec.origin).parent / "llama3/tokenizer.model") if spec and spec.origin else ""
    )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=["bpe-sample"], choices=CASES)
    parser.add_argument("--ranks", default=found, help="Llama-3's tokenizer.model")
    parser.add_argument("--bert-vocab", default="", help="vocab.txt of an uncased BERT")
    parser.add_argument("--roots", nargs="+", default=[sysconfig.get_paths()["purelib"]])
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--slow-megabytes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="auto", help="of all cases but references")
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/bench_preprocess")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="processor time by part")
    parser.add_argument("--memory-gigabytes", type=int, default=20)
    parser.add_argument("--suffix", default="", help="put behind each result's name")
    add_options(parser)
    parser.add_argument("--line-at-a-time", nargs=2, default=[])
    parser.add_argument("--tokenizer-json", default="")
    options = parser.parse_args()
    if options.line_at_a_time:
        source, prefix = options.line_at_a_time
        line_at_a_time(source, prefix, options.tokenizer_json, options.workers)
        sys.exit()
    return options


if __name__ == "__main__":
    main()
