"""Runs go on here where megatron-core stopped, and there where we stopped: the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_parallel.mesh import ParallelContext
from mcore_train.batches import train_batches
from mcore_train.composition import compose
from mcore_train.layout_check.trial import Rows, build_run, load_folder, train_one
from mcore_train.resolution import resolve

pytestmark = pytest.mark.megatron

BATCH, STEPS, SAVED = 4, 6, 3
ROWS = Rows(seq_length=16, vocab_size=128, global_batch_size=BATCH, num_steps=STEPS)
TAKEN = {
    "sharded": 2e-4,
    "sharded_fp32": 1e-5,
    "whole": 2e-4,
    "whole_fp32": 1e-5,
}
"""Kinds of the peer's and how far our losses may be from theirs: the rounding of logits of 8
bits, and conventions.md's for float32."""

WRITTEN = ("sharded", "sharded_fp32")
FLAGS = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 14,
    "max_position_embeddings": 16,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 16,
    "vocab_size": 128,
    "micro_batch_size": BATCH,
    "global_batch_size": BATCH,
    "train_iters": STEPS,
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_iters": 1,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "mock_data": True,
    "num_workers": 0,
}


def peer(verb, folder, local):
    """Run a program; return the losses that it told, by kind."""
    program = str(Path(__file__).with_name("megatron_optimizer_peer.py"))
    done = subprocess.run(
        [sys.executable, program, verb, folder, local],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = sorted(local.glob(f"{verb}_*.json"))
    return {path.stem.removeprefix(f"{verb}_"): json.loads(path.read_text()) for path in told}


def continued(folder, dtype):
    """Train on from a checkpoint, with other weights before, and save nothing."""
    plan = resolve(compose(FLAGS), 1)
    run = build_run(plan, ParallelContext.single(), ROWS, dtype=dtype)
    load_folder(run, folder)
    assert (run.iteration, run.optimizer.num_steps) == (SAVED, SAVED)
    assert run.consumed_train_samples == run.schedule_samples == SAVED * BATCH
    batches = train_batches(run)
    return [train_one(run, next(batches)) for _ in range(STEPS - SAVED)]


@pytest.mark.timeout(1000)
def test_a_run_goes_on_with_its_optimizer_from_megatron_core_and_back_there(tmp_path):
    pytest.importorskip("megatron.core")
    local = tmp_path / "local"
    local.mkdir()
    names = ("tokens", "labels", "loss_mask")
    rows = [ROWS[i] for i in range(len(ROWS))]
    arrays = {name: np.stack([row[name] for row in rows]) for name in names}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_file(tensors, local / "rows.safetensors")
    theirs = peer("save", tmp_path / "theirs", local)
    with_state = ConvertOptions(optimizer=True)
    back = ConvertOptions(optimizer=True, transformer_impl="local")
    for kind, tolerance in TAKEN.items():
        ours = tmp_path / "ours" / kind
        report = convert("megatron", tmp_path / "theirs" / kind, "mcore", ours, with_state)
        assert report.is_proven
        assert report.left_behind == 0
        dtype = torch.float32 if kind.endswith("fp32") else torch.bfloat16
        found = continued(ours, dtype)
        assert found == pytest.approx(theirs[kind][SAVED:], rel=tolerance), kind
        if kind in WRITTEN:
            convert("mcore", ours, "megatron", tmp_path / "back" / kind, back)
    again = peer("load", tmp_path / "back", local)
    assert {kind: theirs[kind][SAVED:] for kind in WRITTEN} == again
