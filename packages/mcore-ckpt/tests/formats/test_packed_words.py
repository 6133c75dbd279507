"""Folders of GPTQ, AutoAWQ and compressed-tensors, written here from the formats themselves.

Packers below go element by element and share nothing with the reader.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt import cli, mcore_to_hf
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.packed_words import PackedRows

GROUP = 8
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits=4, order=None):
    """Pack along the last dimension, low bits first; ``order``: the column of each place."""
    places = 32 // bits
    found = torch.zeros(*codes.shape[:-1], codes.shape[-1] // places, dtype=torch.int64)
    for column in range(codes.shape[-1]):
        place = column % places if order is None else order.index(column % places)
        found[..., column // places] += codes[..., column].long() << (bits * place)
    return found.to(torch.uint32).view(torch.int32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A plain folder of a tiny Llama: config.json and tensors."""
    draw = torch.Generator().manual_seed(3)
    sizes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32)}
    sizes |= {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 16, generator=draw),
        "model.norm.weight": torch.randn(16, generator=draw),
        "lm_head.weight": torch.randn(8, 16, generator=draw),
        "model.layers.0.input_layernorm.weight": torch.randn(16, generator=draw),
        "model.layers.0.post_attention_layernorm.weight": torch.randn(16, generator=draw),
    }
    for part, shape in sizes.items():
        where = "self_attn" if part in "qkvo" else "mlp"
        name = f"model.layers.0.{where}.{part}_proj.weight"
        tensors[name] = torch.randn(*shape, generator=draw)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return config, tensors


def rounded(weight, bits=4):
    """Return unsigned codes ``[F, D]``, zero points and scales ``[F, D/g]``, all asymmetric."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1).int(), zero.int(), scale


def wide_of(codes, zero, scale, group=None):
    group = torch.arange(codes.shape[1]) // GROUP if group is None else group
    return (codes - zero[:, group]) * scale[:, group]


def gptq(weight, bits, offset, shuffled):
    codes, zero, scale = rounded(weight, bits)
    group = torch.arange(weight.shape[1]) // GROUP
    if shuffled:
        group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(1))]
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zero.t() - offset, bits),
        "scales": scale.t().half().contiguous(),
        "g_idx": group.int(),
    }
    return tensors, wide_of(codes, zero, scale, group)


def awq(weight):
    codes, zero, scale = rounded(weight)
    tensors = {
        "qweight": words(codes.t(), order=AWQ_COLUMNS),
        "qzeros": words(zero.t(), order=AWQ_COLUMNS),
        "scales": scale.t().half().contiguous(),
    }
    return tensors, wide_of(codes, zero, scale)


def compressed(weight):
    codes, zero, scale = rounded(weight)
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": words(zero.t()).t().contiguous(),
    }
    return tensors, wide_of(codes, zero, scale)


def symmetric(weight, bits, group):
    """Return unsigned codes whose zero is the middle one."""
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
    middle = 2 ** (bits - 1)
    codes = (groups / scale[..., None]).round().flatten(1).int() + middle
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (codes - middle) * scale.repeat_interleave(group, 1)


def signed(bits, strategy, size):
    """Return the config of ``symmetric``."""
    group = COMPRESSED["config_groups"]["group_0"]
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True}
    changed = group | {"weights": weights | {"group_size": size}}
    return COMPRESSED | {"config_groups": {"group_0": changed}}


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group"}
            | {"group_size": GROUP, "symmetric": False},
        }
    },
    "ignore": ["lm_head"],
}
FORMS = {
    "gptq": (
        lambda w: gptq(w, 4, 1, shuffled=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    ),
    "gptq_v2 in order of activations": (
        lambda w: gptq(w, 4, 0, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
        | {"checkpoint_format": "gptq_v2"},
    ),
    "gptq of 8 bits": (
        lambda w: gptq(w, 8, 1, shuffled=False),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (compressed, COMPRESSED),
    "compressed-tensors by groups": (
        lambda w: symmetric(w, 4, GROUP),
        signed(4, "group", GROUP),
    ),
    "compressed-tensors by outputs": (
        lambda w: symmetric(w, 8, w.shape[1]),
        signed(8, "channel", None),
    ),
    "compressed-tensors by outputs, as here": (
        lambda w: symmetric(w, 8, w.shape[1]),
        signed(8, "channel", -1),
    ),
}
LAYOUTS_OF = {
    "compressed-tensors by groups": "W4A16_GPTQ",
    "compressed-tensors by outputs": "W8A16",
    "compressed-tensors by outputs, as here": "W8A16",
}
"""Those that keep their codes, as a layout of the unified folder."""


def write(folder, plain, make, said):
    config, tensors = plain
    stored, wide = {}, {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(LINEARS):
            stored[name] = wide[name] = weight
            continue
        made, wide[name] = make(weight)
        stored |= {f"{module}.{kind}": tensor for kind, tensor in made.items()}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return wide


@pytest.mark.parametrize("form", FORMS)
def test_packed_matrices_are_widened_and_the_receipt_says_so(form, plain, tmp_path, capsys):
    wide = write(tmp_path / "q", plain, *FORMS[form])
    words = ["convert", "hf-to-mcore", "--input", str(tmp_path / "q")]
    assert cli.main([*words, "--output", str(tmp_path / "run")]) == 0
    assert (
        f"Dequantized on reading: {form.partition('_')[0].partition(' ')[0]}"
        in capsys.readouterr().out
    )
    mcore_to_hf(tmp_path / "run", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == wide.keys()
    for name, weight in wide.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)
    with opened("hf", tmp_path / "q") as source:
        name = "blocks.0.mlp.fc2.weight"
        whole = source.ours.rows(name, 0, 16)
        assert torch.equal(source.ours.rows(name, 5, 9), whole[5:9])
        if form not in LAYOUTS_OF:
            assert isinstance(source.theirs, PackedRows)
            return
        assert source.theirs.plan.layout.algo == LAYOUTS_OF[form]
        assert source.theirs.plan.exclude_modules == ("lm_head",)
        assert source.theirs.stored.entries["model.layers.0.mlp.up_proj.weight"].dtype in (
            "U8",
            "I8",
        )


def test_nibbles_stand_in_the_declared_order():
    """AutoAWQ's word of columns 0 to 7 is 0x75316420, GPTQ's of inputs 0 to 7 0x76543210."""
    codes = torch.arange(8).view(1, 8)
    assert words(codes, order=AWQ_COLUMNS).item() == 0x75316420
    assert words(codes).item() == 0x76543210


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", {"bits": 3}, "bits 3"),
        (
            "gptq",
            {"group_size": 16},
            r"scales must be of shape \[2, 16\], and is F16 \[3, 16\]",
        ),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("compressed-tensors", {"format": "sparse-24"}, "format 'sparse-24'"),
        ("awq", {"quant_method": "gptq"}, "must be"),
    ],
)
def test_what_is_packed_otherwise_is_refused(form, change, message, plain, tmp_path):
    make, said = FORMS[form]
    write(tmp_path / "q", plain, make, said | change)
    with (
        pytest.raises(ValueError, match=message),
        opened("hf", tmp_path / "q"),
    ):
        pass
