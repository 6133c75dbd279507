"""From a checkpoint to folders of other engines, by commands: what their readers get."""

import json

import pytest
import torch
from readers import compressed, trtllm, unified
from safetensors.torch import save_file

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.cli import main
from mcore_infer.loading import load_model
from mcore_infer.quantization.loading import linears
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.gemm import PLAIN_GEMM

TOKENS = torch.tensor([list(b"and the word was")])
METHODS = {
    "fp8": ["--kv-cache-dtype", "fp8"],
    "awq": ["--group-size", "8"],
    "mixed": ["--group-size", "16", "--budget", "7", "--kv-cache-dtype", "fp8"],
}


def logits_of(folder):
    """Score with the weights that a folder holds, of whose inputs none is rounded."""
    model = load_model(folder, ParallelContext.single(), dtype=torch.float32).model
    for linear in linears(model).values():
        linear.gemm = PLAIN_GEMM
    with torch.no_grad():
        return model.logits(model(TOKENS)[0])[:, 0, :257]


def plain_folder(folder, like, wide):
    """Write weights as a folder that is not quantized."""
    folder.mkdir()
    config = json.loads((like / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.float().contiguous() for name, tensor in wide.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_readers_of_every_format_get_the_quantized_model(
    ungrouped_folder, tmp_path, method, capsys
):
    (tmp_path / "text.txt").write_text("In the beginning was the word, and the word. " * 9)
    words = ["--load", str(ungrouped_folder), "--output", str(tmp_path / "q")]
    words += ["--calibration-data", str(tmp_path / "text.txt"), "--method", method]
    assert main(["quantize", *words, *METHODS[method]]) == 0
    want, source = logits_of(tmp_path / "q"), logits_of(ungrouped_folder)
    assert 1e-4 < (want - source).norm() / source.norm() < 0.3
    for form in ("trtllm", "hf-quant", "compressed-tensors"):
        words = ["--load", str(tmp_path / "q"), "--output", str(tmp_path / form)]
        ranks = "1" if method == "mixed" else "2"  # its groups are too wide to be cut
        more = ["--dtype", "fp32", "--tensor-parallel-size", ranks] if form == "trtllm" else []
        if method == "mixed" and form == "compressed-tensors":
            assert main(["export", *words, "--format", form, *more]) == 2
            assert "MIXED_PRECISION" in capsys.readouterr().err
            continue
        assert main(["export", *words, "--format", form, *more]) == 0
        if form == "trtllm":
            back = trtllm.to_hugging_face(tmp_path / form, tmp_path / f"{form}-back")
        else:
            read = unified.read if form == "hf-quant" else compressed.read
            said, wide, *_ = read(tmp_path / form)
            back = plain_folder(tmp_path / f"{form}-back", tmp_path / form, wide)
        torch.testing.assert_close(logits_of(back), want, rtol=1e-4, atol=1e-4)
    receipt = json.loads((tmp_path / "q" / "receipt.json").read_text())
    assert receipt["kv_cache"] == ("" if method == "awq" else "fp8")
    if method == "mixed":
        assert_within_budget(said, wide, 7)
        ways = {matrix["algo"] for matrix in receipt["matrices"]}
        assert ways == {"FP8", "W4A16_AWQ"}


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 257}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 32, "n_shared_experts": 1}
FAMILIES = {
    # Scales go into values with biases, which two query heads share.
    "Qwen2": (SIZES, ["awq", "--group-size", "8"]),
    "DeepseekV3": (SIZES | LATENT, ["fp8"]),
    # Folds scales into gains that are stored less one.
    "Gemma": (SIZES | {"head_dim": 8, "num_key_value_heads": 4}, ["awq", "--group-size", "8"]),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_computes_what_our_quantized_model_does(kind, tmp_path):
    """With what readers of both Hugging Face forms find: biases, experts, latent keys."""
    transformers = pytest.importorskip("transformers")
    sizes, method = FAMILIES[kind]
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.15 * torch.randn(weight.shape) + 1.0 * ("norm" in name))
    model.save_pretrained(tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "bytes")
    (tmp_path / "text.txt").write_text("In the beginning was the word, and the word. " * 9)
    words = ["--load", str(tmp_path / "hf"), "--tokenizer", str(tmp_path / "bytes")]
    words += ["--calibration-data", str(tmp_path / "text.txt"), "--method", *method]
    assert main(["quantize", *words, "--output", str(tmp_path / "q")]) == 0
    for form in ("hf-quant", "compressed-tensors"):
        words = ["--load", str(tmp_path / "q"), "--output", str(tmp_path / form)]
        assert main(["export", *words, "--format", form]) == 0
    want, source = logits_of(tmp_path / "q"), logits_of(tmp_path / "hf")
    assert (want - source).norm() / source.norm() < 0.3
    for form, read in (("hf-quant", unified.read), ("compressed-tensors", compressed.read)):
        _, wide, *_ = read(tmp_path / form)
        back = plain_folder(tmp_path / f"{form}-back", tmp_path / form, wide)
        found, said = transformers.AutoModelForCausalLM.from_pretrained(
            back, dtype="float32", output_loading_info=True
        )
        assert not any(said.values()), said
        with torch.no_grad():
            got = found.eval()(TOKENS).logits[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def assert_within_budget(said, wide, budget):
    """Four bits and eight are taken, and on average the budget at most."""
    bits = {"FP8": 8.0, "W4A16_AWQ": 4 + 32 / 16, None: 16.0}
    layers, taken, num = said["quantized_layers"], [], 0
    for name, weight in wide.items():
        if name.endswith("_proj.weight"):
            how = layers.get(name.removesuffix(".weight"), {}).get("quant_algo")
            taken += [how] * weight.numel()
            num += weight.numel()
    assert {"FP8", "W4A16_AWQ"} <= set(taken)
    assert 0.8 * budget < sum(bits[how] for how in taken) / num <= budget
