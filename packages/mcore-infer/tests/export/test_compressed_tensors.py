"""Quantized folders in both Hugging Face forms, read back by readers that know the formats."""

import json
import shlex

import pytest
import torch
from docs.blocks import ROOT, blocks_of
from readers.compressed import read
from readers.unified import quantize
from safetensors.torch import load_file

from mcore_infer.cli import main
from mcore_infer.export.exporting import export_model
from mcore_infer.generation import next_logits
from mcore_infer.loading import load_model
from mcore_infer.quantization.loading import linears
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.gemm import PLAIN_GEMM

transformers = pytest.importorskip("transformers")

ALGOS = {
    "FP8": "float-quantized",
    "FP8_PER_CHANNEL_PER_TOKEN": "float-quantized",
    "FP8_BLOCK_SCALES": "float-quantized",
    "W8A16": "pack-quantized",
    "W8A8_SQ_PER_CHANNEL": "int-quantized",
    "W4A16_AWQ": "pack-quantized",
    "W4A16_GPTQ": "pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
}
ROUNDS_INPUTS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL")
LEFT = ("model.layers.1.mlp.down_proj",)
TOKENS = torch.tensor([[5, 6, 7, 30, 12, 0, 36, 3]])


def small(folder, num_kv_heads, kind="Llama"):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=37,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=64,
        head_dim=8,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small(folder, 4)
    return folder


def logits_with(folder, weights):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict({n: w.float() for n, w in weights.items()}, strict=True)
    with torch.no_grad():
        return model(TOKENS).logits


SCALED = [
    ("W4A16_AWQ", "Qwen2"),  # folded into values, which have biases
    ("W8A8_SQ_PER_CHANNEL", "Gemma"),  # into gains that are stored less one
]


@pytest.mark.parametrize(
    ("algo", "kind"), [(a, "") for a in ALGOS if a not in dict(SCALED)] + SCALED
)
def test_a_folder_of_compressed_tensors_stands_for_the_same_model(folder, tmp_path, algo, kind):
    """Matrices are the same ones; where inputs had scales, which are folded, the logits are."""
    scaled = bool(kind)
    if scaled:
        folder = tmp_path / "plain"
        small(folder, 4, kind)
    wide = quantize(folder, tmp_path / "q", algo, leave=LEFT, kv=not scaled)
    report = export_model(
        tmp_path / "q", tmp_path / "out", format="compressed-tensors", max_shard_bytes=20_000
    )
    assert report.word == ALGOS[algo]
    config, found, inputs = read(tmp_path / "out")
    assert config["quantization_config"]["ignore"] == ["lm_head", *LEFT]
    assert found.keys() == wide.keys()
    if not scaled:
        assert "model.layers.0.self_attn.k_scale" in inputs
        for name, weight in wide.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=0)
    expected = logits_with(folder, wide)
    torch.testing.assert_close(logits_with(folder, found), expected, rtol=1e-4, atol=1e-4)
    # Inputs are rounded as in the unified folder.
    source, ours = (
        load_model(tmp_path / name, ParallelContext.single(), dtype=torch.float32).model
        for name in ("q", "out")
    )
    rounded = next_logits(ours, TOKENS)
    if not scaled:
        torch.testing.assert_close(rounded, next_logits(source, TOKENS), rtol=1e-4, atol=1e-4)
    for linear in linears(ours).values():
        linear.gemm = PLAIN_GEMM
    plain = next_logits(ours, TOKENS)
    torch.testing.assert_close(plain, expected[:, -1], rtol=1e-4, atol=1e-4)
    assert (algo in ROUNDS_INPUTS) != torch.equal(rounded, plain)


@pytest.mark.parametrize("algo", ["FP8", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "NVFP4"])
def test_a_unified_folder_is_written_again_byte_for_byte(folder, tmp_path, algo):
    quantize(folder, tmp_path / "q", algo, leave=LEFT, kv=True)
    report = export_model(
        tmp_path / "q", tmp_path / "out", format="hf-quant", max_shard_bytes=20_000
    )
    assert report.word == algo
    before = load_file(tmp_path / "q" / "model.safetensors")
    after = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        after |= load_file(file)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].shape == tensor.shape
        same = [one.reshape(-1).view(torch.uint8) for one in (after[name], tensor)]
        assert torch.equal(*same), name
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["quant_algo"] == config["quantization_config"]["quant_algo"] == algo
    assert said["exclude_modules"] == config["quantization_config"]["ignore"]
    assert said["kv_cache_quant_algo"] == "FP8"
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    source, written = (
        load_model(tmp_path / name, ParallelContext.single(), dtype=torch.float32).model
        for name in ("q", "out")
    )
    assert torch.equal(next_logits(source, TOKENS), next_logits(written, TOKENS))


def test_what_the_forms_cannot_say_is_refused(folder, tmp_path):
    small(tmp_path / "grouped", 2)
    quantize(tmp_path / "grouped", tmp_path / "q", "W4A16_AWQ")
    for source, form, options, message in (
        (folder, "hf-quant", {}, "needs weights that"),
        (folder, "compressed-tensors", {}, "needs weights that"),
        (tmp_path / "q", "compressed-tensors", {}, "query heads of one value head have"),
        (tmp_path / "q", "hf-quant", {"tensor_parallel_size": 2}, "leave out"),
        (tmp_path / "q", "hf-quant", {"dtype": "bf16"}, "leave out"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model(source, tmp_path / "out", format=form, **options)
        assert not (tmp_path / "out").exists()


def test_the_commands_of_the_page_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quantize(folder, tmp_path / "tiny-fp8", "FP8")
    here = "test_compressed_tensors.py::test_the_commands_of_the_page_run"
    page = blocks_of((ROOT / "docs/deployment.md").read_text(), "docs/deployment.md")
    (block,) = (one for one in page if one.run_by.endswith(here))
    for line in block.code.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "tiny-ct" / "config.json").is_file()
