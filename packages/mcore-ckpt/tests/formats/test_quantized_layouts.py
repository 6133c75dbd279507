"""Bytes and scales against numbers worked out by hand, and a reader that shares no code."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mcore_ckpt.formats.quantized_layouts import (
    LAYOUTS,
    METHODS,
    find_layout,
)
from mcore_ckpt.formats.quantized_plans import QuantPlan, read_plan
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.low_bits import decode, encode, pack, unpack
from mcore_ckpt.save_load.loading import opened_checkpoint
from mcore_ckpt.save_load.quantized_folder import opened_quantized

FOUR_BITS = {
    "int4": torch.arange(-8, 8, dtype=torch.int8),
    "e2m1": torch.arange(16, dtype=torch.uint8),
}


def test_four_bit_codes_stand_in_bytes_as_others_read_them():
    rows = torch.tensor([[1, 2], [-2, 7]], dtype=torch.int8)
    assert pack(rows, "int4").tolist() == [[0xE1, 0x72]]
    columns = torch.arange(16, dtype=torch.uint8).repeat(2, 3)
    # The value is the column modulo 16, so a wrong order cannot pass.
    assert (
        pack(columns, "e2m1")[1].tolist()
        == [(i + 1) % 16 * 16 + i for i in range(0, 16, 2)] * 3
    )
    for code, every in FOUR_BITS.items():
        both = every[torch.randint(16, (6, 10), generator=torch.Generator().manual_seed(1))]
        assert torch.equal(unpack(pack(both, code), code), both)
        assert torch.equal(encode(decode(every[None], code), code)[0], every)


def test_rounding_is_to_the_nearest_ties_to_even_and_saturates():
    halves = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 99.0, -0.75, float("inf")]])
    wide = decode(encode(halves, "e2m1"), "e2m1")[0]
    assert wide.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, 6.0]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.linspace(0, 6, 997)
    nearest = (x[:, None] - grid).abs().amin(1)
    assert torch.equal((decode(encode(x[None], "e2m1"), "e2m1")[0] - x).abs(), nearest)
    large = torch.tensor([[448.0, 465.0, float("inf"), -500.0]])
    assert encode(large, "e4m3").float().tolist() == [[448.0, 448.0, 448.0, -448.0]]
    assert encode(torch.tensor([[7.5, -8.6, 2.5, -200.0]]), "int4").tolist() == [[7, -8, 2, -8]]
    assert encode(torch.tensor([[200.0, -200.0]]), "int8").tolist() == [[127, -127]]


def widened_alone(algo, tensors):
    """Ten lines that know nothing of the package: codes times scales, element by element."""
    w, s = tensors["weight"], tensors["weight_scale"]
    group = {"fp8_pb_wo": (128, 128), "W4A16_AWQ": (1, 128), "W4A16_GPTQ": (1, 128)}
    group |= {"NVFP4": (1, 16), "W4A16_MXFP4": (1, 32), "MXFP8": (1, 32)}
    if algo.startswith("W4A16_") and "MX" not in algo:
        nibble = [
            [(w[i // 2, j].item() >> (4 * (i % 2))) & 15 for j in range(w.shape[1])]
            for i in range(2 * w.shape[0])
        ]
        q = torch.tensor(nibble).float()
        q = torch.where(q > 7, q - 16, q)
    elif w.dtype == torch.uint8:
        e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
        q = torch.tensor(
            [
                [
                    e2m1[(w[i, j // 2].item() >> (4 * (j % 2))) & 15]
                    for j in range(2 * w.shape[1])
                ]
                for i in range(w.shape[0])
            ]
        )
    else:
        q = w.float()
    s = 2.0 ** (s.float() - 127) if s.dtype == torch.uint8 else s.float()
    s = s[:, 0, :, 0] if s.dim() == 4 else s
    tall, wide = group.get(algo, (1, q.shape[1]))
    i, j = torch.arange(q.shape[0])[:, None] // tall, torch.arange(q.shape[1])[None] // wide
    s = s if s.dim() == 0 else s[:, None][i, 0] if s.dim() == 1 else s[i, j]
    return q * s.reshape(s.shape[:2]) * tensors.get("weight_scale_2", torch.tensor(1.0))


@pytest.mark.parametrize("algo", LAYOUTS)
def test_an_independent_reader_finds_the_same_numbers(algo):
    layout = LAYOUTS[algo]
    x = torch.randn(258, 384, generator=torch.Generator().manual_seed(0))
    x[3], x[4], x[5] = 0.0, 1e-30, 1e4  # blocks of nothing, of next to nothing, and huge
    x[:, 7] *= 30
    scales = layout.scales(x)
    packed = layout.packed(layout.quantized(x, scales))
    tensors = {"weight": packed, "weight_scale": scales.weight_scale}
    if scales.weight_scale_2 is not None:
        tensors["weight_scale_2"] = scales.weight_scale_2
    for kind, (_, shape) in layout.tensors((258, 384)).items():
        if kind in tensors:
            assert tuple(tensors[kind].shape) == shape
    if scales.weight_scale.dtype != torch.uint8:  # readers may divide by it
        assert (scales.weight_scale.float() > 0).all()
    wide = layout.dequantized(packed, scales)
    assert torch.isfinite(wide).all()
    torch.testing.assert_close(wide, widened_alone(algo, tensors), rtol=1e-6, atol=0)


LARGEST = {"e4m3": 448, "int8": 127, "int4": 7, "e2m1": 6}
HALF_STEP = {"e4m3": 1 / 16, "int8": 0.51 / 127, "int4": 0.51 / 7, "e2m1": 1 / 6}
"""Of the largest number of a group; scales that are rounded themselves cost a quarter more."""


@pytest.mark.parametrize("algo", LAYOUTS)
def test_rounding_errs_by_half_a_step_of_the_format(algo):
    layout = LAYOUTS[algo]
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(4))
    scales = layout.scales(x)
    wide = layout.dequantized(layout.packed(layout.quantized(x, scales)), scales)
    tops = layout.full_scales(scales, x.shape) * LARGEST[layout.code]
    assert ((wide - x).abs() <= 1.25 * HALF_STEP[layout.code] * tops).all()


def test_members_of_a_group_share_the_scale_of_the_whole_tensor():
    big, small = torch.full((16, 32), 8.0), torch.full((16, 32), 0.5)
    amax = torch.maximum(big.abs().amax(), small.abs().amax())
    fp8, nvfp4 = LAYOUTS["FP8"], LAYOUTS["NVFP4"]
    assert torch.equal(fp8.scales(big).weight_scale, fp8.scales(small, amax).weight_scale)
    assert fp8.scales(big).weight_scale == 8 / 448
    second = nvfp4.scales(small, amax).weight_scale_2
    assert second == torch.tensor(8.0) / (6 * 448)
    assert torch.equal(second, nvfp4.scales(big).weight_scale_2)


def test_a_layout_says_what_it_cannot_hold():
    assert "odd" in find_layout("W4A16_AWQ").problem((3, 128))
    assert "not a multiple of the group of 64" in find_layout("W4A16_GPTQ", 64).problem((4, 96))
    assert "not a multiple of the group of 16" in LAYOUTS["NVFP4"].problem((4, 24))
    assert not find_layout("FP8_BLOCK_SCALES").problem((129, 1000))
    with pytest.raises(ValueError, match="FP9"):
        find_layout("FP9")
    with pytest.raises(ValueError, match="groups of 16, not 32"):
        find_layout("NVFP4", 32)


@pytest.mark.parametrize("algo", LAYOUTS)
def test_both_forms_of_the_config_say_the_same(algo):
    plan = QuantPlan(layout=LAYOUTS[algo], exclude_modules=("lm_head", "*.gate"), kv_cache=True)
    producer = {"name": "mcore", "version": "0"}
    for said in (plan.hf_quant_config(producer), plan.quantization_config(producer)):
        assert read_plan(json.loads(json.dumps(said))) == plan
    assert plan.excludes("model.layers.3.mlp.gate")
    assert not plan.excludes("model.layers.3.mlp.gate_proj")
    assert algo in METHODS.values() or algo == "MXFP8"


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 130,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (130, 128),
    "mlp.up_proj": (130, 128),
}


def quantized_folder(path, algo, change=lambda tensors, quant: None):
    """Write a llama of one layer; ``down_proj`` (130 columns) stays as it was."""
    layout, generator = LAYOUTS[algo], torch.Generator().manual_seed(3)
    tensors, wide = {}, {}
    for name, shape in SHAPES.items():
        # Very different sizes, so that a scale in the wrong place shows.
        weight = torch.randn(shape, generator=generator) * 10.0 ** (len(wide) - 3)
        scales = layout.scales(weight)
        module = f"model.layers.0.{name}"
        tensors[f"{module}.weight"] = layout.packed(layout.quantized(weight, scales))
        tensors[f"{module}.weight_scale"] = scales.weight_scale
        if scales.weight_scale_2 is not None:
            tensors[f"{module}.weight_scale_2"] = scales.weight_scale_2
        if layout.input_scale:
            tensors[f"{module}.input_scale"] = torch.tensor(0.5)
        wide[name] = layout.dequantized(tensors[f"{module}.weight"], scales)
        if layout.pre_quant_scale:
            smooth = 0.5 + torch.rand(shape[1], generator=generator)
            tensors[f"{module}.pre_quant_scale"] = smooth
            wide[name] = wide[name] * smooth
    plain = {"model.embed_tokens": (32, 128), "lm_head": (32, 128)}
    plain["model.layers.0.mlp.down_proj"] = (128, 130)
    norms = (
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    )
    plain |= dict.fromkeys(norms, (128,))
    tensors |= {
        f"{n}.weight": torch.randn(s, generator=generator).bfloat16() for n, s in plain.items()
    }
    plan = QuantPlan(layout=layout, exclude_modules=("lm_head", "*.down_proj"))
    quant = plan.hf_quant_config({"name": "test", "version": "0"})
    change(tensors, quant)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    config = CONFIG | {"quantization_config": plan.quantization_config({"name": "test"})}
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps(quant))
    return wide


OURS = {
    "self_attn.q_proj": "attention.qkv.q",
    "self_attn.k_proj": "attention.qkv.k",
    "mlp.gate_proj": "mlp.fc1.gate",
    "mlp.up_proj": "mlp.fc1.up",
    "self_attn.o_proj": "attention.proj",
}


@pytest.mark.parametrize("algo", LAYOUTS)
def test_a_quantized_folder_is_read_as_the_numbers_it_stands_for(tmp_path, algo):
    wide = quantized_folder(tmp_path, algo)
    with opened_checkpoint(tmp_path) as (index, reader, _):
        for theirs, ours in OURS.items():
            name = f"model.blocks.0.{ours}.weight"
            entry = index.tensors[name]
            assert (entry.dtype, entry.shape) == ("F32", SHAPES[theirs])
            rows, want = entry.shape[0], wide[theirs]
            for begin, stop in ((0, rows), (1, rows - 1), (rows - 1, rows), (5, 8)):
                got = torch.empty(stop - begin, 128)
                box = ((begin, 0), (stop - begin, 128))
                reader.read(name, entry, entry.chunks[0], box, got)
                assert torch.equal(got, want[begin:stop])
    with opened_quantized(tmp_path) as folder:
        assert folder.layout("blocks.0.attention.qkv.q.weight") == LAYOUTS[algo]
        part = folder.part("blocks.0.attention.qkv.q.weight", 5, 64)
        assert (part.input_scale is not None) == LAYOUTS[algo].input_scale
        assert folder.is_quantized("blocks.0.mlp.fc1.up.weight")
        assert not folder.is_quantized("blocks.0.mlp.fc2.weight")


@pytest.mark.parametrize("spelled", ["FP8_BLOCK_SCALES", "FP8_PB_WO"])
def test_scales_of_blocks_are_read_as_others_write_them(tmp_path, spelled):
    """In two dimensions, or none where one block is all."""

    def rewrite(tensors, quant):
        quant["quantization"]["quant_algo"] = spelled
        for name in (name for name in tensors if name.endswith("weight_scale")):
            tensors[name] = tensors[name][:, 0, :, 0].contiguous()
            if tensors[name].numel() == 1:
                tensors[name] = tensors[name].reshape(())

    wide = quantized_folder(tmp_path, "fp8_pb_wo", rewrite)
    with opened("hf", tmp_path) as folder:
        for name, want in wide.items():
            theirs = f"model.layers.0.{name}.weight"
            assert torch.equal(folder.theirs.rows(theirs, 1, len(want)), want[1:])


def _drop(name):
    return lambda tensors, _: tensors.pop(name)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(f"{Q}.weight_scale"), "is a scale without a quantized weight"),
        (_drop(f"{Q}.input_scale"), "input_scale must be F32"),
        (
            lambda t, _: t.update({f"{Q}.weight": torch.zeros(128, 128).bfloat16()}),
            "must be F8",
        ),
        (lambda t, _: t.update({f"{Q}.weight_scale": torch.ones(3)}), r"and is F32 \[3\]"),
        (lambda _, q: q["quantization"].update(exclude_modules=["lm_head"]), "down_proj"),
        (lambda _, q: q["quantization"]["exclude_modules"].append("*q_proj"), "excludes it"),
        (
            lambda _, q: q["quantization"].update(kv_cache_quant_algo="FP8"),
            "k_scale is missing",
        ),
        (lambda _, q: q["quantization"].update(quant_algo="FP9"), "FP9"),
    ],
)
def test_a_folder_that_contradicts_its_config_is_refused(tmp_path, change, message):
    quantized_folder(tmp_path, "FP8", change)
    with pytest.raises(ValueError, match=message), opened_quantized(tmp_path):
        pass


def test_scales_of_the_cache_are_read(tmp_path):
    def change(tensors, quant):
        quant["quantization"]["kv_cache_quant_algo"] = "FP8"
        for one in ("k", "v"):
            tensors[f"model.layers.0.self_attn.{one}_proj.{one}_scale"] = torch.tensor(0.25)

    quantized_folder(tmp_path, "FP8", change)
    with opened_checkpoint(tmp_path) as (index, _, _):
        assert not any("scale" in name for name in index.tensors)
