"""megatron-core loads what is written here, and its files come in: bit by bit, on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.storage.index import read_index

pytestmark = pytest.mark.megatron

KINDS = ("dense", "experts", "mixed", "tied", "latent")


def peer(verb, folder, local):
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("megatron_peer.py")),
            verb,
            folder,
            local,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(1000)
def test_megatron_core_and_we_read_each_others_files_bitwise(tmp_path):
    pytest.importorskip("megatron.core")
    peer("save", tmp_path / "theirs", tmp_path / "local")
    for kind in KINDS:
        form = json.loads((tmp_path / "theirs" / kind / "metadata.json").read_text())
        assert form["sharded_backend"] == "torch_dist"
        convert("megatron", tmp_path / "theirs" / kind, "mcore", tmp_path / "ours" / kind)
        checks = {"tied": check_tied, "latent": check_latent}
        checks.get(kind, check_ours)(tmp_path, kind)
        options = ConvertOptions(transformer_impl="local")
        back = tmp_path / "back" / kind
        # The latent one by way of its Hugging Face folder.
        fmt, source = ("hf", "hf") if kind == "latent" else ("mcore", f"ours/{kind}")
        convert(fmt, tmp_path / source, "megatron", back, options)
    peer("load", tmp_path / "back", tmp_path / "local")
    for kind in KINDS:
        for rank in range(2):
            saved = load_file(tmp_path / "local" / f"save_{kind}_{rank}.safetensors")
            loaded = load_file(tmp_path / "local" / f"load_{kind}_{rank}.safetensors")
            assert saved.keys() == loaded.keys()
            for name, tensor in saved.items():
                assert torch.equal(tensor, loaded[name]), (kind, rank, name)


def check_latent(tmp_path, kind):
    """The same weights as a DeepSeek-V3 of transformers give Megatron's own logits."""
    transformers = pytest.importorskip("transformers")
    convert("megatron", tmp_path / "theirs" / kind, "hf", tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, experts_implementation="eager"
    )
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    tokens = torch.arange(2 * 15).view(2, 15) * 7 % 256
    files = (tmp_path / "local" / f"logits_{rank}.safetensors" for rank in range(2))
    theirs = torch.cat([load_file(file)["logits"] for file in files], -1)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, theirs, rtol=2e-5, atol=2e-4)


def check_tied(tmp_path, kind):
    """Compare what only the tied model has: biases, positions, norms of queries."""
    ranks = [load_file(tmp_path / "local" / f"save_{kind}_{r}.safetensors") for r in range(2)]
    step = tmp_path / "ours" / kind / "release"
    there, own = "decoder.layers.1.", "model.blocks.1."
    for name, mine in {
        "embedding.position_embeddings.weight": "model.position_embedding.weight",
        "decoder.final_layernorm.bias": "model.final_norm.bias",
        f"{there}self_attention.q_layernorm.bias": f"{own}attention.q_norm.bias",
        f"{there}self_attention.linear_proj.bias": f"{own}attention.proj.bias",
        f"{there}mlp.linear_fc2.bias": f"{own}mlp.fc2.bias",
    }.items():
        assert torch.equal(read_tensor(step, mine), ranks[0][name]), name
    qkv = torch.cat([rank[f"{there}self_attention.linear_qkv.bias"] for rank in ranks])
    groups = qkv.view(2, 40)
    assert torch.equal(
        read_tensor(step, f"{own}attention.qkv.k.bias"), groups[:, 20:30].ravel()
    )
    for part in ("weight", "bias"):
        fc1 = torch.cat([rank[f"{there}mlp.linear_fc1.{part}"] for rank in ranks])
        assert torch.equal(read_tensor(step, f"{own}mlp.fc1.{part}"), fc1)
    names = read_index(step).tensors
    assert "model.head.weight" not in names
    assert read_index(step).extra["model"]["config"]["qk_layernorm"]


def check_ours(tmp_path, kind):
    """Compare ours with what each of Megatron's ranks held, put together by hand."""
    ranks = [load_file(tmp_path / "local" / f"save_{kind}_{r}.safetensors") for r in range(2)]
    step = tmp_path / "ours" / kind / "release"

    def ours(name):
        return read_tensor(step, f"model.{name}")

    def both(name, dim=0):
        return torch.cat([rank[name] for rank in ranks], dim)

    there = "decoder.layers.2."
    assert torch.equal(ours("embedding.weight"), both("embedding.word_embeddings.weight"))
    assert torch.equal(ours("head.weight"), both("output_layer.weight"))
    # One group a rank: two query heads, a key, a value, of ten rows each.
    groups = both(f"{there}self_attention.linear_qkv.weight").view(2, 40, 24)
    own = "blocks.2.attention."
    assert torch.equal(ours(f"{own}qkv.q.weight"), groups[:, :20].reshape(40, 24))
    assert torch.equal(ours(f"{own}qkv.k.weight"), groups[:, 20:30].reshape(20, 24))
    assert torch.equal(ours(f"{own}qkv.v.weight"), groups[:, 30:].reshape(20, 24))
    assert torch.equal(
        ours(f"{own}proj.weight"), both(f"{there}self_attention.linear_proj.weight", 1)
    )
    where, mine = f"{there}mlp.", "blocks.2.mlp."
    if kind != "dense":
        where, mine = f"{there}mlp.experts.local_experts.3.", "blocks.2.moe.experts.3."
        assert torch.equal(
            ours("blocks.2.moe.router.weight"), ranks[0][f"{there}mlp.router.weight"]
        )
    halves = [rank[f"{where}linear_fc1.weight"].chunk(2) for rank in ranks]
    assert torch.equal(ours(f"{mine}fc1.gate.weight"), torch.cat([h[0] for h in halves]))
    assert torch.equal(ours(f"{mine}fc1.up.weight"), torch.cat([h[1] for h in halves]))
    assert torch.equal(ours(f"{mine}fc2.weight"), both(f"{where}linear_fc2.weight", 1))
    described = read_index(step).extra["model"]
    assert described["vocab_size"] == 256
    assert described["moe"].get("num_experts", 0) == (0 if kind == "dense" else 4)
