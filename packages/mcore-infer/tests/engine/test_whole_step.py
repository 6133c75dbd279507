"""A decoding step as one kernel: which models it computes, and what it computes on GPUs."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_infer import Engine, EngineConfig, SamplingConfig, ScoreRequest
from mcore_infer.engine.few_rows_gemm import use_few_rows_gemm
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.stages import last_stage_logits
from mcore_infer.engine.step_layout import DecodeTensors
from mcore_infer.engine.whole_step import whole_step as kernel
from mcore_infer.engine.whole_step.whole_step import (
    BUFFERS,
    WHOLE_STEP_KERNEL,
    Inboxes,
    WholeStep,
    compiled,
    computes,
    first_run,
    whole_step,
)
from mcore_infer.quantization.loading import round_to_nearest_
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.peft.attaching import attach_adapters, merge_adapters
from mcore_models.peft.config import PeftConfig
from mcore_parallel import optional_kernels
from mcore_parallel.collectives import all_gather
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import (
    initialize,
    launch_local,
    read_environment,
    shut_down,
)
from mcore_parallel.mesh import SINGLE, ParallelContext
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
    "RANKS": 1,
    "BUFFERS": BUFFERS,
    "PATIENCE": 1,
}


def built(device="cpu", ctx=None, **changes):
    config = TransformerConfig(**{**SIZES, **changes})
    ctx = ctx or ParallelContext.single(device)
    model = GPT(config, ctx, vocab_size=500, dtype=torch.bfloat16, device=device)
    use_few_rows_gemm(model)
    return model.eval()


def test_the_kernel_compiles_for_an_h100_and_spills_nothing():
    """What is spilled of a model's layers is read back through the memory that weights fill."""
    pytest.importorskip("cuda.bindings.nvrtc")
    llama = {"ROWS": 1, "D": 4096, "F": 14336, "HEADS": 32, "GROUPS": 8, "H": 128}
    llama |= {"PAGE": 64, "SPLITS": 16, "STAGES": 11, "CODES": 0, "TALL": 0, "DRAFTS": 0}
    of_four = {**llama, "F": 3584, "HEADS": 8, "GROUPS": 2, "CODES": 1, "RANKS": 4}
    for sizes in (MACROS, {**MACROS, **llama}, {**MACROS, **of_four}):
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
    kind, device = (64, False, 0, False, False, SINGLE), torch.device("cpu")
    tried = {(WHOLE_STEP_KERNEL, device, kind): ""}
    monkeypatch.setattr(optional_kernels, "_FAILURES", tried)
    inputs = DecodeTensors(1, 1, device, num_drafts=0)
    assert first_run(built(), PagedCache(1, 16), inputs, kind) is None
    assert not optional_kernels.works(WHOLE_STEP_KERNEL, device, *kind)
    assert ["the kernel of whole decoding" in one.getMessage() for one in caplog.records] == [
        True
    ]


def on_four_ranks():
    """Sizes of ranks that share two key/value heads; what happens if one rank cannot."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=4))
    model = built(ctx=ctx, num_attention_heads=24, ffn_hidden_size=2560)
    inputs = DecodeTensors(1, 1, torch.device("cpu"), num_drafts=0)
    cpu, cache = torch.device("cpu"), PagedCache(1, 16)
    with pytest.MonkeyPatch.context() as patch:
        of_device = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: of_device)
        sizes = kernel._sizes(model, cache, inputs)
        shapes = [tuple(x.weight.shape) for x in kernel._linears(model.blocks["1"])]
        # A rank with an older GPU: no rank takes the kernel.
        capability = 8 if ctx.tp.rank == 1 else 9, 0
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        taken = whole_step(model, cache, inputs)
        # A rank without symmetric memory: all ranks raise, and none waits for the others.
        memory = SimpleNamespace(empty=torch.empty) if ctx.tp.rank else None
        patch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        with pytest.raises((ImportError, RuntimeError)) as raised:
            Inboxes(8, ctx.tp, cpu)
    return computes(model, cache), sizes, shapes, taken, str(raised.value)


def test_ranks_have_their_heads_and_all_fall_back_together():
    for rank, (is_computed, sizes, shapes, taken, error) in enumerate(
        run_ranks(on_four_ranks, 4)
    ):
        D, F, N, G, H = (sizes[name] for name in ("D", "F", "HEADS", "GROUPS", "H"))
        assert is_computed
        assert (sizes["RANKS"], N, G, F) == (4, 6, 1, 640)
        assert shapes == [((N + 2 * G) * H, D), (D, N * H), (2 * F, D), (D, F)]
        assert taken is None
        assert "_symmetric_memory" in error
        assert ("1 of 4 ranks failed" in error) == (rank > 0)


def has_deadlock(num_ranks, num_buffers, num_exchanges=4):
    """Whether any order of the ranks' writes and reads loses a partial sum.

    A rank writes its number of exchange n to each inbox, and then waits until all numbers in
    its own inbox are n, as ``join_ranks`` does.
    """
    done = num_exchanges * (num_ranks + 1)
    first = ((0,) * num_ranks, ((0,) * (num_ranks * num_ranks * num_buffers)))
    states, seen = [first], {first}
    while states:
        ends, inboxes = states.pop()
        next_states = []
        for rank, end in enumerate(ends):
            exchange, turn = end // (num_ranks + 1) + 1, end % (num_ranks + 1)
            if end == done:
                continue
            buffer, after = exchange % num_buffers, list(inboxes)
            if turn < num_ranks:  # write to the inbox of rank ``turn``
                after[(turn * num_buffers + buffer) * num_ranks + rank] = exchange
            else:
                at = (rank * num_buffers + buffer) * num_ranks
                if set(inboxes[at : at + num_ranks]) != {exchange}:
                    continue
            moved = *ends[:rank], end + 1, *ends[rank + 1 :]
            next_states.append((moved, tuple(after)))
        if not next_states and set(ends) != {done}:
            return True
        states += [state for state in next_states if state not in seen]
        seen.update(next_states)
    return False


def test_two_buffers_suffice_for_no_rank_to_overwrite_unread_sums():
    assert not has_deadlock(2, BUFFERS)
    assert has_deadlock(2, BUFFERS - 1)


def compare_with_layers(ctx, H, algo, lengths, num_drafts, shares_heads=False):
    """Compare the kernel with the layers, for texts of several lengths, on each tensor rank."""
    torch.manual_seed(0)
    tp, device = ctx.tp, ctx.device
    changes = {"num_attention_heads": 6 * tp.size, "ffn_hidden_size": 640 * tp.size}
    changes["num_query_groups"] = 2 * (1 if shares_heads else tp.size)
    changes |= {"kv_channels": H, "qk_layernorm": H == 64, "add_qkv_bias": H == 128}
    model = built(device, ctx, **changes)
    if algo:
        round_to_nearest_(model, LAYOUTS[algo])
    cache = PagedCache(104, 16 if H == 64 else 48)
    pages = torch.randperm(104).view(4, 26).tolist()
    if num_drafts:
        pages[1] = pages[0]
    inputs = DecodeTensors(len(lengths), 26, device, num_drafts=num_drafts)
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
        results = [step.hidden() for _ in range(5)]  # its counters are zeros again
        written = [memory.clone() for memory in held]
        want, _ = model(inputs.tokens, inputs.positions, cache)
        got_logits, want_logits = (last_stage_logits(model, x) for x in (results[-1], want))
    for got in results:
        bits = got.view(torch.int32)[None]
        assert (all_gather(bits, tp) == bits).all()
        for row, wanted in zip(got.double(), want.double(), strict=True):
            assert (row - wanted).norm() < 0.02 * wanted.norm()
    for row, wanted in zip(got_logits.double(), want_logits.double(), strict=True):
        assert (row - wanted).norm() < 0.02 * wanted.norm()
    for memory, wanted in zip(written, held, strict=True):
        assert (memory.double() - wanted.double()).abs().max() < 0.1


CASES = [
    (64, "", (2, 400, 16, 17), 0),
    (128, "", (70, 71, 1), 2),
    (128, "FP8", (1,), 0),
    (64, "FP8_PER_CHANNEL_PER_TOKEN", (33, 300), 0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "algo", "lengths", "num_drafts"), CASES)
def test_the_kernel_computes_what_the_layers_do(H, algo, lengths, num_drafts):
    ctx = ParallelContext.single(torch.device("cuda"))
    compare_with_layers(ctx, H, algo, lengths, num_drafts)


PROMPTS = [list(range(i, 10 + 31 * i)) for i in range(6)]


def write_texts(model):
    """Write a text for each of ``PROMPTS``, over several pages; return texts and engine."""
    limits = EngineConfig(max_sequence_tokens=256, page_tokens=16, max_requests=4, num_pages=80)
    engine = Engine(model, limits)
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingConfig(num_tokens=20 + 7 * i, top_k=1)
        engine.add(prompt, sampling, scores=ScoreRequest(num_top=4))
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    return [done[i] for i in range(len(PROMPTS))], engine


@pytest.mark.gpu
def test_texts_of_the_kernel_are_the_likeliest_by_whole_forwards():
    model = built("cuda", num_layers=3)
    for prompt, text in zip(PROMPTS, write_texts(model)[0], strict=True):
        ids = torch.tensor([[*prompt, *text.ids]], device="cuda")
        with torch.no_grad():
            scores = model.logits(model(ids[:, :-1])[0])[len(prompt) - 1 :, 0, :500].double()
        chosen = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (scores.max(1).values - chosen).max() < 0.1 * scores.std()


def compare_texts(ctx, algo):
    """Compare the kernel's tokens with the layers', up to the first equally likely choice."""
    torch.manual_seed(1)
    changes = {"num_attention_heads": 6 * ctx.tp.size, "num_query_groups": 2 * ctx.tp.size}
    model = built(ctx.device, ctx, num_layers=3, ffn_hidden_size=640 * ctx.tp.size, **changes)
    if algo:
        round_to_nearest_(model, LAYOUTS[algo])
    texts, engine = write_texts(model)
    assert whole_step(model, engine.cache, engine.decoder._inputs[1]) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "MOST_ROWS", 0)
        by_layers, _ = write_texts(model)
    num_equal = 0
    for text, wanted in zip(texts, by_layers, strict=True):
        ids = torch.tensor([text.ids], device=ctx.device)
        assert (all_gather(ids, ctx.tp) == ids).all()
        differ = [
            i
            for i, pair in enumerate(zip(text.ids, wanted.ids, strict=True))
            if pair[0] != pair[1]
        ]
        num_equal += differ[0] if differ else len(wanted.ids)
        if differ:
            likeliest = wanted.top[differ[0]]
            assert dict(likeliest)[text.ids[differ[0]]] > likeliest[0][1] - 0.1
    print(f"tp {ctx.tp.size}, {algo or 'bf16'}: {num_equal} tokens equal", flush=True)
    assert num_equal > 50


def compare_over_gpus(ctx):
    for shares_heads in (False, True)[: 1 + (ctx.tp.size > 2)]:
        for case in CASES:
            compare_with_layers(ctx, *case, shares_heads)
            print(f"tp {ctx.tp.size}, {case}, {shares_heads}: equal", flush=True)
    for algo in ("", "FP8"):
        compare_texts(ctx, algo)


def wait_alone(ctx):
    """Rank 0 launches the kernel, the other ranks do not: it ends with an error."""
    kernel._TIMEOUT_CYCLES = 200_000_000
    model = built(ctx.device, ctx, num_query_groups=2, num_attention_heads=4)
    cache, inputs = PagedCache(4, 16), DecodeTensors(1, 1, ctx.device, num_drafts=0)
    inputs.fill(Step(()), cache.page_tokens, cache.padding)
    cache.step = inputs
    with torch.no_grad():
        model(inputs.tokens, inputs.positions, cache)
        step = WholeStep(model, cache, inputs)
        if ctx.tp.rank:
            model.embedded(inputs.tokens, inputs.positions)  # its all-reduce has rank 0
            torch.cuda.synchronize()
        else:
            step.hidden()
            with pytest.raises(RuntimeError, match="assert"):
                torch.cuda.synchronize()
    print(f"rank {ctx.tp.rank} ended", flush=True)
    os._exit(0)  # the device of rank 0 is lost


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "check"), [(2, "compare"), (4, "compare"), (2, "alone")])
def test_the_kernel_over_tensor_ranks(world, check, monkeypatch):
    """Equal to the layers over the same ranks; a wait for a rank that never sends times out."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # with warm_ranks
    assert launch_local([sys.executable, str(Path(__file__)), check], world) == 0


def check_over_gpus(check):
    device = initialize("cuda")
    config = ParallelConfig(tensor_model_parallel_size=read_environment().world_size)
    ctx = ParallelContext.build(config, device)
    (wait_alone if check == "alone" else compare_over_gpus)(ctx)
    ctx.destroy()
    shut_down()


if __name__ == "__main__" and "RANK" in os.environ:
    check_over_gpus(sys.argv[1])
