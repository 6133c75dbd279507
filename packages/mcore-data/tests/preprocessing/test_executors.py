"""Executors and other engines write, over kills, what one machine writes."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mcore_data.cli import main
from mcore_data.config import LaunchConfig, PreprocessConfig, TokenizerConfig
from mcore_data.indexed.inspection import find_pairs
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing.executors import array_sizes, run_local, run_ray, run_slurm
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.record_streams import DatatroveWriter, ray_data_sink
from mcore_data.preprocessing.work_plan import make_plan, merge_plan, read_plan, status_of

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    rows = ({"text": f"Number {i} is here. " * (i % 50 + 1), "id": i} for i in range(4000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(text, prefix):
    return PreprocessConfig(
        input=(str(text),), output_prefix=str(prefix), append_eod=True, keep_keys=("id",)
    )


@pytest.fixture(scope="module")
def whole(text):
    prefix = text.with_name("whole")
    preprocess(config_of(text, prefix), BYTES)
    return content(f"{prefix}_text_document")


def content(prefix):
    """Tokens, index and kept values as bytes."""
    tokens = b"".join(part.tobytes() for part in IndexedDataset(prefix).chunks())
    return tokens, *(Path(f"{prefix}.{kind}").read_bytes() for kind in ("idx", "kept"))


def kept_ids(prefix):
    lines = Path(f"{prefix}.kept").read_text().splitlines()
    return [int(json.loads(line)[0]) for line in lines]


def workers_of(plan):
    """Process numbers of the workers of a plan."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(plan.path).encode() in words and b"preprocess" in words:
                found.append(int(process.name))
    return found


def kill_some(plan, count, seed):
    """Kill workers of a plan at random times in a thread, until ``count`` are dead."""

    def work():
        draw, killed, deadline = random.Random(seed), 0, time.monotonic() + 60
        while killed < count and time.monotonic() < deadline:
            time.sleep(draw.uniform(0.05, 0.3))
            for worker in workers_of(plan)[:1]:
                os.kill(worker, signal.SIGKILL)
                killed += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_killed_processes_are_replaced_and_write_what_one_machine_writes(
    tmp_path, text, whole, capsys
):
    plan = make_plan(config_of(text, tmp_path / "c"), BYTES, 300_000)
    killer = kill_some(plan, 1, seed=1)
    words = ("--plan", str(plan.path), "--num-tasks", "2")
    assert main(["launch", *words]) == 0
    killer.join()
    assert f"done: {len(plan.units)}\n" in capsys.readouterr().out
    merge_plan(plan)
    assert content(tmp_path / "c_text_document") == whole


def test_workers_that_die_again_and_again_are_an_error(tmp_path, text, monkeypatch):
    plan = make_plan(config_of(text, tmp_path / "c"), BYTES, 300_000)
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(RuntimeError, match=r"code -9, after 1 others had been replaced"):
        run_local(plan, LaunchConfig(max_retries=1))


SBATCH = """#!{python}
import subprocess, sys
open("{folder}/submitted", "a").write(" ".join(sys.argv[1:-1]) + "\\n")
size = int(sys.argv[2].rpartition("-")[2]) + 1
jobs = len(open("{folder}/submitted").readlines())
# The first job's tasks die before they begin.
for _ in range(size > 1 and jobs > 1):
    subprocess.run(["bash", sys.argv[-1]], check=False, stdout=subprocess.DEVNULL)
print(jobs)
"""


@pytest.fixture
def slurm_commands(tmp_path, monkeypatch):
    """Programs in place of Slurm's, which run one task of an array."""
    folder = tmp_path / "programs"
    folder.mkdir()
    programs = {
        "sbatch": SBATCH.format(python=sys.executable, folder=folder),
        "squeue": "#!/bin/sh\n",
    }
    for name, program in programs.items():
        (folder / name).write_text(program)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_slurm_jobs_are_submitted_again_for_missing_units(
    tmp_path, text, whole, slurm_commands
):
    plan = make_plan(config_of(text, tmp_path / "c"), BYTES, 1_000_000)
    assert len(plan.units) == 3
    options = {"executor": "slurm", "num_tasks": 50, "slurm_options": ("partition=all",)}
    printed = run_slurm(plan, LaunchConfig(**options))
    script = plan.folder / "worker.sbatch"
    assert printed == [f"sbatch --parsable --array=0-2 {script}"]
    assert "#SBATCH --partition=all\n" in script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert array_sizes(plan, LaunchConfig(**options, max_array=2)) == [2, 1]
    for unit in plan.units:  # of a host that may be dead
        unit.lock_path.write_text(json.dumps({"token": "x", "host": "far", "namespace": "y"}))
    assert array_sizes(plan, LaunchConfig(**options)) == [1]
    assert array_sizes(plan, LaunchConfig(**options), none_runs=True) == [3]
    for unit in plan.units:
        unit.lock_path.unlink()
    with pytest.raises(RuntimeError, match=r"units are missing after all jobs ended"):
        run_slurm(plan, LaunchConfig(**options, submit_jobs=True, wait=True, max_retries=0))
    (slurm_commands / "submitted").unlink()
    jobs = run_slurm(plan, LaunchConfig(**options, submit_jobs=True, wait=True, max_retries=1))
    assert jobs == ["1", "2"]
    assert array_sizes(plan, LaunchConfig(**options)) == []
    merge_plan(plan)
    assert content(tmp_path / "c_text_document") == whole


@pytest.mark.slow
def test_a_datatrove_pipeline_writes_parts_that_merge(tmp_path, text, whole):
    pytest.importorskip("datatrove")
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    inputs = tmp_path / "in"
    inputs.mkdir()
    lines = text.read_text().splitlines(keepends=True)
    for number in range(4):
        part = lines[number * 1000 : (number + 1) * 1000]
        (inputs / f"{number}.jsonl").write_text("".join(part))
    step = DatatroveWriter(config_of(text, tmp_path / "out" / "c"), BYTES)
    steps = [JsonlReader(str(inputs)), LambdaFilter(lambda one: "77" not in one.text), step]
    LocalPipelineExecutor(steps, tasks=4, workers=1, logging_dir=str(tmp_path / "log")).run()
    merged = merge_pairs(find_pairs(tmp_path / "out"), tmp_path / "merged")
    kept = kept_ids(merged.prefix)
    expected = [i for i in range(4000) if "77" not in str(i)]
    assert kept == expected
    of_one_machine = IndexedDataset(text.with_name("whole_text_document"))
    for number in (0, 500, len(expected) - 1):
        assert merged[number].tolist() == of_one_machine[expected[number]].tolist()


@pytest.fixture
def ray_cluster(monkeypatch):
    """A local Ray with two workers, over loopback."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_enable_metrics_collection", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_ray_tasks_and_a_ray_data_sink_write_what_one_machine_writes(
    tmp_path, text, whole, ray_cluster
):
    plan = make_plan(config_of(text, tmp_path / "c"), BYTES, 300_000)
    run_ray(plan, LaunchConfig(executor="ray", num_tasks=2))
    merge_plan(read_plan(plan.path))
    assert len(status_of(plan).done) == len(plan.units)
    assert content(tmp_path / "c_text_document") == whole
    data = ray_cluster.data.read_json(str(text), override_num_blocks=3)
    data.write_datasink(ray_data_sink(config_of(text, tmp_path / "r"), BYTES))
    # Ray Data keeps no order by default, so documents are compared by their ids.
    found = IndexedDataset(tmp_path / "r_text_document")
    kept = kept_ids(found.prefix)
    assert sorted(kept) == list(range(4000))
    of_one_machine = IndexedDataset(text.with_name("whole_text_document"))
    for number in range(0, 4000, 31):
        assert found[number].tolist() == of_one_machine[kept[number]].tolist()
