"""Provokes failures of real training runs and keeps what their ranks logged.

Each case starts two to four gloo ranks of ``mcore-train``, lets one thing go wrong, and stores
standard output and error of every rank and of the launcher::

    python packages/mcore-train/tests/diagnosis/provoke.py            # all cases, minutes
    python packages/mcore-train/tests/diagnosis/provoke.py nan shape  # some of them

Ranks are forked from this process, which has imported torch already. ``failures.json.xz``
holds, for each case, the class and the ranks that triage must find, and the files.
"""

import ctypes
import json
import logging
import lzma
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import mcore_train.cli as cli
import mcore_train.loop as loop
import mcore_train.running as running
from mcore_parallel.launch.launcher import _ending, free_port

STORE = Path(__file__).with_name("failures.json.xz")
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 40 --log-interval 2 --vocab-size 128 "
    "--device cpu --distributed-timeout-minutes 0.15"
)
MOCK = "--mock-data"
_ARGUMENTS: list[str] = []
"""Further flags of one rank."""
_RUNS: list = []
"""What a rank keeps while it trains."""


@dataclass(frozen=True)
class Case:
    """One failure: what is started, what goes wrong, what triage must find."""

    name: str
    fault: str
    root: int | str
    """Rank at fault; ``all``: any rank; ``none``: no rank."""
    flags: str = MOCK
    world: int = 2
    rank: Callable[[int], None] = lambda rank: None
    """Runs in each rank before the command."""
    prepare: Callable[[], None] = lambda: None
    """Runs once, in the folder of the case."""
    outside: Callable[[list[int]], None] = lambda pids: None
    """Runs while the ranks train."""
    linger_s: float = 0.0
    """Time between the first failure and the end of the other ranks."""
    with_torchrun: bool = False
    """Start the command with torchrun, whose logs have another layout."""


def at_step(rank: int, failing: int, step: int, act: Callable[[], None]) -> None:
    """Let ``act`` run on the rank ``failing`` before its step number ``step``."""
    inner = loop.one_step

    def one_step(run, *arguments):
        if rank == failing and run.progress.iteration == step:
            act()
        return inner(run, *arguments)

    loop.one_step = one_step


def raising(error: BaseException, failing: int = 1, step: int = 5) -> Callable[[int], None]:
    """Return what makes one rank raise an error in a step."""

    def act() -> None:
        raise error

    return lambda rank: at_step(rank, failing, step, act)


def sending(number: int, failing: int = 1, step: int = 5) -> Callable[[int], None]:
    """Return what makes one rank send itself a signal in a step."""
    return lambda rank: at_step(rank, failing, step, lambda: os.kill(os.getpid(), number))


def segfault() -> None:
    """Read address zero."""
    ctypes.string_at(0)


def only(failing: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Return what runs on one rank."""
    return lambda rank: act() if rank == failing else None


def dataset(name: str = "book", documents: int = 60) -> None:
    """Write a small indexed dataset."""
    from mcore_data.cli import main

    with open("lines.jsonl", "w") as lines:
        for i in range(documents):
            lines.write(json.dumps({"text": "the quick brown fox jumps " * (3 + i % 5)}) + "\n")
    words = (
        "preprocess --input lines.jsonl --tokenizer-type ByteTokenizer --append-eod --workers 1"
    )
    assert main([*words.split(), "--output-prefix", name]) == 0


def cut(path: str, share: float) -> None:
    """Cut a file to a share of its size."""
    os.truncate(path, int(os.path.getsize(path) * share))


def trained(flags: str = "") -> None:
    """Train four steps alone and save to ``run``."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        words = f"gpt {MODEL} {MOCK} --save run {flags}".replace(
            "--train-iters 40", "--train-iters 4"
        )
        os._exit(cli.main(words.split()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def spoil_checkpoint() -> None:
    """Change bytes in the weights of a checkpoint."""
    trained()
    files = sorted(Path("run").rglob("*.safetensors"), key=lambda f: -f.stat().st_size)
    with files[0].open("r+b") as file:
        file.seek(files[0].stat().st_size * 3 // 5)
        file.write(b"\xff" * 100)


def occupy(rank: int) -> None:
    """Listen on the master's port on rank 0, before torch does."""
    if rank == 0:
        held = socket.socket()
        held.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        held.listen()
        _RUNS.append(held)


def as_nobody(rank: int) -> None:
    """Give up the rights of root."""
    os.seteuid(65534)


def less_memory(rank: int) -> None:
    """Limit what one rank may allocate."""
    if rank == 1:

        def act() -> None:
            torch.empty(1 << 44, dtype=torch.uint8)

        at_step(rank, 1, 5, act)


def swapped_collectives(rank: int) -> None:
    """Let rank 1 sum another shape than rank 0."""

    def act() -> None:
        from mcore_parallel.collectives import all_reduce

        all_reduce(torch.ones(3), _RUNS[0].ctx.world)

    _capture()
    at_step(rank, 1, 2, act)


def _capture() -> None:
    inner = running.train

    def train(run, reporter):
        _RUNS.append(run)
        return inner(run, reporter)

    running.train = train


def other_weights(rank: int) -> None:
    """Change a weight of rank 1 in the middle of the run."""
    _capture()

    def act() -> None:
        with torch.no_grad():
            next(_RUNS[0].chunks[-1].parameters()).view(-1)[0] += 1e-3

    at_step(rank, 1, 4, act)


def bad_gradient(rank: int) -> None:
    """Put NaN into a weight of rank 1."""
    _capture()

    def act() -> None:
        with torch.no_grad():
            next(_RUNS[0].chunks[-1].parameters()).view(-1)[0] = float("nan")

    at_step(rank, 1, 4, act)


def kill_after(
    number: int, index: int | None, wait_s: float = 2.0
) -> Callable[[list[int]], None]:
    """Send a signal to one rank, or to all, once they have trained a while."""

    def act(pids: list[int]) -> None:
        time.sleep(wait_s)
        for pid in pids if index is None else [pids[index]]:
            os.kill(pid, number)

    return act


def kill_child(rank: int, wait_s: float) -> Callable[[list[int]], None]:
    """Send SIGKILL to one rank of torchrun."""

    def act(pids: list[int]) -> None:
        time.sleep(wait_s)
        children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
        for child in children:
            environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"RANK=%d" % rank in environ:
                os.kill(int(child), signal.SIGKILL)

    return act


def slow_steps(rank: int) -> None:
    """Make steps long enough to be interrupted."""
    inner = loop.one_step

    def one_step(run, *arguments):
        time.sleep(0.2)
        return inner(run, *arguments)

    loop.one_step = one_step


def without(module: str) -> Callable[[int], None]:
    """Return what makes an import fail."""

    def act(rank: int) -> None:
        sys.modules[module] = None  # type: ignore[assignment]

    return act


CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 1 has a total capacity of 79.18 GiB "
    "of which 1.12 GiB is free. Including non-PyTorch memory, this process has 78.05 GiB "
    "memory in use. Of the allocated memory 75.40 GiB is allocated by PyTorch, and 512.10 MiB "
    "is reserved by PyTorch but unallocated."
)

CASES = (
    Case(
        "heads over tensor ranks", "shape", "all", f"{MOCK} --tensor-model-parallel-size 3", 3
    ),
    Case("world not divisible", "shape", "all", f"{MOCK} --tensor-model-parallel-size 2", 3),
    Case("batch not divisible", "shape", "all", f"{MOCK} --global-batch-size 5"),
    Case("layers over stages", "shape", "all", f"{MOCK} --pipeline-model-parallel-size 4", 4),
    Case(
        "experts over ranks",
        "shape",
        "all",
        f"{MOCK} --num-experts 3 --expert-model-parallel-size 2",
    ),
    Case("unknown flag", "config", "all", f"{MOCK} --lerning-rate 3"),
    Case("contradicting flags", "config", "all", f"{MOCK} --fp16 --bf16"),
    Case("option without its partner", "config", "all", f"{MOCK} --save-interval 10"),
    Case("no learning rate", "config", "all", f"{MOCK} --lr 0 --min-lr 1"),
    Case(
        "no dataset",
        "missing_path",
        "all",
        "--data-path nowhere/book_text_document --tokenizer-type NullTokenizer",
    ),
    Case(
        "no vocabulary file",
        "missing_path",
        "all",
        f"{MOCK} --tokenizer-type GPT2BPETokenizer --vocab-file no.json --merge-file no.txt",
    ),
    Case("no recipe", "missing_path", "all", f"{MOCK} --recipe nowhere.toml"),
    Case(
        "no checkpoint",
        "missing_path",
        "all",
        f"{MOCK} --load nowhere --exit-on-missing-checkpoint",
    ),
    Case(
        "damaged checkpoint",
        "checkpoint",
        "all",
        f"{MOCK} --load run --override-opt-param-scheduler",
        prepare=spoil_checkpoint,
    ),
    Case(
        "checkpoint of another schedule",
        "checkpoint",
        "all",
        f"{MOCK} --load run",
        prepare=trained,
    ),
    Case(
        "checkpoint of another width",
        "checkpoint",
        "all",
        f"{MOCK} --load run --hidden-size 32",
        prepare=trained,
    ),
    Case(
        "checkpoint cut off",
        "checkpoint",
        "all",
        f"{MOCK} --load run",
        prepare=lambda: (trained(), cut(str(next(Path("run").rglob("*.safetensors"))), 0.5)),
    ),
    Case(
        "folder not ours",
        "permission",
        "all",
        f"{MOCK} --save run",
        rank=as_nobody,
        prepare=lambda: (os.mkdir("run"), os.chmod("run", 0o500), os.chmod(".", 0o755)),
    ),
    Case("full drive", "storage_full", 0, f"{MOCK} --metrics-file /dev/full --save run"),
    Case("infinite gradient", "nan", "all", f"{MOCK} --lr 1e30 --clip-grad 0"),
    Case("nan weight on one rank", "nan", "all", rank=bad_gradient),
    Case(
        "dataset cut",
        "data",
        "all",
        "--data-path book_text_document --tokenizer-type ByteTokenizer --vocab-size 512",
        prepare=lambda: (dataset(), cut("book_text_document.bin", 0.5)),
    ),
    Case(
        "token beyond the vocabulary",
        "data",
        "all",
        "--data-path book_text_document --tokenizer-type NullTokenizer --vocab-size 50",
        prepare=dataset,
    ),
    Case(
        "index cut",
        "data",
        "all",
        "--data-path book_text_document --tokenizer-type ByteTokenizer --vocab-size 512",
        prepare=lambda: (dataset(), cut("book_text_document.idx", 0.5)),
    ),
    Case("killed rank", "killed", 1, rank=sending(signal.SIGKILL)),
    Case("killed rank 0", "killed", 0, rank=sending(signal.SIGKILL, 0), world=3),
    Case(
        "killed rank, others linger",
        "killed",
        2,
        rank=sending(signal.SIGKILL, 2),
        world=4,
        linger_s=25,
    ),
    Case("segmentation fault", "crash", 1, rank=lambda r: at_step(r, 1, 5, segfault)),
    Case("aborted", "crash", 2, rank=sending(signal.SIGABRT, 2), world=3),
    Case(
        "segmentation fault, others linger",
        "crash",
        1,
        rank=lambda r: at_step(r, 1, 5, segfault),
        world=3,
        linger_s=25,
    ),
    Case(
        "stopped rank",
        "collective_timeout",
        1,
        rank=sending(signal.SIGSTOP, 1),
        world=3,
        linger_s=40,
    ),
    Case(
        "rank in an endless loop",
        "collective_timeout",
        2,
        rank=lambda r: at_step(r, 2, 5, lambda: time.sleep(100)),
        world=3,
        linger_s=40,
    ),
    Case("program's error", "program", 1, rank=raising(KeyError("layer_7"))),
    Case(
        "program's error, others linger",
        "program",
        3,
        rank=raising(RuntimeError("the teacher gave no logits"), 3),
        world=4,
        linger_s=25,
    ),
    Case(
        "index error of rank 0",
        "program",
        0,
        rank=raising(IndexError("list index out of range"), 0),
        world=3,
        linger_s=25,
    ),
    Case("assertion", "program", 2, rank=raising(AssertionError("one of our own"), 2), world=3),
    Case(
        "silent exit",
        "program",
        1,
        rank=lambda r: at_step(r, 1, 5, lambda: os._exit(17)),
        world=2,
    ),
    Case(
        "matrices that do not fit",
        "shape",
        1,
        rank=lambda r: at_step(r, 1, 5, lambda: torch.ones(3, 4) @ torch.ones(5, 6)),
    ),
    Case(
        "view that does not fit",
        "shape",
        0,
        rank=lambda r: at_step(r, 0, 5, lambda: torch.ones(12).view(5, -1)),
        world=3,
        linger_s=20,
    ),
    Case("GPU memory", "out_of_memory", 1, rank=raising(torch.OutOfMemoryError(CUDA_OOM))),
    Case(
        "GPU memory, others linger",
        "out_of_memory",
        2,
        rank=raising(torch.OutOfMemoryError(CUDA_OOM), 2),
        world=4,
        linger_s=25,
    ),
    Case("host memory", "host_memory", 1, rank=less_memory),
    Case(
        "host memory of Python",
        "host_memory",
        0,
        rank=lambda r: at_step(r, 0, 5, lambda: bytearray(1 << 50)),
    ),
    Case(
        "ECC of a GPU",
        "hardware",
        1,
        rank=raising(
            RuntimeError(
                "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
                "asynchronously reported at some other API call."
            )
        ),
        world=4,
        linger_s=25,
    ),
    Case(
        "package missing",
        "import",
        "all",
        f"{MOCK} --save run --tensorboard",
        rank=without("tensorboard"),
    ),
    Case(
        "import in a step",
        "import",
        1,
        rank=lambda r: at_step(r, 1, 3, lambda: __import__("flash_attn_9")),
    ),
    Case("other collective", "collective_mismatch", 1, rank=swapped_collectives, linger_s=25),
    Case(
        "other weights",
        "replicas",
        "all",
        f"{MOCK} --check-weight-hash-across-dp-replicas-interval 2",
        rank=other_weights,
    ),
    Case(
        "other options",
        "config",
        "all",
        rank=lambda r: _ARGUMENTS.extend(["--seed", "7"] if r else []),
    ),
    Case("port taken", "rendezvous", 0, rank=occupy, linger_s=5),
    Case(
        "master absent",
        "rendezvous",
        "all",
        rank=lambda r: os.environ.update(MASTER_ADDR="no-such-host.invalid") if r else None,
        linger_s=5,
    ),
    Case(
        "interrupted",
        "cancelled",
        "all",
        f"{MOCK} --train-iters 400",
        rank=slow_steps,
        outside=lambda pids: (
            kill_after(signal.SIGINT, None)(pids),
            time.sleep(1.5),
            kill_after(signal.SIGINT, None, 0)(pids),
        ),
    ),
    Case(
        "stale file handle",
        "storage_io",
        1,
        rank=raising(OSError(116, "Stale file handle", "/shared/book_text_document.bin")),
    ),
    Case(
        "no space for a save",
        "storage_full",
        0,
        rank=raising(
            OSError(28, "No space left on device", "/shared/run/iter_0000005/index.json"), 0
        ),
    ),
    Case(
        "torchrun, refused options",
        "shape",
        "all",
        f"{MOCK} --global-batch-size 5",
        with_torchrun=True,
    ),
    Case(
        "torchrun, killed rank",
        "killed",
        1,
        f"{MOCK} --train-iters 100000",
        outside=kill_child(1, 25),
        with_torchrun=True,
    ),
    Case(
        "torchrun, stopped from outside",
        "killed",
        "none",
        f"{MOCK} --train-iters 100000",
        outside=kill_after(signal.SIGTERM, None, 25),
        with_torchrun=True,
    ),
    Case("done", "finished", "none", f"{MOCK} --train-iters 6"),
)


def run_case(case: Case) -> dict:
    """Run one case in a folder of its own; return its labels and logs."""
    home, here = Path(tempfile.mkdtemp(prefix="provoke_")), os.getcwd()
    logs = home / "logs"
    logs.mkdir()
    os.chdir(home)
    try:
        case.prepare()
        if case.with_torchrun:
            _run_torchrun(case, logs)
        else:
            port = str(free_port())
            pids = [_fork_rank(case, rank, port, logs) for rank in range(case.world)]
            (logs / "launcher.log").write_text(_supervise(case, pids))
    finally:
        os.chdir(here)
    files = {
        str(path.relative_to(logs)): _plain(path.read_text(errors="replace"), home)
        for path in sorted(logs.rglob("*"))
        if path.is_file()
    }
    shutil.rmtree(home)
    labels = {"name": case.name, "fault": case.fault, "root": case.root, "world": case.world}
    return {**labels, "files": files}


def _run_torchrun(case: Case, logs: Path) -> None:
    options = f"--nproc-per-node {case.world} --log-dir {logs} --redirects 3"
    words = [*options.split(), "--master-port", str(free_port()), "-m", "mcore_train", "gpt"]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    with (logs / "launcher.log").open("w") as log:
        words = [*command, *MODEL.split(), *case.flags.split()]
        agent = subprocess.Popen(words, stdout=log, stderr=log)
        case.outside([agent.pid])
        agent.wait(120)


def _plain(text: str, home: Path) -> str:
    root = str(Path(cli.__file__).parents[4])
    site = str(Path(torch.__file__).parents[1])
    places = {str(home): "/runs/a", site: "/venv/lib", root: "/src", sys.base_prefix: "/usr"}
    for place, plain in places.items():
        text = text.replace(place, plain)
    return text


def _fork_rank(case: Case, rank: int, port: str, logs: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for stream, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(logs / f"rank_{rank}.{name}", flags, 0o666), stream)
        world = str(case.world)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
        logging.getLogger().handlers[:] = []
        case.rank(rank)
        code = cli.main(["gpt", *MODEL.split(), *case.flags.split(), *_ARGUMENTS])
    except BaseException:  # noqa: BLE001, as at the end of a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _supervise(case: Case, pids: list[int]) -> str:
    """Wait as ``launch_local`` does; return what it logs."""
    case.outside(pids)
    running, text, end_s = dict(enumerate(pids)), "", time.monotonic() + 90
    first_s = None
    while running:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del running[rank]
            code = os.waitstatus_to_exitcode(status)
            if code and first_s is None:
                first_s = time.monotonic()
                text = f"rank {rank} {_ending(code)}; ending the others\n"
        now = time.monotonic()
        if running and ((first_s is not None and now > first_s + case.linger_s) or now > end_s):
            for number in (signal.SIGCONT, signal.SIGTERM):
                for pid in running.values():
                    os.kill(pid, number)
            time.sleep(3)
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
            end_s = first_s = now + 1000
        time.sleep(0.05)
    return text


def main(names: list[str]) -> None:
    """Run the named cases, or all, and merge them into the store."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kept = json.loads(lzma.decompress(STORE.read_bytes())) if STORE.exists() else []
    found = {case["name"]: case for case in kept}
    for case in CASES:
        if not names or any(name in case.name for name in names):
            began_s = time.monotonic()
            found[case.name] = run_case(case)
            print(f"{case.name}: {time.monotonic() - began_s:.1f} s", flush=True)
    order = [case.name for case in CASES if case.name in found]
    text = json.dumps([found[name] for name in order], indent=0)
    STORE.write_bytes(lzma.compress(text.encode(), preset=9))
    print(f"{len(order)} cases, {STORE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
