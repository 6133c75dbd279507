"""Triage names class and rank of failed runs, whatever the world and the layout of the logs."""

import json
import lzma
import os
import pickle
import random
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm_ranks import run_command

from mcore_train.composition import flag_names
from mcore_train.diagnosis.flight_recorder import first_divergence, read_dumps
from mcore_train.diagnosis.memory_remedies import MemoryRecord, cheapest_remedy
from mcore_train.diagnosis.rules import FAULTS, RULES, recognize
from mcore_train.diagnosis.triage import Verdict, triage
from mcore_train.options.parsing import parse

HERE = Path(__file__).parent
LAYOUTS = ("a file a rank", "torchrun", "one file")


@dataclass(frozen=True)
class Case:
    """A failed run: what triage must find, and the logs."""

    name: str
    fault: str
    root: int | str
    files: dict[str, str]


def _read_text(path: Path) -> Case:
    head, *parts = path.read_text().split("---- ")
    fault, root = re.findall(r"(?:class|root): (\S+)", head)
    files = dict(part.split("\n", 1) for part in parts)
    name = f"{path.parent.name}/{path.stem}"
    return Case(name, fault, int(root) if root.isdigit() else root, files)


PROVOKED = [
    Case(case["name"], case["fault"], case["root"], case["files"])
    for case in json.loads(lzma.decompress((HERE / "failures.json.xz").read_bytes()))
]
KNOWN = [_read_text(path) for path in sorted(HERE.glob("known/*.txt"))]
UNSEEN = [_read_text(path) for path in sorted(HERE.glob("unseen/*.txt"))]
CASES = [*PROVOKED, *KNOWN, *UNSEEN]


def write(files: dict[str, str], folder: Path) -> Path:
    """Write logs below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


_RANK_OF = re.compile(r"rank_?(\d+)|attempt_0/(\d+)|^(\d+)\.")


def _rank_of(name: str) -> int | None:
    found = _RANK_OF.search(name)
    return int(next(n for n in found.groups() if n)) if found else None


def spread(
    case: Case, world: int, rng: random.Random
) -> tuple[Case, dict[int, dict[str, str]]]:
    """Spread a run over more ranks: the root moves, others repeat what its peers logged.

    Returns:
        The case with its new root and the files of no rank, and the files of each rank.
    """
    by_rank: dict[int, dict[str, str]] = {}
    for name, text in case.files.items():
        if (rank := _rank_of(name)) is not None:
            by_rank.setdefault(rank, {})[name] = text
    rest = {name: text for name, text in case.files.items() if _rank_of(name) is None}
    others = [rank for rank in by_rank if rank != case.root]
    if not others:
        return Case(case.name, case.fault, case.root, case.files), {}
    root = case.root
    if isinstance(root, int) and root != 0:
        root = rng.randrange(1, world)
    old_root = case.root if isinstance(case.root, int) else -1
    beyond = [rank for rank in others if rank != 0] or others
    made: dict[int, dict[str, str]] = {}
    for rank in range(world):
        old = 0 if rank == 0 else rng.choice(beyond)
        if rank == root:
            old = old_root
        if old not in by_rank:
            old = rng.choice(others)
        names = {old: rank, old_root: root}
        skew_s = (rank // 8 % 5) - 2
        made[rank] = {
            _renamed(name, names): _skewed(_renamed(_said(text, rank), names), skew_s)
            for name, text in by_rank[old].items()
        }
    rest = {name: _renamed(text, {old_root: root}) for name, text in rest.items()}
    return Case(case.name, case.fault, root, rest), made


def _said(text: str, rank: int) -> str:
    """Leave out what rank 0 alone logs: the header and the steps."""
    if rank == 0 or "layout: " not in text:
        return text
    return "".join(line + "\n" for line in text.splitlines() if line.startswith("rank "))


def _renamed(text: str, names: dict[int, int]) -> str:
    """Change the numbers of ranks where a line names one rank."""
    places = r"\b[Rr]ank |rank +: |local_rank: |\[rank|rank_?|attempt_0/|^"
    pattern = rf"({places})(\d+)(?=[\].: /_]|\b)"

    def new(found: re.Match[str]) -> str:
        if not found[1] and not re.match(r"\d+\.(?:err|out)$", text):
            return found[0]
        return f"{found[1]}{names.get(int(found[2]), int(found[2]))}"

    return re.sub(pattern, new, text)


def _skewed(text: str, skew_s: int) -> str:
    """Move the times of a log, as on a host whose clock is off."""

    def moved(found: re.Match[str]) -> str:
        seconds = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3]) + skew_s
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{found[4]}"

    return re.sub(r"\b(\d\d):(\d\d):(\d\d)(\.\d+)", moved, text)


def laid_out(case: Case, ranks: dict[int, dict[str, str]], layout: str) -> dict[str, str]:
    """Arrange the logs of ranks as one of ``LAYOUTS``."""
    files = dict(case.files)
    for rank, logs in ranks.items():
        for name, text in logs.items():
            if layout == LAYOUTS[0]:
                files[name] = text
            elif layout == LAYOUTS[1]:
                stream = "stdout" if name.endswith("out") else "stderr"
                files[f"attempt_0/{rank}/{stream}.log"] = text
            else:
                lines = "".join(f"{rank}: {line}\n" for line in text.splitlines())
                files["job.out"] = files.get("job.out", "") + lines
    return files


def is_right(case: Case, verdict: Verdict) -> bool:
    """Whether a verdict has the class and the root of a case."""
    if verdict.fault != case.fault:
        return False
    if case.root == "all":
        return True
    return verdict.root_ranks[:1] == (() if case.root == "none" else (case.root,))


def wrong(world: int, folder: Path) -> tuple[list[str], list[str]]:
    """Judge all cases over ``world`` ranks; return the wrong ones and blamed users."""
    rng = random.Random(world)
    found, blamed = [], []
    for number, case in enumerate(CASES):
        spread_case, ranks = spread(case, world, rng)
        layout = rng.choice(LAYOUTS) if case in PROVOKED else LAYOUTS[0]
        logs = write(laid_out(spread_case, ranks, layout), folder / str(number))
        verdict = triage(logs)
        if not is_right(spread_case, verdict):
            said = f"{verdict.fault} of {verdict.root_ranks[:3]}"
            found.append(
                f"{case.name} ({layout}): {said}, not {case.fault} of {spread_case.root}"
            )
        if case.fault == "hardware" and verdict.exit_code < FAULTS["hardware"].exit_code:
            blamed.append(case.name)
    return found, blamed


def test_the_corpus_has_sixty_failures_of_every_class():
    assert len(CASES) >= 70
    assert len(PROVOKED) >= 45
    assert {case.fault for case in CASES} == set(FAULTS) - {"unknown"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_class_and_root_of_a_failure(case, tmp_path):
    verdict = triage(write(case.files, tmp_path))
    assert is_right(case, verdict), verdict.page()


@pytest.mark.parametrize(
    "world", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 64, 256, 1024))]
)
def test_nine_of_ten_failures_are_recognized_over_many_ranks(world, tmp_path):
    found, blamed = wrong(world, tmp_path)
    assert not blamed
    assert len(found) <= 0.1 * len(CASES), "\n".join(found)


def test_the_command_ends_with_the_code_of_the_class_and_writes_json(tmp_path):
    case = next(case for case in UNSEEN if case.fault == "hardware")
    logs = write(case.files, tmp_path)
    done = run_command("mcore_train", "triage", str(logs), "--json")
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == FAULTS["hardware"].exit_code
    assert (told["fault"], told["retry"], told["root_ranks"]) == ("hardware", True, [case.root])
    page = run_command("mcore_train", "triage", str(logs)).stdout
    assert page.startswith("hardware: a GPU or its links failed\nretry: yes\nroot: rank 2")
    missing = run_command("mcore_train", "triage", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr


def test_the_commands_of_the_page_on_troubles(tmp_path):
    page = (HERE.parents[3] / "docs/troubleshooting.md").read_text()
    _, files = _memory_case()
    write(files, tmp_path / "logs")
    block = page.split(
        "test_triage.py::test_the_commands_of_the_page_on_troubles -->\n```bash\n"
    )[1]
    commands = block.split("```")[0].splitlines()
    assert len(commands) == 2
    for command in commands:
        done = run_command("mcore_train", *command.split()[1:], cwd=tmp_path)
        assert done.returncode == FAULTS["out_of_memory"].exit_code, done.stderr
    for name, fault in FAULTS.items():
        assert f"| `{name}` | {fault.exit_code} | {fault.summary}" in page


def test_the_first_of_two_errors_is_the_root_unless_it_is_a_reaction(tmp_path):
    def log(second: int, message: str, rank: int) -> str:
        stamp = f"[rank{rank}]:[W1127 03:22:{second}.204518790 Utils.cpp:1] bye\n"
        return f"[rank{rank}]: {message}\n{stamp}"

    files = {
        "rank_0.err": log(40, "KeyError: 'late'", 0),
        "rank_1.err": log(20, "RuntimeError: Connection closed by peer [10.0.0.7]:2211", 1),
        "rank_2.err": log(30, "IndexError: first", 2),
    }
    verdict = triage(write(files, tmp_path))
    assert (verdict.root_ranks, verdict.message) == ((2,), "IndexError: first")
    assert verdict.num_cascade == 1


LOGGED = (
    "command: torchrun --nproc-per-node 2 -m mcore_train gpt --num-layers 2 --hidden-size 16 "
    "--num-attention-heads 4 --lr 0.001 --train-iters 40 --global-batch-size 8 "
    "--micro-batch-size 4 --mock-data --vocab-size 128"
)
"""Line of the header of a run, which its first rank logs."""


LIGHT = "--recompute-granularity selective --recompute-modules layernorm"


def with_command(case: Case, flags: str) -> dict[str, str]:
    """Return the logs of a case whose run logged its command line."""
    first = min(case.files, key=lambda name: (_rank_of(name) is None, name))
    return {**case.files, first: f"{LOGGED} {flags}\n{case.files[first]}"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_command_that_continues_a_run_is_one_that_training_takes(case, tmp_path):
    save = tmp_path / "save"
    damaged = case.name in ("damaged checkpoint", "checkpoint cut off")  # in step 4
    for step in (2, 10) if damaged else ():
        (save / f"iter_{step:07d}").mkdir(parents=True)
        (save / f"iter_{step:07d}" / "index.json").write_text("{}")
    verdict = triage(write(with_command(case, f"--save {save}"), tmp_path / "logs"))
    assert is_right(case, verdict)
    mended = damaged or verdict.fault in ("out_of_memory", "nan")
    assert bool(verdict.command) == (verdict.retry or mended)
    if not verdict.command:
        return
    start, _, flags = verdict.command.partition(" gpt ")
    assert start.endswith("torchrun --nproc-per-node 2 -m mcore_train")
    if damaged:
        flags = flags.removesuffix(f" --load {save} --ckpt-step 2")
        assert "ckpt-step" not in flags
    config = parse(shlex.split(flags))
    assert config.loading.auto_resume != damaged
    assert config.optimizer.lr == (0.0005 if verdict.fault == "nan" else 0.001)


def test_a_run_without_saves_begins_anew(tmp_path):
    case = next(case for case in CASES if case.fault == "killed")
    command = triage(write(with_command(case, ""), tmp_path)).command
    assert command == LOGGED.removeprefix("command: ")


@pytest.mark.parametrize(
    ("options", "mended"),
    [
        ("--seq-length 1024", "--use-distributed-optimizer"),
        ("--use-distributed-optimizer", f"{LIGHT} mlp_act"),
        (f"--use-distributed-optimizer {LIGHT}", "--micro-batch-size 2"),
        (
            f"--use-distributed-optimizer {LIGHT} --micro-batch-size 1",
            "--recompute-granularity full",
        ),
    ],
)
def test_a_run_out_of_memory_continues_with_the_option_that_helps(options, mended, tmp_path):
    case, _ = _memory_case()
    files = with_command(case, options)
    sharding = "optim" if "distributed" in options else "no_shard"
    files = {k: text.replace("sharding no_shard", f"sharding {sharding}")
             for k, text in files.items()}  # fmt: skip
    command = triage(write(files, tmp_path)).command
    assert command.endswith(f" {mended}")
    parse(shlex.split(command.partition(" gpt ")[2]))
    again = [word for word in mended.split() if word.startswith("--")]
    assert all(command.count(word) == 1 for word in again)


def test_exit_codes_are_distinct_and_tell_retry():
    codes = [fault.exit_code for fault in FAULTS.values()]
    assert len(set(codes)) == len(codes)
    assert all(fault.retry == (fault.exit_code >= 30) for fault in FAULTS.values())
    assert {rule.fault for rule in RULES} <= set(FAULTS)


def test_a_broken_gpu_names_the_host_to_leave_out(tmp_path):
    case = next(case for case in UNSEEN if "off_the_bus" in case.name)
    assert triage(write(case.files, tmp_path)).exclude_hosts == ("gpu-b14",)


def test_an_error_in_the_middle_of_a_long_log_is_found(tmp_path):
    steps = "".join(f" iteration {i}/ 9000 | lm loss: 2.1E+00 |\n" for i in range(4000))
    noise = "worker 3 fetched a batch\n" * 8000
    error = "ValueError: the teacher gave no logits\n"
    (tmp_path / "rank_5.log").write_text(f"{steps}{error}{noise}")
    verdict = triage(tmp_path)
    assert (verdict.fault, verdict.root_ranks, verdict.step) == ("program", (5,), None)


def test_an_error_after_which_the_run_goes_on_is_no_cause(tmp_path):
    error = "ValueError: one bad record\n"
    steps = "".join(f" iteration {i}/ 9000 | lm loss: 2.1E+00 |\n" for i in range(50))
    (tmp_path / "rank_0.log").write_text(f"{error}{steps}MemoryError\n")
    assert triage(tmp_path).fault == "host_memory"


def test_a_log_with_nuls_is_read_and_a_core_dump_is_not(tmp_path):
    # torch writes the NUL of this message, and NFS fills the hole of a truncated log with NULs.
    bus = "ERROR: Unexpected bus error encountered in worker. This might be caused by"
    text = "\0" * 600 + f"step 3\n{bus} insufficient shared memory (shm).\n\0"
    (tmp_path / "rank_1.log").write_text(text)
    (tmp_path / "core.rank_0").write_bytes(bytes(range(256)) * 40 + b"MemoryError\n")
    verdict = triage(tmp_path)
    assert (verdict.fault, verdict.root_ranks, verdict.num_logs) == ("host_memory", (1,), 1)


def test_run_folders_and_ranks_are_no_part_of_a_host(tmp_path):
    run = {f"none_8k2vxq1{n}/attempt_0/{n}/stderr.log": "KeyError: 3\n" for n in (4, 7)}
    assert triage(write(run, tmp_path / "torchrun")).hosts == ()
    single = {"gpu-009_rank73.log": "KeyError: 3\n"}
    assert triage(write(single, tmp_path / "single")).hosts == ("gpu-009",)


def test_only_the_last_attempt_of_torchrun_counts(tmp_path):
    files = {
        "attempt_0/1/stderr.log": "MemoryError\n",
        "attempt_1/0/stderr.log": "KeyError: 3\n",
    }
    verdict = triage(write(files, tmp_path))
    assert (verdict.fault, verdict.root_ranks) == ("program", (0,))


def _memory_case() -> tuple[Case, dict[str, str]]:
    case = next(case for case in PROVOKED if case.name == "GPU memory")
    return case, case.files


def test_a_run_out_of_memory_is_described_with_the_cheapest_remedy(tmp_path):
    case, files = _memory_case()
    verdict = triage(write(files, tmp_path))
    memory = verdict.memory
    assert (memory.rank, memory.layout["data"], memory.sharding) == (case.root, 2, "no_shard")
    assert (memory.requested_gib, memory.capacity_gib) == (1.96, 79.18)
    assert verdict.advice.startswith("--use-distributed-optimizer")
    assert "GiB: requested 1.96" in verdict.page()


@pytest.mark.parametrize(
    ("record", "mend"),
    [
        (MemoryRecord(capacity_gib=79.0, unused_gib=16.0), "PYTORCH_ALLOC_CONF"),
        (MemoryRecord(layout={"data": 8}, sharding="no_shard"), "--use-distributed-optimizer"),
        (MemoryRecord(layout={"data": 8}, sharding="optim", phase="loss"), "half the"),
        (MemoryRecord(phase="validation"), "half the --micro-batch-size of validation"),
        (MemoryRecord(phase="forward"), "--recompute-granularity selective"),
        (MemoryRecord(recompute="selective", micro_batch_size=4), "--micro-batch-size 2"),
        (MemoryRecord(recompute="selective"), "--recompute-granularity full"),
        (MemoryRecord(recompute="full"), "more tensor or pipeline ranks"),
    ],
)
def test_the_cheapest_remedy_depends_on_what_the_run_does_already(record, mend):
    assert cheapest_remedy(record).startswith(mend)


def test_advice_names_flags_that_exist():
    texts = [rule.advice for rule in RULES]
    texts += [cheapest_remedy(MemoryRecord(phase=phase)) for phase in ("loss", "save", "")]
    others = {"--step", "--run", "--signal", "--exclude", "--locked", "--nproc", "--json"}
    named = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]+", text)}
    assert named - flag_names() - others == set()


def _dump(rank: int, calls: list[tuple[str, list[int]]], ranks: str = "[0, 1, 2]") -> dict:
    """Return a dump as torch writes it; the last call is not over."""
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [size],
            "input_dtypes": ["Float"],
            "time_created_ns": 1000 * number + rank,
            "retired": number < len(calls),
            "is_p2p": False,
            "frames": [{"name": "sync", "filename": "/srv/train/grads.py", "line": 7}],
        }
        for number, (name, size) in enumerate(calls, start=1)
    ]
    return {"pg_config": {"0": {"ranks": ranks}}, "entries": entries}


SUM = ("all_reduce", [4])


@pytest.mark.parametrize(
    ("dumps", "fault", "ranks"),
    [
        ([[SUM, SUM], [SUM, SUM], [SUM]], "collective_timeout", (2,)),
        ([[SUM, SUM], [SUM, ("all_reduce", [5])], [SUM, SUM]], "collective_mismatch", (1,)),
        ([[SUM, SUM], [SUM, SUM], [SUM, ("barrier", [4])]], "collective_mismatch", (2,)),
        ([[SUM, SUM], [SUM, SUM]], "collective_timeout", (2,)),
    ],
)
def test_dumps_of_the_flight_recorder_name_the_rank_that_did_not_come(
    dumps, fault, ranks, tmp_path
):
    for rank, calls in enumerate(dumps):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(_dump(rank, calls)))
    (tmp_path / "rank_0.err").write_text(
        "[rank0]: Watchdog caught collective operation timeout\n"
    )
    verdict = triage(tmp_path)
    assert (verdict.fault, verdict.root_ranks) == (fault, ranks)
    assert "call 2 of group default_pg" in verdict.message
    assert "at train/grads.py:7 (sync)" in verdict.message


def test_ranks_that_agree_are_not_blamed():
    dumps = {rank: _dump(rank, [SUM, SUM]) for rank in range(3)}
    assert first_divergence(dumps) is None


@pytest.mark.slow
def test_a_dump_that_torch_writes_is_read(tmp_path):
    write_real_dumps(tmp_path)
    absent = read_dumps(tmp_path)
    assert (absent.ranks, absent.number, absent.fault) == ((1,), 2, "collective_timeout")


def write_real_dumps(folder: Path) -> None:
    """Let two gloo ranks call one collective together and one of them another, and dump."""
    program = folder / "ranks.py"
    program.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "from torch._C._distributed_c10d import _dump_fr_trace\n"
        "pid = os.fork(); rank = int(pid == 0)\n"
        f"store = dist.FileStore({str(folder / 'store')!r}, 2)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "dist.all_reduce(torch.ones(4))\n"
        "if rank == 0: dist.all_reduce(torch.ones(7), async_op=True)\n"
        f"open({str(folder)!r} + f'/fr_trace_rank_{{rank}}', 'wb').write(_dump_fr_trace())\n"
        "store.add('done', 1)\n"
        "if rank == 0: os.waitpid(pid, 0)\n"
        "os._exit(0)\n"
    )
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, str(program)], env=environ, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 64, 1024])
def test_a_gigabyte_of_logs_takes_less_than_five_seconds(num_files, tmp_path):
    line = (
        " iteration {:8d}/  100000 | elapsed time per iteration (ms): 2101.3 | lm loss: 2.3 |\n"
    )
    block = "".join(line.format(i) for i in range(12000)).encode()
    for rank in range(num_files):
        with (tmp_path / f"rank_{rank}.log").open("wb") as file:
            for _ in range(max(1, 10**9 // num_files // len(block))):
                file.write(block)
            file.write(
                b"KeyError: 3\n" if rank == num_files // 2 else b"Connection reset by peer\n"
            )
    began_s = time.process_time()
    verdict = triage(tmp_path)
    assert time.process_time() - began_s < 5
    assert verdict.root_ranks == (num_files // 2,)


MESSAGES = {
    "ValueError: Expected input batch_size (32) to match target batch_size (31).": "shape",
    "RuntimeError: Expected all tensors to be on the same device, but found two": "program",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB": "out_of_memory",
    "Cuda failure 2 'out of memory'": "out_of_memory",
    "srun: error: node3: task 12: Out Of Memory": "host_memory",
    "Memory cgroup out of memory: Killed process 4242 (python)": "host_memory",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 40.0 GiB": "host_memory",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory": "program",
    "Killed": "killed",
    "HTTPError: 401 Client Error: Unauthorized for url: https://hub/x": "permission",
    "ValueError: loss is nan at iteration 30": "nan",
    "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.": "nan",
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 56 vs 36.": "collective_mismatch",
    "RuntimeError: No CUDA GPUs are available": "hardware",
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "hardware",
    "NCCL WARN Cuda failure 'uncorrectable ECC error encountered'": "hardware",
    "NVRM: Xid (PCI:0000:9b:00): 95, pid=1, Uncontained ECC error": "hardware",
    "NVRM: Xid (PCI:0000:9b:00): 13, pid=1, Graphics Exception": "crash",
    "RuntimeError: CUDA error: an illegal instruction was encountered": "crash",
    "OSError: [Errno 116] Stale file handle": "storage_io",
    "OSError: [Errno 122] Disk quota exceeded: '/shared/run'": "storage_full",
    "mcore-train: error: /d/c.3 is missing, and the manifest names it": "missing_path",
    "CorruptDatasetError: /d/c.bin is missing, and c.json lists it with 9 b": "missing_path",
    "CorruptDatasetError: /d/c.bin has 7 bytes, and c.json lists it with 20 bytes": "data",
    "mcore-train: error: /c/rank_0 is missing, but the index lists it.": "checkpoint",
    "safetensors_rust.SafetensorError: Error while deserializing header": "checkpoint",
    "zlib.error: Error -3 while decompressing data": None,
    "UserWarning: the error of the estimate is large": None,
    "loss went up; is the learning rate too high?": None,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_recognized_by_its_words(message):
    match = recognize(message)
    assert (match.rule.fault if match else None) == MESSAGES[message]
