"""Layers of multi-token prediction in Hugging Face folders, which transformers leaves alone."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_ckpt.conversion.conversion import convert, hf_to_mcore, mcore_to_hf
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.storage.index import read_index

SIZES = {"hidden_size": 20, "num_hidden_layers": 3, "vocab_size": 37, "intermediate_size": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS = {
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES,
        **EXPERTS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=7,
        kv_lora_rank=6,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=7,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **SIZES,
        **EXPERTS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
    ),
}
THERE = "model.layers.3."
COPY = f"{THERE}embed_tokens.weight"


def release(folder, name):
    """Save a random model with one layer more, as releases have it; return what it holds."""
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}
    file.write_text(json.dumps(config))
    last, width = "model.layers.2.", SIZES["hidden_size"]
    tensors = {
        tensor: torch.randn_like(value)
        for tensor, value in load_file(folder / "model.safetensors").items()
    }
    for tensor in [tensor for tensor in tensors if tensor.startswith(last)]:
        further = THERE + tensor.removeprefix(last)
        tensors[further] = torch.randn_like(tensors[tensor])
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{THERE}{norm}.weight"] = torch.randn(width)
    tensors[f"{THERE}eh_proj.weight"] = torch.randn(width, 2 * width)
    copies = {
        COPY: tensors["model.embed_tokens.weight"].clone(),
        f"{THERE}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file({**tensors, **copies}, folder / "model.safetensors", {"format": "pt"})
    return tensors


def assert_holds(folder, tensors):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_predicting_layer_comes_and_goes_and_copies_of_tables_must_be_some(tmp_path, name):
    tensors = release(tmp_path / "hf", name)
    report = hf_to_mcore(tmp_path / "hf", tmp_path / "run", ConvertOptions(check=True))
    assert report.is_proven
    model = read_index(tmp_path / "run" / "release").extra["model"]
    assert model["config"]["mtp_num_layers"] == 1
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert_holds(tmp_path / "again", tensors)
    unlike = load_file(tmp_path / "hf" / "model.safetensors")
    unlike[COPY] = unlike[COPY] + 1
    save_file(unlike, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{COPY} differs from .* prediction"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "unlike")


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    tensors = release(tmp_path / "hf", "deepseek_v3")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    assert mcore_to_hf(tmp_path / "run", tmp_path / "again").family == "kimi_k2"
    config = assert_holds(tmp_path / "again", tensors)
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    # What transformers has a class for.
    named = ConvertOptions(model_type="deepseek_v3")
    convert("mcore", tmp_path / "run", "hf", tmp_path / "named", named)
    assert assert_holds(tmp_path / "named", tensors)["model_type"] == "deepseek_v3"
