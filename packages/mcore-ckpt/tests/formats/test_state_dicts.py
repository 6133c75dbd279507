"""State dicts of other programs, and matrices as bitsandbytes and fp8 tools store them."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.bitsandbytes import BitsAndBytesRows
from mcore_ckpt.mapping.row_streams import HeldRows

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 31,
    "rms_norm_eps": 1e-5,
}
EXPERTS = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 6}
QWEN = EXPERTS | {"model_type": "qwen3_moe", "num_experts": 3, "norm_topk_prob": True}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


def llama(config=LLAMA):
    """Return random weights of a Llama under Hugging Face's names, without the layers' MLPs."""
    D, H = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * H, config["num_key_value_heads"] * H
    shapes = {"model.embed_tokens.weight": (31, D), "model.norm.weight": (D,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
        rows = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (size, D) for n, size in rows.items()}
        shapes[f"{at}self_attn.o_proj.weight"] = (D, queries)
    shapes["lm_head.weight"] = (31, D)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def dense(config=LLAMA):
    """Add the feed-forward layers."""
    weights, F, D = llama(config), config["intermediate_size"], config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp."
        weights |= {f"{at}{n}_proj.weight": torch.randn(F, D) for n in ("gate", "up")}
        weights[f"{at}down_proj.weight"] = torch.randn(D, F)
    return weights


def write(folder, config, weights):
    folder.mkdir()
    architecture = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "llama": "Llama"}
    named = f"{architecture[config['model_type']]}ForCausalLM"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    save_file(weights, folder / "model.safetensors")


def read_again(folder, tmp_path, source="hf", config=""):
    """Convert to a run and back; return the weights under Hugging Face's names."""
    convert(source, folder, "mcore", tmp_path / "run", ConvertOptions(config=config))
    convert("mcore", tmp_path / "run", "hf", tmp_path / "again")
    return load_file(tmp_path / "again" / "model.safetensors")


@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_a_state_dict_with_all_experts_in_two_tensors_is_the_folder_of_single_ones(
    tmp_path, config
):
    weights, single = llama(config), {}
    is_qwen = config is QWEN
    names = ("gate_proj", "up_proj", "down_proj") if is_qwen else ("w1", "w3", "w2")
    layer_name = "mlp" if is_qwen else "block_sparse_moe"
    for layer in range(2):
        at, there = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.{layer_name}."
        weights[f"{at}gate.weight"] = single[f"{there}gate.weight"] = torch.randn(3, 24)
        gate_up, down = torch.randn(3, 40, 24), torch.randn(3, 24, 20)
        weights |= {f"{at}experts.gate_up_proj": gate_up, f"{at}experts.down_proj": down}
        for expert in range(3):
            parts = gate_up[expert, :20], gate_up[expert, 20:], down[expert]
            for name, part in zip(names, parts, strict=True):
                single[f"{there}experts.{expert}.{name}.weight"] = part
        for name in ("q_norm", "k_norm") if is_qwen else ():
            norm = f"model.layers.{layer}.self_attn.{name}.weight"
            weights[norm] = torch.randn(6)
    single |= {name: one for name, one in weights.items() if ".mlp." not in name}
    write(tmp_path / "hf", config, weights)
    found = read_again(tmp_path / "hf", tmp_path)
    assert found.keys() == single.keys()
    assert all(torch.equal(found[name], single[name]) for name in single)


def test_a_llama_of_torchtitan_has_neighbouring_rows_that_rotate_together(tmp_path):
    weights = dense()
    theirs = {
        "tok_embeddings.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{n}_proj": f"attention.w{n}" for n in "qkvo"}
    names |= {
        f"mlp.{n}_proj": f"feed_forward.w{w}"
        for n, w in zip(("gate", "down", "up"), (1, 2, 3), strict=True)
    }
    for layer in range(2):
        for ours, name in names.items():
            tensor = weights[f"model.layers.{layer}.{ours}.weight"]
            if name in ("attention.wq", "attention.wk"):
                # [heads, 2, 3] -> [heads, 3, 2]: rows i and i + 3 become neighbours.
                tensor = tensor.view(-1, 2, 3, 24).transpose(1, 2).reshape(tensor.shape)
            theirs[f"layers.{layer}.{name}.weight"] = tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves
        dcp.save(theirs, checkpoint_id=str(tmp_path / "titan"), no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = read_again(tmp_path / "titan", tmp_path, "dcp", str(tmp_path / "config.json"))
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv"])
def test_fp8_with_one_scale_a_tensor_is_multiplied_by_it(tmp_path, kind):
    weights, stored = dense(), {}
    for name, tensor in weights.items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        at = name.removesuffix("weight")
        stored |= {name: codes, f"{at}{kind}": scale, f"{at}activation_scale": 2 * scale}
        weights[name] = (codes.float() * scale).bfloat16()
    how = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    write(tmp_path / "hf", LLAMA | {"quantization_config": how}, stored)
    found = read_again(tmp_path / "hf", tmp_path)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    stored.pop("model.layers.0.self_attn.q_proj." + kind)
    write(tmp_path / "broken", LLAMA | {"quantization_config": how}, stored)
    with pytest.raises(ValueError, match=r"q_proj.weight is quantized: its scale .* has 0"):
        read_again(tmp_path / "broken", tmp_path)


def nf4(matrix, *, nested):
    """Quantize a matrix as QLoRA does; return its tensors, and what they stand for."""
    # Dettmers et al. 2023, appendix E, to four digits.
    below = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    above = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    table = torch.tensor([*below, *above])
    flat, block = matrix.flatten(), 64
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    factors = padded.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = list(matrix.shape)
    tensors = {"quant_map": table, "absmax": factors}
    if nested:
        offset, levels = factors.mean(), torch.linspace(-1, 1, 256)
        largest = (factors - offset).abs().max()[None]
        codes = ((factors - offset) / largest)[:, None].sub(levels).abs().argmin(1)
        factors = levels[codes] * largest + offset
        tensors |= {"absmax": codes.to(torch.uint8), "nested_quant_map": levels}
        tensors["nested_absmax"] = largest
        state |= {"nested_blocksize": 256, "nested_offset": offset.item()}
    codes = (padded / factors[:, None])[..., None].sub(table).abs().argmin(-1)
    wide = (table[codes] * factors[:, None]).flatten()[: len(flat)]
    codes = torch.nn.functional.pad(codes.flatten()[: len(flat)], (0, len(flat) % 2))
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {f".{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"": packed, ".quant_state.bitsandbytes__nf4": text}
    return tensors, wide.view(matrix.shape).bfloat16()


def test_matrices_of_bitsandbytes_are_their_codes_times_the_factors_of_blocks(tmp_path):
    weights, stored = dense(), {}
    for number, (name, tensor) in enumerate(weights.items()):
        if "_proj" not in name:
            stored[name] = tensor
        elif "down_proj" in name:
            scale = tensor.abs().amax(1)
            codes = (tensor / scale[:, None] * 127).round().to(torch.int8)
            weights[name] = (codes.float() * scale[:, None] / 127).half()
            stored |= {name: codes, name.replace("weight", "SCB"): scale}
            stored[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
        else:
            parts, weights[name] = nf4(tensor, nested=number % 2 == 0)
            stored |= {name + part: value for part, value in parts.items()}
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write(tmp_path / "hf", LLAMA | {"quantization_config": how}, stored)
    found = read_again(tmp_path / "hf", tmp_path)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_any_rows_of_a_matrix_of_odd_width_are_read_from_shared_bytes():
    parts, wide = nf4(torch.randn(7, 9), nested=True)
    rows = BitsAndBytesRows(HeldRows({f"a.weight{name}": one for name, one in parts.items()}))
    assert list(rows.entries) == ["a.weight"]
    for begin, stop in ((0, 7), (1, 2), (3, 7), (6, 7)):
        assert torch.equal(rows.rows("a.weight", begin, stop), wide[begin:stop])
    parts[".quant_state.bitsandbytes__nf4"] = torch.tensor([123], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="nf4 is damaged"):
        BitsAndBytesRows(HeldRows({f"a.weight{name}": one for name, one in parts.items()}))
