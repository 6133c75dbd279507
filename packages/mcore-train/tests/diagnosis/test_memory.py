"""Memory by tensor classes: in torch's snapshots, and in the record of a run out of memory."""

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from warm_ranks import run_command

from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.diagnosis.memory import (
    class_of_frames,
    places_file,
    places_of,
    planned_bytes,
    rank_path,
    read_snapshot,
)
from mcore_train.diagnosis.memory_remedies import RECORD, phase_of
from mcore_train.diagnosis.triage import triage
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
}


def build(device="cpu", **changes):
    """Build a run on one rank."""
    config = compose({**TINY, **changes})
    plan = resolve(config, 1)
    return assemble(plan, ParallelContext.build(config.parallelism, torch.device(device)))


def frame(file, name="forward", line=7):
    """Return one line of a stack as torch records it."""
    return {"filename": f"/venv/lib/{file}", "name": name, "line": line}


def block(size, *frames, state="active_allocated"):
    """Return one block of a segment."""
    return {"size": size, "requested_size": size, "state": state, "frames": list(frames)}


SNAPSHOT = {
    "segments": [
        {
            "address": 4096,
            "total_size": 1000,
            "blocks": [
                block(100),  # a weight by its address
                block(
                    300, frame("torch/nn/functional.py"), frame("mcore_models/layers/mlp.py")
                ),
                block(200, frame("mcore_models/layers/attention.py")),
                block(150, state="inactive"),
                block(250, state="inactive"),
            ],
        },
        {
            "address": 65536,
            "total_size": 60,
            "blocks": [
                block(40, frame("mcore_parallel/collectives.py"), frame("mcore_train/step.py")),
                block(20, frame("mcore_parallel/optimizers/adamw.py")),
            ],
        },
    ],
    "device_traces": [],
}
PLACES = {"places": {"weights": [[4096, 100]]}, "planned": {"weights": 90, "optimizer": 25}}


def written(folder):
    """Write a snapshot and the places of its run; return its file."""
    path = rank_path(str(folder / "snapshot.pickle"), 3)
    path.write_bytes(pickle.dumps(SNAPSHOT))
    places_file(path).write_text(json.dumps(PLACES))
    return path


def test_blocks_are_sorted_by_address_and_by_line(tmp_path):
    path = written(tmp_path)
    assert path.name == "snapshot.rank3.pickle"
    table = read_snapshot(path)
    assert table.classes == {
        "weights": 100,
        "activations": 500,
        "buffers": 40,
        "optimizer": 20,
    }
    assert table.modules == {"mlp": 300, "attention": 200}
    assert (table.free, table.largest_free) == (400, 250)
    assert table.largest[0] == (
        300,
        "activations: /venv/lib/mcore_models/layers/mlp.py:7 (forward)",
    )


def test_the_command_prints_classes_beside_the_plan(tmp_path):
    page = (Path(__file__).parents[4] / "docs/troubleshooting.md").read_text()
    path = written(tmp_path)
    command = "mcore-train memory snapshot.rank3.pickle"
    assert f"test_the_command_prints_classes_beside_the_plan -->\n```bash\n{command}\n" in page
    done = run_command("mcore_train", *command.split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:6]] == [
        "class",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
    ]
    told = json.loads(run_command("mcore_train", "memory", str(path), "--json").stdout)
    assert told["classes"]["activations"] == 500
    assert told["planned"] == PLACES["planned"]


def test_what_is_no_snapshot_is_refused(tmp_path):
    (tmp_path / "other.pickle").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="is not a snapshot"):
        read_snapshot(tmp_path / "other.pickle")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_snapshot(tmp_path / "none.pickle")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["/x/mcore_parallel/data_parallel/buckets.py:3 (f)"], "gradients"),
        (["/x/mcore_moe/dispatch/dispatching.py:3 (f)"], "buffers"),
        (["/x/torch/utils/cublas.py:3 (f)", "/x/mcore_models/gpt.py:1 (f)"], "workspace"),
        (["/x/other/library.py:3 (f)"], "other"),
        ([], "unrecorded"),
    ],
)
def test_a_block_has_the_class_of_the_lines_that_allocated_it(lines, name):
    assert class_of_frames(lines) == name


def test_weights_gradients_and_optimizer_are_those_of_the_plan():
    run = build(hidden_size=64)
    train(run, Reporter(None))
    found = {n: sum(size for _, size in p) for n, p in places_of(run)["places"].items()}
    planned = planned_bytes(run.plan)
    for name in ("weights", "gradients", "optimizer"):
        # Buckets are padded.
        assert found[name] == pytest.approx(planned[name], rel=0.02), name


def test_a_run_out_of_memory_logs_a_record_that_triage_reads(tmp_path, caplog, monkeypatch):
    run = build()
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."

    def forward(*_):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(run.chunks[0], "run_stage", forward)
    with caplog.at_level(logging.ERROR), pytest.raises(torch.OutOfMemoryError):
        train(run, Reporter(None))
    record = next(line for line in caplog.messages if line.startswith(RECORD))
    log = f"{record}\n[rank0]: torch.OutOfMemoryError: {message}\n"
    (tmp_path / "rank_0.err").write_text(log)
    memory = triage(tmp_path).memory
    assert (memory.phase, memory.step, memory.micro_batch_size) == ("forward", 1, 2)
    assert (memory.requested_gib, memory.layout["tensor"]) == (2.0, 1)
    assert set(memory.classes_gib) == {"weights", "gradients", "optimizer"}


@pytest.mark.parametrize(
    ("function", "phase"),
    [("cross_entropy", "loss"), ("save", "save"), ("run_backward", "backward"), ("f", "")],
)
def test_the_phase_is_that_of_the_functions_on_the_stack(function, phase):
    assert phase_of(f'  File "x.py", line 3, in {function}\n    y()\n') == phase


def test_a_history_is_refused_on_a_cpu():
    with pytest.raises(ValueError, match="--record-memory-history records GPU memory"):
        train(build(record_memory_history=True), Reporter(None))


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_has_the_bytes_of_the_run(tmp_path):
    path = tmp_path / "snapshot.pickle"
    history = {"record_memory_history": True, "memory_snapshot_path": str(path)}
    sizes = {"hidden_size": 512, "seq_length": 512, "memory_snapshot_step": 2}
    run = build("cuda", **history, **sizes)
    train(run, Reporter(None))
    table = read_snapshot(rank_path(str(path), 0))
    for name in ("weights", "gradients", "optimizer"):
        assert table.classes[name] == pytest.approx(table.planned[name], rel=0.02), name
    # Earlier tests of this process may have left blocks, which no line of this history names.
    recorded = sum(table.classes.values()) - table.classes["unrecorded"]
    assert table.classes["other"] < 0.05 * recorded, table.page()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"exp_avg_dtype": "bf16"},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "sgd_momentum": 0.0},
        {"optimizer": "lion"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_moment2_method": "adamuon"},
        {"optimizer": "muon", "muon_moment2_method": "normuon", "num_experts": 2},
        {"optimizer": "soap", "soap_max_dim": 16},
        {"optimizer": "soap", "num_query_groups": 1},
    ],
)
def test_the_state_of_every_optimizer_has_the_planned_bytes(changes, bf16):
    run = build(bf16=bf16, **changes)
    pieces = [p.data for s in run.optimizer.named_shards().values() for p in s.pieces]
    planned = planned_bytes(run.plan)["optimizer"]
    assert sum(piece.nbytes for piece in pieces) == planned
    storages = [piece.untyped_storage() for piece in pieces]
    allocated = {storage.data_ptr(): storage.nbytes() for storage in storages}
    # Ranges of weights are padded to 256 bytes.
    assert planned <= sum(allocated.values()) <= 1.1 * planned
