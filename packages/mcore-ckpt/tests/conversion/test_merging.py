"""Merged models equal the formulas of their papers, number by number."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt.cli import main
from mcore_ckpt.conversion.conversion import hf_to_mcore
from mcore_ckpt.conversion.merging import linear, slerp, task_arithmetic, ties
from mcore_ckpt.conversion.options import ConvertOptions

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 7,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def make_hf(folder, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    at = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (7, 6), "model.norm.weight": (6,)}
    shapes |= {f"{at}{n}_layernorm.weight": (6,) for n in ("input", "post_attention")}
    shapes |= {f"{at}self_attn.{n}_proj.weight": (6, 6) for n in "qkvo"}
    shapes |= {f"{at}mlp.{n}_proj.weight": (5, 6) for n in ("gate", "up")}
    shapes[f"{at}mlp.down_proj.weight"] = (6, 5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return weights


def test_an_arc_keeps_the_length_and_divides_the_angle():
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
    found = slerp([one, other], share=1 / 3)
    wanted = torch.tensor([2 * math.cos(math.pi / 6), 2 * math.sin(math.pi / 6)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(slerp([one, 3 * one], share=0.25), 1.5 * one)
    zero = torch.zeros(2)
    torch.testing.assert_close(slerp([zero, other], share=0.5), other / 2)


def test_ties_keeps_large_changes_elects_signs_and_averages_those_that_agree():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    changes = [[4.0, -3.0, 0.1, 0.2], [2.0, 5.0, 0.3, -0.1], [-1.0, 4.0, 0.2, 0.1]]
    models = [base, *(base + torch.tensor(change) for change in changes)]
    # Half is kept: the first two of each. Signs of the sums 5 and 6 are both plus.
    found = ties(models, weights=[1.0, 1.0, 1.0], scale=2.0, density=0.5)
    wanted = [1 + 2 * (4 + 2) / 2, 1 + 2 * (5 + 4) / 2, 1.0, 1.0]
    torch.testing.assert_close(found, torch.tensor(wanted))
    # With a heavy first model the second sign is minus: 4 x -3 + 5 + 4 is below 0.
    heavy = ties(models, weights=[4.0, 1.0, 1.0], scale=1.0, density=0.5)
    torch.testing.assert_close(heavy[:2], torch.tensor([1 + (4 * 4 + 2) / 5, 1 - 3.0]))


METHODS = {
    "linear --weights 3 1": lambda b, x, y: linear([x, y], weights=[3.0, 1.0]),
    "slerp --weights 3 1": lambda b, x, y: slerp([x, y], share=0.25),
    "task_arithmetic --base base --scale 0.5": lambda b, x, y: b + 0.5 * (x - b + y - b),
    "ties --base base --density 0.3": lambda b, x, y: ties(
        [b, x, y], weights=[1.0, 1.0], scale=1.0, density=0.3
    ),
}


@pytest.mark.parametrize("words", METHODS)
def test_folders_are_merged_tensor_by_tensor(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    made = [make_hf(tmp_path / name, seed) for seed, name in enumerate(("base", "x", "y"))]
    assert main(f"merge x y --output out --method {words}".split()) == 0
    found = load_file("out/model.safetensors")
    assert found.keys() == made[0].keys()
    for name, tensor in found.items():
        wanted = METHODS[words](*(weights[name] for weights in made))
        torch.testing.assert_close(tensor, wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 6


def test_the_average_of_folders_is_one_and_other_formats_merge_with_them(tmp_path):
    one, other = (make_hf(tmp_path / name, seed) for seed, name in enumerate("ab"))
    a, b, mean, run = (str(tmp_path / name) for name in ("a", "b", "mean", "run"))
    assert main(["average", a, b, "--output", mean]) == 0
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert all(torch.equal(found[n], (one[n] + other[n]) / 2) for n in one)
    hf_to_mcore(b, run, ConvertOptions(verify=False))
    assert main(["merge", run, a, "--output", str(tmp_path / "merged")]) == 0
    assert main(["inspect", str(tmp_path / "merged"), "--compare", mean]) == 0
    make_hf(tmp_path / "half", 3, torch.float16)
    assert main(["merge", a, str(tmp_path / "half"), "--output", str(tmp_path / "no")]) == 2


def test_task_arithmetic_of_one_model_goes_on_from_the_base():
    base, tuned = torch.zeros(3), torch.ones(3)
    found = task_arithmetic([base, tuned], weights=[2.0], scale=-1.0)
    assert torch.equal(found, torch.full((3,), -2.0))
