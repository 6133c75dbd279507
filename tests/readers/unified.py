"""Writes and reads quantized Hugging Face folders of the unified layout, from its table.

Shares no code with the packages. A folder that is written comes with the matrices that it
stands for, in float32: codes times all their scales.
"""

import json

import torch
from safetensors.torch import load_file, save_file

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = {"W4A16_AWQ": 8, "W4A16_GPTQ": 8, "NVFP4": 16}


def is_linear(name):
    return name.endswith("_proj.weight")


def quantize(folder, output, algo, *, leave=(), kv=False, share=True):
    """Quantize the projections of a plain folder; return what the new one stands for.

    Args:
        folder: config.json and model.safetensors.
        output: folder to make.
        algo: quant_algo.
        leave: modules to leave as they are.
        kv: add scales of an fp8 cache, another for each tensor.
        share: give q, k and v one scale, and gate and up, where it is of a whole tensor.
    """
    config = json.loads((folder / "config.json").read_text())
    plain = load_file(folder / "model.safetensors")
    tensors, wide = {}, {}
    tops = {name: t.float().abs().max() for name, t in plain.items()}
    for number, (name, weight) in enumerate(sorted(plain.items())):
        module = name.removesuffix(".weight")
        if not is_linear(name) or module in leave:
            tensors[name] = wide[name] = weight
            continue
        family = [n for n in plain if share and _fused(n) == _fused(name)]
        top = max(tops[n] for n in family or [name])
        made, wide[name] = _rounded(weight.float(), algo, top, number, module)
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in made.items()}
        for projection in "kv" if kv else "":
            if module.endswith(f"{projection}_proj"):
                scale = torch.tensor(0.01 * (number + 1))
                tensors[f"{module}.{projection}_scale"] = scale
    exclude = ["lm_head", *leave]
    said = {"quant_algo": algo, "kv_cache_quant_algo": "FP8" if kv else None}
    if algo in GROUP:
        said["group_size"] = GROUP[algo]
    if algo == "W4A16_AWQ":
        said |= {"has_zero_point": False, "pre_quant_scale": True}
    said["exclude_modules"] = exclude
    output.mkdir()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    producer = {"name": "modelopt", "version": "0.40"}
    (output / "hf_quant_config.json").write_text(
        json.dumps({"producer": producer, "quantization": said})
    )
    config["quantization_config"] = {"quant_method": "modelopt", "ignore": exclude, **said}
    (output / "config.json").write_text(json.dumps(config))
    return wide


def _fused(name):
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for member in group:
            if member in name:
                return name.replace(member, group[0])
    return name


def _rounded(weight, algo, top, number, module):
    inputs = torch.tensor(0.125 * (1 + ("o_proj" in module)))
    if algo == "FP8":
        scale = top / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return (
            {"weight": codes, "weight_scale": scale, "input_scale": inputs},
            codes.float() * scale,
        )
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = weight.abs().amax(1) / 448
        codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]
    if algo == "FP8_BLOCK_SCALES":
        scale = weight.abs().max().view(1, 1) / 448  # smaller than a block of 128 by 128
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    if algo in ("W8A16", "W8A8_SQ_PER_CHANNEL"):
        before = torch.ones(weight.shape[1])
        if algo == "W8A8_SQ_PER_CHANNEL":
            before = 0.5 + torch.arange(weight.shape[1]) / weight.shape[1]
        weight = weight / before
        scale = weight.abs().amax(1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        made = {"weight": codes, "weight_scale": scale}
        if algo == "W8A8_SQ_PER_CHANNEL":
            made |= {"input_scale": inputs, "pre_quant_scale": before}
        return made, codes.float() * scale[:, None] * before
    size = GROUP[algo]
    groups = weight.unflatten(1, (-1, size))
    if algo == "NVFP4":
        second = top / (6 * 448)
        first = (groups.abs().amax(2) / (6 * second)).clamp(2**-9, 448)
        first = first.to(torch.float8_e4m3fn)
        scale = first.float()[..., None] * second
        size_of = (groups / scale).abs()
        table = torch.tensor(E2M1)
        index = (size_of[..., None] - table).abs().argmin(-1)
        codes = (index + 8 * (groups < 0)).to(torch.uint8).flatten(1)
        real = torch.where(codes >= 8, -1.0, 1.0) * table[codes.long() % 8]
        made = {
            "weight": codes[:, 0::2] | (codes[:, 1::2] << 4),
            "weight_scale": first,
            "weight_scale_2": second,
            "input_scale": inputs,
        }
        return made, (real.unflatten(1, (-1, size)) * scale).flatten(1)
    before = torch.ones(weight.shape[1])
    has_scale = algo == "W4A16_AWQ" and module.endswith(("o_proj", "down_proj"))
    if has_scale:  # the others' is folded into a norm
        before = 0.5 + torch.arange(weight.shape[1]) / weight.shape[1]
    groups = (weight / before).unflatten(1, (-1, size))
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int8)
    real = (codes.float() * scale[..., None]).flatten(1) * before
    flat = codes.flatten(1)
    packed = (flat[0::2] & 15 | (flat[1::2] << 4)).view(torch.uint8)
    made = {"weight": packed, "weight_scale": scale}
    return made | ({"pre_quant_scale": before} if has_scale else {}), real


def read(folder):
    """Return hf_quant_config.json and what the weights stand for, each matrix as listed."""
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    flat = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert flat["quant_method"] == "modelopt"
    assert flat["quant_algo"] == said["quant_algo"]
    assert flat["ignore"] == said["exclude_modules"]
    tensors, wide = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layers = dict(said.get("quantized_layers", {}))
    assert bool(layers) == (said["quant_algo"] == "MIXED_PRECISION")
    for name in sorted(n for n in tensors if n.endswith(".weight_scale")):
        module = name.removesuffix(".weight_scale")
        assert module not in said["exclude_modules"]
        how = layers.pop(module) if said["quant_algo"] == "MIXED_PRECISION" else said
        wide[f"{module}.weight"] = _wide(tensors, module, how)
    assert not layers, sorted(layers)
    cache = {n for n in tensors if n.endswith(("k_proj.k_scale", "v_proj.v_scale"))}
    assert bool(cache) == (said["kv_cache_quant_algo"] == "FP8")
    return said, wide | {n: t for n, t in tensors.items() if n not in cache}


def _wide(tensors, module, how):
    codes = tensors.pop(f"{module}.weight")
    scale = tensors.pop(f"{module}.weight_scale").float()
    before = tensors.pop(f"{module}.pre_quant_scale", torch.ones(()))
    if how["quant_algo"] == "FP8":
        assert codes.dtype == torch.float8_e4m3fn
        assert tensors.pop(f"{module}.input_scale").shape == ()
        return codes.float() * scale
    assert how["quant_algo"] in ("W4A16_AWQ", "W4A16_GPTQ")
    signed = codes.view(torch.int8)
    low, high = (signed << 4) >> 4, signed >> 4
    four = torch.stack((low, high), 1).reshape(2 * len(codes), -1)
    return four.float() * scale.repeat_interleave(how["group_size"], 1) * before
