"""Checkpoints of TensorRT-LLM, read back by ``readers.trtllm``, which knows the format only.

Each family goes there from a folder of transformers, split over eight ranks, and back into
one: its config.json is written from the checkpoint's alone, and transformers' logits must be
those of the first folder.
"""

import json
import shlex

import pytest
import torch
from docs.blocks import ROOT, blocks_of
from readers.trtllm import logical, to_hugging_face
from readers.unified import quantize
from safetensors.torch import load_file, save_file

from mcore_ckpt.cli import main as convert_main
from mcore_infer.cli import main
from mcore_infer.export.exporting import export_model
from mcore_infer.generation import next_logits
from mcore_infer.loading import load_model
from mcore_parallel.mesh import ParallelContext

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "vocab_size": 37,  # no multiple of 4
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # fewer than tensor ranks
    "head_dim": 6,  # heads times it are not the hidden size
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS["router_aux_loss_coef"] = 0.0
CASES = {
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama tied, with biases": (
        "Llama",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", {**SIZES, "hidden_size": 24}),
    "qwen3": ("Qwen3", SIZES),
    "mixtral": ("Mixtral", {**SIZES, **EXPERTS}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, **EXPERTS, "intermediate_size": 28, "moe_intermediate_size": 12}
        | {"norm_topk_prob": True},
    ),
    "qwen3_moe not renormalised": (
        "Qwen3Moe",
        {**SIZES, **EXPERTS, "moe_intermediate_size": 12, "norm_topk_prob": False},
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 20, "n_layer": 2, "n_head": 4, "n_inner": 28, "n_positions": 64}
        | {"vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "nemotron": ("Nemotron", {**SIZES, "head_dim": 8, "norm_eps": 1e-4}),
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**SIZES, "sliding_window": 64, "query_pre_attn_scalar": 7}),
    "gemma3_text": (
        "Gemma3Text",
        {**SIZES, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        | {"query_pre_attn_scalar": 7},
    ),
}


def random_model(kind, fields):
    """Make a model whose every weight, gain and bias is a number of its own."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 30, 12, 0, 36, 3]])).logits


@pytest.mark.parametrize("case", CASES)
def test_a_family_split_over_eight_ranks_answers_as_before(case, tmp_path):
    model = random_model(*CASES[case])
    model.save_pretrained(tmp_path / "hf")
    report = export_model(
        tmp_path / "hf",
        tmp_path / "trtllm",
        format="trtllm",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
    )
    config = json.loads((tmp_path / "trtllm" / "config.json").read_text())
    assert report.word == config["architecture"]
    assert config["dtype"] == "float32"
    back = to_hugging_face(tmp_path / "trtllm", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="float32")
    torch.testing.assert_close(logits_of(again), logits_of(model), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_of_ours_arrives_with_its_vocabulary_unpadded(run_folder, tmp_path, tp, capsys):
    """257 tokens: one over a multiple, padded to 260 in memory, to 258 for two ranks."""
    words = ["export", "--load", str(run_folder), "--output", str(tmp_path / "out")]
    words += ["--format", "trtllm", "--dtype", "fp32", "--tensor-parallel-size", str(tp)]
    assert main(words) == 0
    assert f"LlamaForCausalLM, {17 * tp} tensors" in capsys.readouterr().out
    loaded = load_model(run_folder, ParallelContext.single(), dtype=torch.float32)
    back = to_hugging_face(tmp_path / "out", tmp_path / "back")
    again = load_model(back, ParallelContext.single())
    tokens = torch.tensor([[5, 6, 7, 256]])
    assert torch.equal(next_logits(again.model, tokens), next_logits(loaded.model, tokens))


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("run_folder", {}, "no weights in F64: give --dtype"),
        ("run_folder", {"dtype": "int8"}, "--dtype int8 is not known"),
        ("run_folder", {"dtype": "fp32", "tensor_parallel_size": 3}, "cannot be split over"),
        ("run_folder", {"dtype": "fp32", "tensor_parallel_size": 0}, "must be 1 or more"),
        ("run_folder", {"dtype": "fp32", "pipeline_parallel_size": 3}, "2 layers cannot be"),
        ("expert_folder", {"dtype": "fp32"}, "no layout for"),
        ("hybrid_folder", {"dtype": "fp32"}, "no Hugging Face family can express"),
    ],
)
def test_what_the_format_cannot_say_is_refused_and_leaves_nothing(
    folder, options, message, request, tmp_path
):
    with pytest.raises(ValueError, match=message):
        export_model(
            request.getfixturevalue(folder), tmp_path / "new/out", format="trtllm", **options
        )
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_half_way_leaves_no_folder(run_folder, tmp_path):
    seen = []

    def stop(done, total, name):
        seen.append(name)
        if done * 2 > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(
            run_folder, tmp_path / "out", format="trtllm", dtype="fp32", on_progress=stop
        )
    assert len(seen) > 5
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_model(run_folder, tmp_path / "out", format="trtllm", dtype="fp32")


def test_the_commands_of_the_page_run(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny").symlink_to(run_folder)
    page = blocks_of((ROOT / "docs/deployment.md").read_text(), "docs/deployment.md")
    mains = {"mcore-infer": main, "mcore-ckpt": convert_main}
    mine = [one for one in page if "test_trtllm.py" in one.run_by]
    for block in mine:
        program, *words = shlex.split(block.code.replace("\\\n", " "))
        assert mains[program](words) == 0
    assert sorted(file.name for file in (tmp_path / "tiny-trtllm").iterdir()) == [
        "config.json",
        *(f"rank{number}.safetensors" for number in range(4)),
    ]


GROUPED = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
}


HEADS = tuple(f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of float32 whose q, k and v have very different sizes."""
    folder = tmp_path_factory.mktemp("llama")
    model = random_model("Llama", GROUPED)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 30
            layer.self_attn.v_proj.weight *= 0.02
    model.save_pretrained(folder)
    return folder


def held_by(folder):
    """Return the weights that a checkpoint stands for, under Hugging Face's names."""
    _, wide = logical(folder)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
    names |= {"dense": "self_attn.o_proj", "fc": "mlp.gate_proj", "gate": "mlp.up_proj"}
    names["proj"] = "mlp.down_proj"
    return {
        f"model.layers.{layer}.{there}.weight": wide[f"{layer}.{mine}.weight"]
        for layer in range(2)
        for mine, there in names.items()
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "algo",
    ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ"],
)
def test_quantized_weights_stand_for_what_they_did(llama, tmp_path, algo, tp):
    left = ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj")
    wide = quantize(llama, tmp_path / "q", algo, leave=left, kv=True)
    export_model(
        tmp_path / "q",
        tmp_path / "out",
        format="trtllm",
        tensor_parallel_size=tp,
        pipeline_parallel_size=2,
    )
    config, _ = logical(tmp_path / "out")
    assert config["quantization"]["quant_algo"] == algo
    assert config["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert "transformer.layers.0.attention.dense" in config["quantization"]["exclude_modules"]
    (cache_scale,) = config["inputs"]["1.kv"]
    assert cache_scale == kv_top(tmp_path / "q", 1)
    for name, weight in held_by(tmp_path / "out").items():
        torch.testing.assert_close(weight, wide[name].float(), rtol=1e-6, atol=0)
    stored = load_file(tmp_path / "out" / "rank0.safetensors")[
        "transformer.layers.0.mlp.fc.weight"
    ]
    # The engine rounds those of W8A16 itself.
    assert (stored.element_size() == 1) == (algo != "W8A16")


def kv_top(folder, layer):
    tensors = load_file(folder / "model.safetensors")
    there = f"model.layers.{layer}.self_attn."
    both = (tensors[f"{there}k_proj.k_scale"], tensors[f"{there}v_proj.v_scale"])
    return max(both).item()


def test_scales_of_fused_matrices_that_differ_become_the_largest(llama, tmp_path):
    """Each matrix keeps its values to half a unit of fp8 under the shared scale."""
    wide = quantize(llama, tmp_path / "q", "FP8", share=False)
    export_model(tmp_path / "q", tmp_path / "out", format="trtllm", tensor_parallel_size=2)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for name, weight in held_by(tmp_path / "out").items():
        layer, is_attention, part = name.partition(".self_attn.")
        rounding = wide[name].abs() * 1e-6
        if is_attention and not part.startswith("o"):
            scales = [f"{layer}.self_attn.{p}_proj.weight_scale" for p in "qkv"]
            shared = max(tensors[scale] for scale in scales)
            rounding = wide[name].abs() * 2**-4 + shared * 2**-10
        assert ((weight - wide[name]).abs() <= rounding).all(), name


def test_bytes_of_four_bits_are_those_of_the_format(llama, tmp_path):
    """Two outputs share a byte, the even one in its low half: (1, 2), (-2, 7) are E1 72."""
    quantize(llama, tmp_path / "q", "W4A16_GPTQ")
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][0, :2] = torch.tensor([0xE1, 0x72], dtype=torch.uint8)
    tensors["model.layers.0.mlp.down_proj.weight_scale"][:2] = 1.0
    save_file(tensors, file, {"format": "pt"})
    export_model(tmp_path / "q", tmp_path / "out", format="trtllm")
    (found,) = (load_file(one) for one in (tmp_path / "out").glob("*.safetensors"))
    codes = found["transformer.layers.0.mlp.proj.weight"]
    assert codes.dtype == torch.int8
    assert codes.view(torch.uint8)[0, :2].tolist() == [0xE1, 0x72]
    weight = held_by(tmp_path / "out")[name]
    assert weight[:2, :2].tolist() == [[1.0, 2.0], [-2.0, 7.0]]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["group_size"]) == ("W4A16_AWQ", 8)


def test_a_cut_through_a_group_or_a_byte_is_refused(tmp_path):
    """Ranks take 4 of 8 inputs that share a scale, or 3 rows of which two share a byte."""
    model = random_model("Llama", GROUPED | {"intermediate_size": 24, "head_dim": 6})
    model.save_pretrained(tmp_path / "hf")
    quantize(tmp_path / "hf", tmp_path / "q", "W4A16_GPTQ", leave=HEADS)
    with pytest.raises(ValueError, match="8 inputs share a scale, and the ranks cut"):
        export_model(tmp_path / "q", tmp_path / "out", format="trtllm", tensor_parallel_size=2)
    model = random_model("Llama", GROUPED | {"intermediate_size": 6})
    model.save_pretrained(tmp_path / "narrow")
    leave = [*HEADS, *(f"model.layers.{n}.mlp.down_proj" for n in range(2))]
    quantize(tmp_path / "narrow", tmp_path / "q6", "W4A16_GPTQ", leave=leave)
    with pytest.raises(ValueError, match="two outputs share a byte, and the ranks cut"):
        export_model(tmp_path / "q6", tmp_path / "out", format="trtllm", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("algo", "options", "leave", "message"),
    [
        ("NVFP4", {}, (), "no layout for NVFP4"),
        ("FP8_BLOCK_SCALES", {}, (), "no layout for fp8_pb_wo"),
        ("W4A16_AWQ", {"tensor_parallel_size": 8}, (), "key/value heads|query heads"),
        ("FP8", {}, ("model.layers.0.self_attn.q_proj",), "one matrix .* quantized only"),
        (
            "FP8",
            {"pipeline_parallel_size": 2},
            ("model.layers.0.mlp.down_proj",),
            "count|names layers from 0 on each stage",
        ),
    ],
)
def test_a_quantization_without_a_layout_is_refused(
    llama, tmp_path, algo, options, leave, message
):
    quantize(llama, tmp_path / "q", algo, leave=leave)
    with pytest.raises(ValueError, match=message):
        export_model(tmp_path / "q", tmp_path / "out", format="trtllm", **options)
    assert not (tmp_path / "out").exists()
