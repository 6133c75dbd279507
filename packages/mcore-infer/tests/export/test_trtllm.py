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
from readers.trtllm import to_hugging_face

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
        ("hybrid_folder", {"dtype": "fp32"}, "no Hugging Face family can say"),
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
    for block in page:
        program, *words = shlex.split(block.code.replace("\\\n", " "))
        assert mains[program](words) == 0
    assert sorted(file.name for file in (tmp_path / "tiny-trtllm").iterdir()) == [
        "config.json",
        *(f"rank{number}.safetensors" for number in range(4)),
    ]
