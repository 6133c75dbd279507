"""Two runs of one command with ``--deterministic-mode`` write the same bits, on GPUs too."""

import json
import shlex
import subprocess
import sys

import pytest
import torch

from mcore_parallel.launch import launcher
from mcore_train.composition import compose
from mcore_train.resolution import ConflictError, resolve

COMMON = (
    "--mock-data --vocab-size 1000 --num-workers 0 --lr 1e-3 --bf16 --log-interval 1 "
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --num-query-groups 2 "
    "--seq-length 512 --global-batch-size 4 --train-iters 4 --deterministic-mode"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2"


def test_workspaces_that_are_not_deterministic_are_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with (
        pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 is not deterministic"),
        launcher.deterministic_algorithms(),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_that_adds_in_any_order_is_refused():
    flags = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    flags |= {"mock_data": True, "lr": 1e-3, "train_iters": 1, "deterministic_mode": True}
    with pytest.raises(ConflictError, match="--attention-backend fused"):
        resolve(compose(flags | {"attention_backend": "fused"}), 1)
    assert resolve(compose(flags | {"attention_backend": "flash"}), 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--recompute-granularity full --window-size 100 0",
        EXPERTS,
        "--nproc 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel",
        f"--nproc 2 {EXPERTS} --expert-model-parallel-size 2",
    ],
)
def test_two_runs_write_the_same_losses_norms_weights_and_moments(tmp_path, flags):
    if "--nproc 2" in flags and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    written = []
    for name in ("first", "second"):
        folder = tmp_path / name
        words = shlex.split(f"{COMMON} {flags} --save {folder}")
        subprocess.run([sys.executable, "-m", "mcore_train", "gpt", *words], check=True)
        lines = [json.loads(s) for s in (folder / "metrics.jsonl").read_text().splitlines()]
        numbers = [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]
        assert len(numbers) == 4
        files = [f.read_bytes() for f in sorted(folder.glob("iter_*/*.safetensors"))]
        assert files
        written.append((numbers, files))
    assert written[0] == written[1]
