"""Reads folders of compressed-tensors, from the format's own description.

Shares no code with the packages. Each tensor is claimed once: by the config, or by being no
linear's.
"""

import json

import torch
from safetensors.torch import load_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read(folder):
    """Return the config, what the weights stand for, and scales of activations by name."""
    config = json.loads((folder / "config.json").read_text())
    how = config["quantization_config"]
    assert how["quant_method"] == "compressed-tensors"
    assert how["quantization_status"] == "compressed"
    (group,) = how["config_groups"].values()
    assert group["targets"] == ["Linear"]
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    wide, inputs = {}, {}
    modules = {n.rpartition(".")[0] for n in tensors if n.endswith(".weight_scale")}
    for module in sorted(modules):
        assert module not in how["ignore"]
        mine = {n: tensors.pop(f"{module}.{n}") for n in _names(tensors, module)}
        wide[f"{module}.weight"] = _wide(mine, group["weights"], how["format"])
        if group["input_activations"] and not group["input_activations"]["dynamic"]:
            inputs[module] = mine.pop("input_scale").item()
        if group["input_activations"] and group["input_activations"]["dynamic"] == "local":
            inputs[module] = 1 / mine.pop("input_global_scale").item()
        if "bias" in mine:
            wide[f"{module}.bias"] = mine.pop("bias")
        assert not mine, (module, sorted(mine))
    cache = {n for n in tensors if n.endswith((".k_scale", ".v_scale"))}
    assert bool(cache) == (how["kv_cache_scheme"] is not None)
    inputs |= {n: tensors.pop(n).item() for n in cache}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and "embed" not in name:
            assert module in how["ignore"], name
        wide[name] = tensor
    return config, wide, inputs


def _names(tensors, module):
    return [n.removeprefix(f"{module}.") for n in tensors if n.rpartition(".")[0] == module]


def _wide(mine, weights, form):
    strategy, bits = weights["strategy"], weights["num_bits"]
    if form == "nvfp4-pack-quantized":
        packed = mine.pop("weight_packed")
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        real = torch.where(codes > 7, -1.0, 1.0) * E2M1[codes % 8]
        scale = mine.pop("weight_scale").float() / mine.pop("weight_global_scale")
        return real * scale.repeat_interleave(weights["group_size"], 1)
    scale = mine.pop("weight_scale").float()
    if form == "mxfp4-pack-quantized":
        packed = mine.pop("weight_packed")
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        real = torch.where(codes > 7, -1.0, 1.0) * E2M1[codes % 8]
        return real * 2 ** (scale - 127).repeat_interleave(weights["group_size"], 1)
    if form == "pack-quantized":
        rows, columns = mine.pop("weight_shape").tolist()
        words = mine.pop("weight_packed")
        assert words.dtype == torch.int32
        places = bits * torch.arange(32 // bits, dtype=torch.int32)
        codes = (words[..., None] >> places) & (2**bits - 1)
        codes = codes.flatten(1)[:, :columns] - 2 ** (bits - 1)
        assert len(codes) == rows
    else:
        codes = mine.pop("weight")
        expected = {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}
        assert codes.dtype == expected[form]
    codes = codes.float()
    if strategy == "group":
        scale = scale.repeat_interleave(weights["group_size"], 1)
    elif strategy == "block":
        tall, across = weights["block_structure"]
        scale = scale.repeat_interleave(tall, 0).repeat_interleave(across, 1)
        scale = scale[: len(codes), : codes.shape[1]]
    else:
        assert scale.shape == ((1,) if strategy == "tensor" else (len(codes), 1))
    return codes * scale
