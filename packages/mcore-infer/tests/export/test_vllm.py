"""Folders of every method in vLLM, where it is installed: it loads them and scores as we do.

One process of vLLM loads all folders, one after the other: starting it takes half a minute.
"""

import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.evaluation.scoring import counted_losses, plan_windows
from mcore_infer.loading import load_model
from mcore_infer.quantization.loading import linears
from mcore_moe.experts import experts
from mcore_parallel.mesh import ParallelContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # all folders are made and loaded for the first test
    pytest.mark.filterwarnings("ignore"),  # of packages that are not ours
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 257,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
METHODS = ("fp8", "fp8-channel", "fp8-block", "int8", "w8a8", "awq", "gptq", "nvfp4", "mxfp4")
UNIFIED = ("fp8", "fp8-channel", "nvfp4")
"""Which vLLM loads in that form too."""
CASES = [
    *[("Llama", method, "compressed-tensors") for method in METHODS],
    *[("Qwen3Moe", method, "compressed-tensors") for method in METHODS if method != "w8a8"],
    *[("Llama", method, "hf-quant") for method in UNIFIED],
]
NAMES = ("kind", "method", "form")
NUM_SCORED = 768
RTOL = 0.01
"""Of perplexity: activations in bfloat16, and fp8 inputs that vLLM rounds in its own kernels.
A wrong scale of one matrix changes it by more than 5 %."""
GROUP = 128
"""Inputs that share a scale in vLLM's GEMMs of fp8-block; ours are not rounded, and rounding
them moves the perplexity of these random models by more than 1 %."""

SCORER = """
import gc, json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# By default it rounds the scales of fp8-block to powers of two, as Blackwell needs them.
os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

ids, found = json.loads(sys.argv[1]), {}
sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
for folder in sys.argv[3:]:
    llm = None
    try:
        llm = LLM(
            model=folder, dtype="bfloat16", enforce_eager=True, gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=2**30, max_model_len=len(ids) + 8, max_num_seqs=4,
            skip_tokenizer_init=True, enable_prefix_caching=False,
        )
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=ids), sampling, use_tqdm=False)
        scores = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        found[folder] = [entry[token].logprob for token, entry in scores]
    except Exception as error:
        found[folder] = f"{type(error).__name__}: {error}"
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
"""


@pytest.fixture(scope="module")
def scores(request, tmp_path_factory, save_random, quantize_folder):
    """Log probabilities of the scored text by case, or what vLLM refuses the folder with.

    Only of the cases that were selected: all of them take more than 9 minutes on an H100.
    """
    items = [item for item in request.session.items if item.module is request.module]
    selected = [tuple(item.callspec.params[name] for name in NAMES) for item in items]
    path = tmp_path_factory.mktemp("vllm")
    ByteTokenizer().save(path / "bytes")
    draw = random.Random(0)
    text = "".join(draw.choice("etaoin shrdlu ETAOIN,.") for _ in range(2048))
    (path / "text.txt").write_text(text)
    folders = {}
    for kind, method, form in selected:
        plain, folder = path / kind, path / f"{kind}-{method}-{form}"
        sizes = SIZES | (EXPERTS if kind == "Qwen3Moe" else {})
        save_random(plain, kind, sizes, std=0.05, dtype=torch.bfloat16)
        counts = ["--calibration-tokens", 1024, "--scored-tokens", NUM_SCORED]
        counts += ["--seq-length", 1024]  # the scored text is one window
        quantize_folder(path, plain, folder, method, form, *counts)
        folders[kind, method, form] = folder
    ids = [ByteTokenizer().eod, *text[1024 : 1024 + NUM_SCORED].encode()]
    (path / "scorer.py").write_text(SCORER)
    command = [sys.executable, path / "scorer.py", json.dumps(ids), path / "found.json"]
    subprocess.run([*map(str, command), *map(str, folders.values())], check=False)
    found = json.loads((path / "found.json").read_text())
    return {case: (folder, found.get(str(folder)), ids) for case, folder in folders.items()}


def round_by_groups(x):
    """Round inputs to fp8 as vLLM does: each group of channels of a token has a scale."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def perplexity_with_rounded_inputs(folder, scored, monkeypatch):
    """Score a fp8-block folder by our model, whose quantized matrices read rounded inputs."""
    for name in ("sequential_linear", "grouped_linear"):
        linear = getattr(experts, name)
        rounding = lambda x, *args, linear=linear: linear(round_by_groups(x), *args)  # noqa: E731
        monkeypatch.setattr(experts, name, rounding)
    loaded = load_model(folder, ParallelContext.single("cpu"), keep_codes=False)
    for path, module in linears(loaded.model).items():
        if path.startswith("blocks"):
            module.register_forward_pre_hook(
                lambda _, args: (round_by_groups(args[0]), *args[1:])
            )
    windows = plan_windows([len(scored)], 1024, 512)
    begin = ByteTokenizer().eod
    losses = counted_losses(loaded.model, [scored], windows, begin_token=begin, batch=1)
    return math.exp(sum(each.sum().item() for each in losses) / len(scored))


@pytest.mark.parametrize(NAMES, CASES)
def test_vllm_loads_what_quantize_writes_with_the_perplexity_of_its_receipt(
    scores, kind, method, form, monkeypatch
):
    folder, log_probs, ids = scores[kind, method, form]
    assert isinstance(log_probs, list), log_probs
    receipt = json.loads((Path(folder) / "receipt.json").read_text())
    assert "vLLM" in receipt["engines"]
    assert receipt["scored_tokens"] == len(log_probs) == NUM_SCORED
    perplexity = math.exp(-sum(log_probs) / len(log_probs))
    print(kind, method, form, receipt["perplexity_before"], receipt["perplexity_after"])
    print("vLLM", perplexity)
    expected = receipt["perplexity_after"]
    if method == "fp8-block":
        expected = perplexity_with_rounded_inputs(folder, ids[1:], monkeypatch)
    assert perplexity == pytest.approx(expected, rel=RTOL)
