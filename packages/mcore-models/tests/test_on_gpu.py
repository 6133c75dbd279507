"""What runs differently on a GPU: attention kernels, fused kernels, compiled blocks."""

import math
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from warm_ranks import run_ranks

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels import flash4_attention
from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.fused_blocks import (
    CUDNN_BLOCKS,
    FLASH4_BLOCKS,
    FLASH_BLOCKS,
    blocks_for,
)
from mcore_parallel import ParallelContext
from mcore_parallel.context_parallel.all_gather_attention import all_gather_attention
from mcore_parallel.context_parallel.block_attention import PLAIN_BLOCKS
from mcore_parallel.context_parallel.packed_sequences import DocumentPieces, Documents
from mcore_parallel.context_parallel.ring_attention import ring_attention
from mcore_parallel.launch.launcher import deterministic_algorithms
from mcore_parallel.mesh import SINGLE

pytestmark = [
    pytest.mark.gpu,
    # Noise of torch's own compiler, on which no test can act.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # torch's compiler makes an instance of each autograd.Function that it meets.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def inputs(S, Z, N, G, H, dtype):
    torch.manual_seed(0)
    shapes = ((S, 2, N, H), (Z, 2, G, H), (Z, 2, G, H))
    return [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("S", "Z", "N", "G", "H"),
    [
        (256, 256, 8, 8, 128),
        (256, 256, 8, 2, 128),
        (200, 200, 6, 1, 64),
        (64, 320, 8, 2, 128),
        (1, 77, 8, 2, 128),
    ],
)
@pytest.mark.parametrize("window", [-1, 50])
def test_attention_kernels_equal_float64(dtype, S, Z, N, G, H, window):
    tensors = inputs(S, Z, N, G, H, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    got, want = attend(*tensors, window=window), attend(*wide, window=window)
    dy = torch.randn_like(got)
    assert error(got.detach(), want.detach()) < TOLERANCE[dtype]
    grads = torch.autograd.grad(got, tensors, dy)
    for a, b in zip(grads, torch.autograd.grad(want, wide, dy.double()), strict=True):
        assert error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize(("S", "Z"), [(512, 512), (512, 1024)])
def test_causal_attention_runs_in_a_fused_kernel(S, Z):
    tensors = inputs(S, Z, 8, 2, 128, torch.bfloat16)
    attend(*tensors)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        attend(*tensors)
    kernels = " ".join(event.key for event in seen.key_averages())
    assert "cudnn" in kernels if S == Z else ("cudnn" in kernels or "flash" in kernels), kernels


DOCUMENTS = Documents([[0, 1, 100, 260, 512], [0, 333, 512]])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("N", "G", "H", "blocks"),
    [
        *((*s, b) for s in ((8, 2, 128), (4, 4, 64), (6, 1, 96)) for b in ("cudnn", "flash")),
        (4, 2, 136, "flash"),
        (4, 2, 256, "flash"),
    ],
)
@pytest.mark.parametrize("attention", [ring_attention, all_gather_attention])
def test_fused_blocks_equal_plain_ones(attention, N, G, H, documents, blocks):
    tensors = inputs(512, 512, N, G, H, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    chosen = CUDNN_BLOCKS if H <= 128 else FLASH_BLOCKS
    assert blocks_for(tensors[0], tensors[2]) is chosen
    assert blocks_for(tensors[0], tensors[2], "flash") is FLASH_BLOCKS
    blocks = {"cudnn": CUDNN_BLOCKS, "flash": FLASH_BLOCKS}[blocks]
    got = attention(*tensors, SINGLE, blocks, documents)
    want = attention(*wide, SINGLE, PLAIN_BLOCKS, documents)
    dy = torch.randn_like(got)
    assert error(got.detach(), want.detach()) < TOLERANCE[torch.bfloat16]
    grads = torch.autograd.grad(got, tensors, dy)
    for a, b in zip(grads, torch.autograd.grad(want, wide, dy.double()), strict=True):
        assert error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pieces", [None, DocumentPieces([0, 300])], ids=["dense", "packed"])
@pytest.mark.parametrize("blocks", [CUDNN_BLOCKS, FLASH_BLOCKS], ids=["cudnn", "flash"])
def test_a_fused_block_tells_the_log_sum_exp_and_takes_that_of_all_blocks(
    blocks, causal, pieces
):
    tensors = inputs(300, 300, 8, 2, 128, torch.bfloat16)
    q, k, v = (t.detach()[:, :1] for t in tensors)
    wide = [t.double() for t in (q, k, v)]
    out, lse = blocks.forward(q, k, v, causal, pieces)
    want_out, want_lse = PLAIN_BLOCKS.forward(*wide, causal, pieces)
    assert error(out, want_out) < TOLERANCE[torch.bfloat16]
    # The scores are sums of products of bfloat16 numbers in float32.
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    # As if another block, of as large scores again, had been merged in.
    out, lse = want_out * 0.5, want_lse + math.log(2.0)
    dy = torch.randn_like(q)
    got = blocks.backward(dy, q, k, v, out.bfloat16(), lse.float(), causal, pieces)
    want = PLAIN_BLOCKS.backward(dy.double(), *wide, out, lse, causal, pieces)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < TOLERANCE[torch.bfloat16]


has_flash4 = pytest.mark.skipif(
    not flash4_attention.is_installed(), reason="flash-attn-4 is not installed"
)


@has_flash4
@pytest.mark.parametrize(
    ("S", "Z", "B", "N", "G", "H"),
    [
        (1024, 1024, 2, 8, 8, 128),
        (1024, 1024, 2, 8, 2, 128),
        (1500, 1500, 1, 6, 1, 64),
        (512, 2048, 2, 8, 2, 128),
        (8192, 8192, 1, 32, 8, 128),
    ],
)
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (True, 100), (False, -1)])
def test_flash4_equals_plain_float32(S, Z, B, N, G, H, causal, window):
    torch.manual_seed(0)
    shapes = ((S, B, N, H), (Z, B, G, H), (Z, B, G, H))
    tensors = [
        torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes
    ]
    wide = [t.detach().float().requires_grad_() for t in tensors]
    options = {"causal": causal, "window": window}
    got = attend(*tensors, **options, backend="flash4")
    want = attend(*wide, **options, backend="unfused" if S < 8192 else "auto")
    dy = torch.randn_like(got)
    assert error(got.detach(), want.detach().double()) < TOLERANCE[torch.bfloat16]
    grads = torch.autograd.grad(got, tensors, dy)
    for a, b in zip(grads, torch.autograd.grad(want, wide, dy.float()), strict=True):
        assert error(a, b.double()) < TOLERANCE[torch.bfloat16]


@has_flash4
def test_flash4_is_chosen_for_long_sequences_and_deterministic_when_asked():
    tensors = inputs(2048, 2048, 8, 2, 128, torch.bfloat16)
    attend(*tensors)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        attend(*tensors)
    kernels = " ".join(event.key for event in seen.key_averages())
    assert "cudnn" not in kernels, kernels
    with deterministic_algorithms():
        runs = []
        for _ in range(3):
            out = attend(*tensors)
            runs.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@has_flash4
@pytest.mark.parametrize("causal", [True, False])
def test_flash4_blocks_of_a_ring_equal_plain_ones(causal):
    q, k, v = (t.detach() for t in inputs(1024, 1024, 8, 2, 128, torch.bfloat16))
    dy = torch.randn_like(q)
    got_out, got_lse = FLASH4_BLOCKS.forward(q, k, v, causal, None)
    want_out, want_lse = PLAIN_BLOCKS.forward(q.double(), k.double(), v.double(), causal, None)
    assert error(got_out, want_out) < TOLERANCE[torch.bfloat16]
    assert error(got_lse, want_lse) < TOLERANCE[torch.bfloat16]
    got = FLASH4_BLOCKS.backward(dy, q, k, v, got_out, got_lse, causal, None)
    wide = [t.double() for t in (dy, q, k, v)]
    want = PLAIN_BLOCKS.backward(*wide, want_out, want_lse, causal, None)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [-1, 50])
def test_packed_attention_without_a_mask_equals_float64(window):
    tensors = inputs(512, 512, 8, 2, 128, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    got = attend(*tensors, window=window, documents=DOCUMENTS)
    want = attend(*wide, window=window, documents=DOCUMENTS)
    dy = torch.randn_like(got)
    assert error(got.detach(), want.detach()) < TOLERANCE[torch.bfloat16]
    grads = torch.autograd.grad(got, tensors, dy)
    for a, b in zip(grads, torch.autograd.grad(want, wide, dy.double()), strict=True):
        assert error(a, b) < TOLERANCE[torch.bfloat16]


SHAPES = {
    "llama": {"num_query_groups": 2},
    "qk norm": {"num_query_groups": 2, "qk_layernorm": True},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "openai_gelu": True,
        "add_bias_linear": True,
    },
    "hybrid": {
        "hybrid_override_pattern": "[M-][G-]",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_num_groups": 2,
    },
}


def step(shape, dtype, compiled=False):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=256,
        init_method_std=0.05,
        **SHAPES[shape],
    )
    ctx = ParallelContext.single("cuda")
    model = GPT(config, ctx, vocab_size=1000, dtype=dtype)
    with torch.no_grad():  # all dtypes begin from the same rounded numbers
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    if compiled:
        for block in model.blocks.values():
            block.compile()
    ids = torch.arange(2 * 256, device="cuda").view(2, 256) * 7919 % 1000
    hidden, _ = model(ids)
    weights = torch.full((2, 256), 1 / 512, device="cuda")
    total, losses = model.loss(hidden, ids.roll(-1, 1), weights)
    total.backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


def check_near_float64(shape, dtype, compiled):
    torch.backends.cuda.matmul.allow_tf32 = False
    want_losses, want = step(shape, torch.float64)
    losses, grads = step(shape, dtype, compiled)
    assert error(losses, want_losses) < TOLERANCE[dtype]
    largest = max(grad.abs().max() for grad in want.values())
    for name, grad in grads.items():
        scale = max(want[name].abs().max(), 1e-3 * largest)
        # Gradients of a bf16 model carry the rounding of every layer between: 4 times one's.
        # A decay's are differences of far larger sums: plain torch on a CPU, in float32, is off
        # by 1.4e-4 of the gated delta net's.
        of_decay = name.endswith(("A_log", "dt_bias"))
        bound = (20 if of_decay and dtype is torch.float32 else 4) * TOLERANCE[dtype]
        assert (grad.double() - want[name]).abs().max() / scale < bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_with_fused_kernels_is_near_float64(shape, dtype):
    check_near_float64(shape, dtype, compiled=False)


def check_compiled():
    warnings.simplefilter("default")  # of torch's own compiler, on which no test can act
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            check_near_float64(shape, dtype, compiled=True)


def test_a_compiled_model_is_near_float64():
    run_ranks(check_compiled, 1, check_shapes=False, timeout_s=280.0)
