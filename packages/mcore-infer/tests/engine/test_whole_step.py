"""A decoding step as one kernel: which models it computes, and what it computes on a GPU."""

import pytest
import torch

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_infer import Engine, EngineConfig, SamplingConfig
from mcore_infer.engine.few_rows_gemm import use_few_rows_gemm
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.step_layout import DecodeTensors
from mcore_infer.engine.whole_step.whole_step import (
    WHOLE_STEP_KERNEL,
    WholeStep,
    compiled,
    computes,
    first_run,
)
from mcore_infer.quantization.loading import round_to_nearest_
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.peft.attaching import attach_adapters, merge_adapters
from mcore_models.peft.config import PeftConfig
from mcore_parallel import optional_kernels
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import RngStreams

SIZES = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 64,
    "ffn_hidden_size": 640,
    "max_position_embeddings": 1024,
    "init_method_std": 0.1,
}
MACROS = {
    "ROWS": 3,
    "D": 256,
    "F": 640,
    "HEADS": 6,
    "GROUPS": 2,
    "H": 64,
    "PAGE": 16,
    "SPLITS": 2,
    "STAGES": 5,
    "CODES": 1,
    "TALL": 1,
    "DRAFTS": 1,
    "EPSILON": 1e-5,
    "OFFSET": 0.0,
    "SCALE": 0.125,
}


def built(device="cpu", **changes):
    config = TransformerConfig(**{**SIZES, **changes})
    model = GPT(config, ParallelContext.single(device), vocab_size=500, dtype=torch.bfloat16)
    use_few_rows_gemm(model)
    return model.eval()


def test_the_kernel_compiles_for_an_h100_and_spills_nothing():
    """What is spilled of a model's layers is read back through the memory that weights fill."""
    pytest.importorskip("cuda.bindings.nvrtc")
    llama = {"ROWS": 1, "D": 4096, "F": 14336, "HEADS": 32, "GROUPS": 8, "H": 128}
    llama |= {"PAGE": 64, "SPLITS": 16, "STAGES": 11, "CODES": 0, "TALL": 0, "DRAFTS": 0}
    for sizes in (MACROS, {**MACROS, **llama}):
        binary = compiled(sizes, "90")
        assert binary.count(b"whole_step")
        place = binary.index(b"\x04\x12\x08\x00")  # of the ELF's note of the stack
        assert int.from_bytes(binary[place + 8 : place + 12], "little") == 0


@pytest.mark.parametrize(
    ("changes", "is_computed"),
    [
        ({}, True),
        ({"qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 128}, True),
        ({"normalization": "LayerNorm"}, False),
        ({"swiglu": False}, False),
        ({"swiglu": False, "geglu": True}, False),
        ({"add_bias_linear": True}, False),
        ({"window_size": (16, 0)}, False),
        ({"parallel_residual": "one_norm"}, False),
        ({"rotary_percent": 0.5}, False),
        ({"attention_temperature_span": 16, "attention_temperature_layers": "all"}, False),
        ({"hidden_size": 288}, False),
    ],
)
def test_layers_that_the_kernel_does_not_have_are_left_to_torch(changes, is_computed):
    assert computes(built(**changes), PagedCache(1, 16)) == is_computed


def test_layers_with_adapters_hooks_or_another_forward_are_left_to_torch():
    adapted, hooked, patched = built(), built(), built()
    streams = RngStreams(0, ParallelContext.single())
    attach_adapters(adapted, PeftConfig(peft="lora"), streams=streams)
    hooked.blocks["1"].mlp_norm.register_forward_pre_hook(lambda _, inputs: inputs)
    patched.blocks["1"].mlp.forward = lambda x: x
    for model in (adapted, hooked, patched):
        assert not computes(model, PagedCache(1, 16))
    merge_adapters(adapted)
    assert computes(adapted, PagedCache(1, 16))


def test_a_kernel_that_fails_at_the_sizes_of_a_model_leaves_steps_to_torch(monkeypatch, caplog):
    """Tried before on smaller ones; on a CPU, where it cannot be loaded."""
    kind, device = (64, False, 0, False, False), torch.device("cpu")
    tried = {(WHOLE_STEP_KERNEL, device, kind): ""}
    monkeypatch.setattr(optional_kernels, "_FAILURES", tried)
    inputs = DecodeTensors(1, 1, device, num_drafts=0)
    assert first_run(built(), PagedCache(1, 16), inputs, kind) is None
    assert not optional_kernels.works(WHOLE_STEP_KERNEL, device, *kind)
    assert ["the kernel of whole decoding" in one.getMessage() for one in caplog.records] == [
        True
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("H", "algo", "lengths", "num_drafts"),
    [
        (64, "", (2, 400, 16, 17), 0),
        (128, "", (70, 71, 1), 2),
        (128, "FP8", (1,), 0),
        (64, "FP8_PER_CHANNEL_PER_TOKEN", (33, 300), 0),
    ],
)
def test_the_kernel_computes_what_the_layers_do(H, algo, lengths, num_drafts):
    """Rows of texts of several lengths, and two of one text."""
    torch.manual_seed(0)
    model = built("cuda", kv_channels=H, qk_layernorm=H == 64, add_qkv_bias=H == 128)
    if algo:
        round_to_nearest_(model, LAYOUTS[algo])
    cache = PagedCache(104, 16 if H == 64 else 48)
    pages = torch.randperm(104).view(4, 26).tolist()
    if num_drafts:
        pages[1] = pages[0]
    inputs = DecodeTensors(len(lengths), 26, torch.device("cuda"), num_drafts=num_drafts)
    chunks = [
        Chunk(i, i, length - 1, (7 * i + 3,), tuple(own), wants_token=True)
        for i, (length, own) in enumerate(zip(lengths, pages, strict=False))
    ]
    inputs.fill(Step(tuple(chunks)), cache.page_tokens, cache.padding)
    cache.step = inputs
    with torch.no_grad():
        model(inputs.tokens, inputs.positions, cache)
        held = [cache.layer(layer).held for layer in range(2)]
        held = [memory for layer in held for memory in (layer.keys, layer.values)]
        for memory in held:
            memory.normal_()
        step = WholeStep(model, cache, inputs)
        for _ in range(2):  # its counters are zeros again
            got = step.hidden()
        written = [memory.clone() for memory in held]
        want, _ = model(inputs.tokens, inputs.positions, cache)
    for row, wanted in zip(got.double(), want.double(), strict=True):
        assert (row - wanted).norm() < 0.02 * wanted.norm()
    for memory, wanted in zip(written, held, strict=True):
        assert (memory.double() - wanted.double()).abs().max() < 0.1


@pytest.mark.gpu
def test_texts_of_the_kernel_are_the_likeliest_by_whole_forwards():
    """Requests that come and go, over the borders of pages."""
    model = built("cuda", num_layers=3)
    limits = EngineConfig(max_sequence_tokens=256, page_tokens=16, max_requests=4, num_pages=80)
    engine = Engine(model, limits)
    prompts = [list(range(i, 10 + 31 * i)) for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add(prompt, SamplingConfig(num_tokens=20 + 7 * i, top_k=1))
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *done[i].ids]], device="cuda")
        with torch.no_grad():
            scores = model.logits(model(ids[:, :-1])[0])[len(prompt) - 1 :, 0, :500].double()
        chosen = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (scores.max(1).values - chosen).max() < 0.1 * scores.std()
