"""Runs go on here where megatron-core stopped, and there where we stopped: the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.storage.index import read_index
from mcore_parallel.mesh import ParallelContext
from mcore_train.batches.micro_batches import train_batches
from mcore_train.composition import compose
from mcore_train.layout_check.rows import Rows
from mcore_train.layout_check.trial import build_run, load_folder, train_one
from mcore_train.resolution import resolve

pytestmark = pytest.mark.megatron

BATCH, STEPS, SAVED = 4, 6, 3
ROWS = Rows(seq_length=16, vocab_size=128, global_batch_size=BATCH, num_steps=STEPS)
TAKEN = {
    "sharded": 2e-4,
    "sharded_fp32": 1e-5,
    "whole": 2e-4,
    "whole_fp32": 1e-5,
    "buckets": 2e-4,
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


def peer(verb, folder, local, name="megatron_optimizer_peer.py"):
    """Run a program; return the losses that it told, by kind."""
    program = str(Path(__file__).with_name(name))
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
    run = load_folder(run, folder)
    assert (run.progress.iteration, run.optimizer.num_steps) == (SAVED, SAVED)
    assert run.progress.consumed_train_samples == run.progress.schedule_samples == SAVED * BATCH
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


NAMED = ("vpp2", "pp2_ep2", "experts_fp32")
"""Kinds whose buckets are not padded: of the others megatron-core displaces what it names."""

PADDED = ("tp2", "ep2")


def read_all(step):
    index = read_index(step)
    return {name: read_tensor(step, name, index=index) for name in index.tensors}


@pytest.mark.timeout(1000)
def test_buckets_of_every_layout_come_in_and_go_back_to_megatron_core_bitwise(tmp_path):
    pytest.importorskip("megatron.core")
    local, there = tmp_path / "local", tmp_path / "theirs"
    local.mkdir()
    program = "megatron_layouts_peer.py"
    peer("save", there, local, program)
    options = ConvertOptions(optimizer=True)
    for kind in NAMED + PADDED:
        ours, named = tmp_path / "ours" / kind, tmp_path / "named" / kind
        convert("megatron", there / kind / "buckets", "mcore", ours, options)
        if kind in NAMED:
            convert("megatron", there / kind / "named", "mcore", named, options)
            one, other = (read_all(folder / "iter_0000002") for folder in (ours, named))
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                assert torch.equal(tensor, other[name]), (kind, name)
        else:
            with pytest.raises(ValueError, match="displaces it"):
                convert("megatron", there / kind / "named", "mcore", named, options)
        apart = "ep2" in kind
        back = ConvertOptions(optimizer=True, transformer_impl="local", experts_apart=apart)
        convert("mcore", ours, "megatron", tmp_path / "back" / kind, back)
    peer("load", tmp_path / "back", local, program)
    for kind in NAMED + PADDED:
        for rank in range(4):
            saved = load_file(local / f"save_{kind}_{rank}.safetensors")
            loaded = load_file(local / f"load_{kind}_{rank}.safetensors")
            assert saved.keys() == loaded.keys()
            for name, tensor in saved.items():
                assert torch.equal(tensor, loaded[name]), (kind, rank, name)
    check_by_hand(tmp_path, local)


def check_by_hand(tmp_path, local):
    """Compare buckets that were padded with what the ranks held, put together by hand."""

    def held(kind, name, ranks):
        files = [load_file(local / f"save_{kind}_{rank}.safetensors") for rank in ranks]
        # Each data rank holds a range of the flat weight, or nothing of it.
        return torch.cat([file[name] for file in files if name in file])

    for word, part in (("param", "main"), ("exp_avg", "exp_avg")):

        def ours(kind, name, part=part):
            return read_tensor(
                tmp_path / "ours" / kind / "iter_0000002", f"optimizer.{part}.{name}"
            )

        for rank in range(2):
            there = f"0.decoder.layers.0.{{}}.weight.{word}".format
            mine = (rank, rank + 2)
            fc2 = ours("tp2", "blocks.0.mlp.fc2.weight").chunk(2, 1)[rank]
            assert torch.equal(held("tp2", there("mlp.linear_fc2"), mine), fc2.reshape(-1))
            halves = [ours("tp2", f"blocks.0.mlp.fc1.{p}.weight") for p in ("gate", "up")]
            fc1 = torch.cat([half.chunk(2)[rank] for half in halves])
            assert torch.equal(held("tp2", there("mlp.linear_fc1"), mine), fc1.reshape(-1))
            words = held("tp2", f"0.embedding.word_embeddings.weight.{word}", mine)
            own = ours("tp2", "embedding.weight").chunk(2)[rank]
            assert torch.equal(words, own.reshape(-1))
            second = there("mlp.experts.local_experts.1.linear_fc2")
            expert = ours("ep2", f"blocks.0.moe.experts.{2 * rank + 1}.fc2.weight")
            assert torch.equal(held("ep2", second, mine), expert.reshape(-1))
        router = ours("ep2", "blocks.1.moe.router.weight").reshape(-1)
        name = f"0.decoder.layers.1.mlp.router.weight.{word}"
        assert torch.equal(held("ep2", name, range(4)), router)
