"""From a model to a folder and back: files, receipts, numbers, ranks, commands."""

import json
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, METHODS
from mcore_ckpt.save_load.saving import save
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import Engine, EngineConfig, SamplingConfig, load_model
from mcore_infer.cli import main
from mcore_infer.kv_cache import StaticCache
from mcore_infer.quantization.gemms import QuantizedGemm
from mcore_infer.quantization.loading import linears
from mcore_infer.quantization.options import QuantizeConfig
from mcore_infer.quantization.quantizing import quantize
from mcore_models.config import TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.gpt import GPT
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.precision.gemm import PLAIN_GEMM
from mcore_parallel.sharding import named_shards

DENSE = ModelDescription(
    config=TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        max_position_embeddings=64,
        untie_embeddings_and_output_weights=True,
        init_method_std=0.15,
    ),
    vocab_size=ByteTokenizer.vocab_size,
)
SPARSE = replace(
    DENSE,
    config=replace(DENSE.config, num_layers=1, qk_layernorm=True),
    moe=MoEConfig(
        num_experts=4, moe_router_topk=1, moe_ffn_hidden_size=32, moe_router_pre_softmax=True
    ),
)
TEXT = "In the beginning was the word, and the word was with what it says. " * 12
CONFIG = {"calibration_tokens": 384, "scored_tokens": 256, "seq_length": 32}
TOKENS = torch.tensor([list(b"and the word was in the beginning")])


def saved(path, description, change=lambda model: None):
    """Save a model of random weights in float32; return its run."""
    torch.manual_seed(0)
    single = ParallelContext.single()
    model = GPT(description.config, single, vocab_size=257, moe=description.moe)
    with torch.no_grad():
        change(model)
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    ByteTokenizer().save(path / "tokenizer")
    extra = {"model": description.to_dict()}
    folders = {"tokenizer": path / "tokenizer"}
    save(path / "run", 3, shards, world=SINGLE, extra=extra, folders=folders)
    return path / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory):
    """A folder of each method, with its receipt."""
    path, found = tmp_path_factory.mktemp("quantized"), {}
    for method in METHODS:
        sizes = {"group_size": 32} if method in ("awq", "gptq") else {}
        config = QuantizeConfig(
            method=method,
            format="hf-quant",
            kv_cache_dtype="fp8" if method == "fp8" else "bf16",
            **CONFIG,
            **sizes,
        )
        found[method] = quantize(run, path / method, TEXT, config, tokenizer=ByteTokenizer())
    return path, found


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return model.logits(model(tokens)[0])[:, 0, :257].double()


def losses_of(model, tokens, labels):
    with torch.no_grad():
        return model.token_losses(model(tokens)[0], labels).double()


def change_of(got, want):
    return ((got - want).norm() / want.norm()).item()


WORST = {"fp8": 0.2, "fp8-channel": 0.2, "fp8-block": 0.15, "int8": 0.03, "w8a8": 0.05}
"""Change of the logits of a model of random weights (inputs and weights of eight linears in
three bits of fraction); four bits: below half of them."""


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_reads_back_as_nearly_the_model_and_multiplies_its_codes(run, folders, method):
    path, receipts = folders
    receipt, single = receipts[method], ParallelContext.single()
    original = logits_of(load_model(run, single).model)
    wide = load_model(path / method, single).model
    got = logits_of(wide)
    assert 1e-6 < change_of(got, original) < WORST.get(method, 0.5)
    packed = load_model(path / method, single, keep_codes=True).model
    gemms = {name: linear.gemm for name, linear in linears(packed).items()}
    assert all(isinstance(gemm, QuantizedGemm) for gemm in gemms.values())
    sizes = [
        sum(p.untyped_storage().nbytes() for p in model.parameters())
        for model in (packed, wide)
    ]
    assert sizes[0] < 0.6 * sizes[1]
    assert change_of(logits_of(packed), got) < 1e-5
    for linear in linears(wide).values():
        linear.gemm = PLAIN_GEMM
    with_inputs_as_they_are = logits_of(wide)
    if method in ("fp8", "fp8-channel", "w8a8"):
        assert change_of(with_inputs_as_they_are, got) > 1e-3
    else:
        assert torch.equal(with_inputs_as_they_are, got)
    # What the receipt says is what the folder does.
    assert receipt.perplexity_after != receipt.perplexity_before
    ids = torch.tensor(ByteTokenizer().encode(TEXT)[383 : 384 + 256])
    tokens, labels = ids[:-1].view(-1, 32), ids[1:].view(-1, 32)
    before, after = (
        losses_of(load_model(folder, single).model, tokens, labels)
        for folder in (run, path / method)
    )
    expected = (after - before).square().mean().sqrt().item()
    assert receipt.token_loss_change == pytest.approx(expected, rel=0.4)
    assert abs(receipt.perplexity_change) < 30
    has_cache = method == "fp8"
    assert receipt.kv_cache == ("fp8" if has_cache else "")
    assert bool(receipt.perplexity_with_cache) == has_cache
    assert (receipt.change_with_cache != receipt.perplexity_change) == has_cache
    assert receipt.bytes_after < 0.6 * receipt.bytes_before
    said = json.loads((path / method / "receipt.json").read_text())
    assert said["algo"] == METHODS[method]
    assert len(said["matrices"]) == 8
    assert 0 < said["matrices"][0]["output_error"] < 0.5
    text = (path / method / "receipt.md").read_text()
    assert "| lm_head | computes logits: its errors affect every token |" in text


@pytest.mark.parametrize("method", METHODS)
def test_the_files_are_those_of_the_layout(folders, method):
    folder = folders[0] / method
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    layout = LAYOUTS[METHODS[method]]
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["quant_algo"] == said["quant_algo"] == layout.algo
    assert said["exclude_modules"] == config["quantization_config"]["ignore"] == ["lm_head"]
    q, k, v = (f"model.layers.1.self_attn.{one}_proj" for one in "qkv")
    names = {name.rpartition(".")[2] for name in tensors if name.startswith(f"{q}.")}
    folded = {"pre_quant_scale"} if layout.pre_quant_scale == "some" else set()
    assert names == set(layout.tensors((64, 64))) - folded
    down = "model.layers.1.mlp.down_proj.pre_quant_scale"
    assert (down in tensors) == bool(layout.pre_quant_scale)
    for shared in ("input_scale", "weight_scale_2", "weight_scale"):
        if f"{q}.{shared}" in tensors and tensors[f"{q}.{shared}"].dim() == 0:
            assert tensors[f"{q}.{shared}"] == tensors[f"{k}.{shared}"]
            assert tensors[f"{q}.{shared}"] == tensors[f"{v}.{shared}"]
    left = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    for name in left:
        assert tensors[name].dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["fp8", "int8", "w8a8", "awq", "nvfp4", "mxfp4"])
def test_the_form_that_vllm_loads_has_the_same_model_and_keeps_its_codes(
    run, folders, tmp_path, method
):
    sizes = {"group_size": 32} if method == "awq" else {}
    config = QuantizeConfig(method=method, **CONFIG, **sizes)
    assert config.form == "compressed-tensors"
    receipt = quantize(run, tmp_path / "q", TEXT, config, tokenizer=ByteTokenizer())
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert not (tmp_path / "q" / "hf_quant_config.json").exists()
    assert not (tmp_path / "q" / "unified").exists()
    assert receipt.engines[0] == "vLLM"
    assert "Loads in: vLLM, transformers" in (tmp_path / "q" / "receipt.md").read_text()
    single, unified = ParallelContext.single(), folders[1][method]
    assert receipt.perplexity_after == pytest.approx(unified.perplexity_after, rel=1e-3)
    packed = load_model(tmp_path / "q", single, keep_codes=True).model
    assert all(isinstance(m.gemm, QuantizedGemm) for m in linears(packed).values())
    want = logits_of(load_model(folders[0] / method, single).model)
    # Where scales of inputs were folded, norms hold them in float32 instead of bfloat16.
    assert change_of(logits_of(packed), want) < (0.01 if method in ("w8a8", "awq") else 1e-5)


def test_experts_whose_inputs_nothing_can_scale_are_rounded_to_the_nearest(tmp_path):
    run = saved(tmp_path, SPARSE)
    config = QuantizeConfig(method="w8a8", **CONFIG)
    receipt = quantize(run, tmp_path / "q", TEXT, config)
    assert receipt.engines == ("transformers with compressed-tensors", "mcore-infer")
    named = {one.partition(":")[0] for one in receipt.fallbacks if "nearest" in one}
    assert {f"blocks.0.moe.experts.{expert}.fc1" for expert in range(4)} <= named
    assert not any("fc2: no previous layer" in one for one in receipt.fallbacks)
    single = ParallelContext.single()
    wide = load_model(tmp_path / "q", single).model
    assert change_of(logits_of(wide), logits_of(load_model(run, single).model)) < 0.1


def test_blocks_that_vllm_cannot_multiply_are_left_and_named(run, tmp_path):
    config = QuantizeConfig(method="fp8-block", **CONFIG)
    with pytest.raises(ValueError, match="64 outputs are not a multiple of 128, as vLLM"):
        quantize(run, tmp_path / "q", TEXT, config, tokenizer=ByteTokenizer())


def test_scales_of_the_cache_are_those_of_what_it_holds(run, folders):
    tensors = load_file(folders[0] / "fp8" / "model.safetensors")
    model = load_model(run, ParallelContext.single()).model
    ids = torch.tensor(list(TEXT.encode())[:384]).view(-1, 32)
    cache = StaticCache(32)
    with torch.no_grad():
        model(ids, state=cache)
    for layer in (0, 1):
        held = cache.layer(layer).held
        for one, kept in (("k", held.keys), ("v", held.values)):
            scale = tensors[f"model.layers.{layer}.self_attn.{one}_proj.{one}_scale"]
            torch.testing.assert_close(scale, kept.abs().amax() / 448, rtol=1e-5, atol=0)


def test_a_packed_model_writes_in_the_engine_what_it_writes_in_one_pass(folders):
    model = load_model(folders[0] / "awq", ParallelContext.single(), keep_codes=True).model
    engine = Engine(model, EngineConfig(max_sequence_tokens=48, page_tokens=8, num_pages=20))
    prompt = list(b"In the beginning")
    request = engine.add(prompt, SamplingConfig(num_tokens=5, top_k=1))
    written = dict(e for e in engine.run() if isinstance(e, tuple))[request].ids
    ids = list(prompt)
    for token in written:
        assert logits_of(model, torch.tensor([ids]))[-1].argmax() == token
        ids.append(token)


def logits_by_ranks(paths, keep_codes):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    found = []
    for path in paths:
        model = load_model(path, ctx, keep_codes=keep_codes).model
        kept = [isinstance(linear.gemm, QuantizedGemm) for linear in linears(model).values()]
        with torch.no_grad():
            hidden = model(TOKENS)[0]
        found.append((hidden.double(), sum(kept)))
    ctx.destroy()
    return found


@pytest.mark.parametrize("keep_codes", [False, True])
def test_two_ranks_hold_their_parts_of_codes_and_scales(folders, keep_codes):
    # 96 inputs of down_proj over 2 ranks cut groups of 32; those of 16 and rows stay whole.
    methods = ["fp8", "int8", "fp8-block", "w8a8", "awq", "nvfp4"]
    paths = [folders[0] / method for method in methods]
    single = ParallelContext.single()
    for rank in run_ranks(logits_by_ranks, 2, paths, keep_codes):
        for (hidden, kept), path in zip(rank, paths, strict=True):
            model = load_model(path, single).model
            with torch.no_grad():
                want = model(TOKENS)[0].double()
            assert change_of(hidden, want) < 1e-4, path.name
            whole = {"awq": 6, "fp8-block": 4}.get(path.name, 8)
            assert kept == (whole if keep_codes else 0), path.name


def test_an_expert_that_reads_nothing_is_rounded_and_named(tmp_path):
    def starve(model):
        router = model.blocks["0"].moe.router.weight
        router[1] = -router[0]  # one of the two is always above zero
        router[2:] = 0

    run = saved(tmp_path, SPARSE, starve)
    config = QuantizeConfig(method="fp8", format="hf-quant", **CONFIG)
    receipt = quantize(run, tmp_path / "fp8", TEXT, config)
    assert len(receipt.fallbacks) == 4
    assert all(".2.fc" in one or ".3.fc" in one for one in receipt.fallbacks)
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    assert all(torch.isfinite(t.float()).all() for t in tensors.values())
    scales = {n: t.item() for n, t in tensors.items() if n.endswith("input_scale")}
    starved = {n: t for n, t in scales.items() if "experts.2." in n or "experts.3." in n}
    assert len(starved) == 6
    assert set(starved.values()) == {max(scales.values())}
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert receipt.left["model.layers.0.mlp.gate"].startswith("chooses experts")
    said = json.loads((tmp_path / "fp8" / "hf_quant_config.json").read_text())
    assert "model.layers.0.mlp.gate" in said["quantization"]["exclude_modules"]
    gate, up = (f"model.layers.0.mlp.experts.1.{one}_proj" for one in ("gate", "up"))
    assert tensors[f"{gate}.weight_scale"] == tensors[f"{up}.weight_scale"]
    assert tensors[f"{gate}.weight"].dtype == torch.float8_e4m3fn
    single = ParallelContext.single()
    wide = load_model(tmp_path / "fp8", single).model
    assert change_of(logits_of(wide), logits_of(load_model(run, single).model)) < 0.1


def test_quantize_is_a_command_whose_folder_generates_and_is_judged(run, tmp_path, capsys):
    assert get_args(get_type_hints(QuantizeConfig)["method"]) == (*METHODS, "mixed")
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    (short := tmp_path / "short.txt").write_text(TEXT[:255])
    given = {
        "--load": str(run),
        "--method": "gptq",
        "--group-size": "16",
        "--calibration-data": str(text),
        "--calibration-tokens": "128",
        "--exclude-modules": "*.layers.0.self_attn.*",
        "--scored-tokens": "64",
        "--seq-length": "32",
        "--speed-tokens": "3",
        "--output": str(out),
    }

    def quantized(**changed):
        options = given | {
            f"--{key.replace('_', '-')}": value for key, value in changed.items()
        }
        return main(["quantize", *(word for pair in options.items() for word in pair)])

    assert quantized() == 0
    assert (
        "W4A16_GPTQ for vLLM, transformers with compressed-tensors, mcore-infer | perp"
        in capsys.readouterr().out
    )
    receipt = (out / "receipt.md").read_text()
    assert "| model.layers.0.self_attn.q_proj | was excluded |" in receipt
    assert "| tokens/s of one text | " in receipt
    ByteTokenizer().save(tmp_path / "bytes")
    model = ["--load", str(out), "--tokenizer", str(tmp_path / "bytes")]
    assert main(["generate", *model, "--prompt", "In", "--num-tokens", "3"]) == 0
    assert main(["eval", *model, "--valid-data", str(text)]) == 0
    assert "bits per byte" in capsys.readouterr().out
    fresh = str(tmp_path / "fresh")
    for changed, message in (
        ({}, "exists and is not empty"),
        ({"output": fresh, "exclude_modules": "nothing"}, "matches no module"),
        ({"output": fresh, "method": "int8"}, "--group-size 16 has no effect"),
        ({"output": fresh, "budget": "6"}, "--budget 6 with --method gptq"),
        (
            {"output": fresh, "method": "mixed", "budget": "6", "format": "compressed-tensors"},
            "has one layout for all modules",
        ),
        ({"output": fresh, "method": "mixed", "budget": "5"}, "below 6, the fewest"),
        ({"output": fresh, "method": "mixed", "budget": "16"}, "every matrix in 16 bits"),
        ({"output": fresh, "load": str(out), "tokenizer": model[3]}, "already quantized"),
        ({"output": fresh, "group_size": "40"}, "not a multiple of the group of 40"),
        (
            {"output": fresh, "calibration_data": str(short)},
            "255 tokens: give at least 256",
        ),
    ):
        assert quantized(**changed) == 2, changed
        said = capsys.readouterr()
        assert message in said.err
        assert "perplexity of" not in said.out + said.err  # nothing was computed before
        assert not (tmp_path / "fresh").exists()
