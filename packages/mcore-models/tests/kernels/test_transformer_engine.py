"""``--transformer-impl transformer_engine`` without a GPU: what is called, and what stays.

The library's published signatures are written in plain torch here. They show who calls what in
which layout; what the library itself computes, tests on a GPU show.
"""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.transformer_engine import use_transformer_engine
from mcore_models.layers.layer_setup import Execution
from mcore_moe.config import MoEConfig
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.kernels.fp8_cast import cast_plain, dequantized
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import Fp8Gemm, WeightCasts, delayed_scales, layer_gemms
from mcore_parallel.precision.fp8_recipes import Rowwise
from mcore_parallel.precision.transformer_engine import EXTRA, by_transformer_engine, refusal
from mcore_parallel.sharding import named_shards

CALLS = []


class Quantized(torch.Tensor):
    """A matrix worth what it rounds to in fp8; autograd may save it."""

    @staticmethod
    def of(x, dtype, amax):
        own = cast_plain(x, amax, dtype)
        return dequantized(own.rows, own.scale_inv).to(x.dtype).as_subclass(Quantized)

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        assert rowwise_usage is False
        assert columnwise_usage is None


class DType:
    kFloat8E4M3, kFloat8E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # noqa: N815


class Float8CurrentScalingQuantizer:
    def __init__(
        self, fp8_dtype, device, *, with_amax_reduction=False, amax_reduction_group=None
    ):
        assert with_amax_reduction == (amax_reduction_group is not None)
        self.dtype, self.group = fp8_dtype, amax_reduction_group

    def __call__(self, x):
        amax = x.abs().amax().float().view(1)
        if self.group is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, self.group)
        return Quantized.of(x, self.dtype, amax)


class Float8Quantizer:
    def __init__(self, scale, amax, fp8_dtype):
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def __call__(self, x):
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax().float()))
        return Quantized.of(x, self.dtype, torch.finfo(self.dtype).max / self.scale)


def general_gemm(
    A,
    B,
    out_dtype=None,
    layout="TN",
    out=None,
    accumulate=False,
    use_split_accumulator=False,
    grad=False,
):
    assert grad == use_split_accumulator == (layout != "TN")
    CALLS.append(layout)
    a, b = (t.as_subclass(torch.Tensor) for t in (A, B))
    assert a.dim() == b.dim() == 2
    y = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
    if out is None:
        return y.to(out_dtype), None, None, None
    out.add_(y) if accumulate else out.copy_(y)
    return out, None, None, None


def general_grouped_gemm(
    A,
    B,
    out,
    quantization_params,
    out_dtype,
    layout="TN",
    m_splits=None,
    grad=False,
    accumulate=False,
    use_split_accumulator=False,
    single_output=False,
):
    assert out_dtype == out[0].dtype
    assert quantization_params == [None] * len(A)
    assert len(m_splits) == len(A)  # the library takes no None, whatever the layout
    CALLS.append(f"grouped {layout}")
    if single_output:
        out = out[0][: sum(m_splits)].split(m_splits)
    for a, b, total in zip(A, B, out, strict=True):
        y = general_gemm(
            a, b, layout=layout, grad=grad, use_split_accumulator=grad, out_dtype=out_dtype
        )[0]
        total.add_(y) if accumulate else total.copy_(y)


def rmsnorm_fwd(x, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    assert (ln_out, quantizer, otype, sm_margin) == (None, None, x.dtype, 0)
    CALLS.append("rmsnorm")
    weight = weight + 1 if zero_centered_gamma else weight
    return F.rms_norm(x, weight.shape, weight, eps), None, torch.full((x.shape[0],), eps)


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, gamma)]
        weight = leaves[1] + 1 if zero_centered_gamma else leaves[1]
        y = F.rms_norm(leaves[0], gamma.shape, weight, rsigma[0].item())
        return torch.autograd.grad(y, leaves, dz)


def layernorm_fwd(x, weight, bias, eps, *rest):
    y = rmsnorm_fwd(x, weight, eps, *rest)[0]  # checks the arguments
    weight = weight + 1 if rest[-1] else weight
    y = F.layer_norm(x, weight.shape, weight, bias, eps)
    return y, torch.full((x.shape[0],), eps), bias


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, gamma, rsigma)]
        weight = leaves[1] + 1 if zero_centered_gamma else leaves[1]
        y = F.layer_norm(leaves[0], gamma.shape, weight, leaves[2], mu[0].item())
        return torch.autograd.grad(y, leaves, dz)


class DotProductAttention:
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        softcap=0.0,
        softmax_scale=None,
    ):
        assert (qkv_format, attn_mask_type) == ("sbhd", "causal")
        left = -1 if window_size is None else window_size[0]
        self.rules = {"window": left, "softcap": softcap, "scale": softmax_scale}
        self.shape = num_attention_heads, num_gqa_groups, kv_channels
        assert attention_dropout == 0.0

    def __call__(
        self,
        q,
        k,
        v,
        qkv_format=None,
        attn_mask_type=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
    ):
        assert self.shape == (q.shape[-2], k.shape[-2], q.shape[-1])
        CALLS.append("attention" if qkv_format is None else qkv_format)
        if qkv_format is None:
            return attend(q, k, v, **self.rules).flatten(-2)
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        sizes = cu_seqlens_q.diff().tolist()
        assert max(sizes) == max_seqlen_q
        parts = zip(*(t.split(sizes) for t in (q, k, v)), strict=True)
        one = [attend(*(t.unsqueeze(1) for t in p), **self.rules).squeeze(1) for p in parts]
        return torch.cat(one).flatten(-2)


def torch_cudnn_version():
    number = torch.backends.cudnn.version() or 0
    return number // 10_000, number % 10_000 // 100, number % 100


def modules():
    """Return the stub by the names that are imported."""
    te, extensions, constants, tex = (
        ModuleType(name)
        for name in (
            "transformer_engine.pytorch",
            "transformer_engine.pytorch.cpp_extensions",
            "transformer_engine.pytorch.constants",
            "transformer_engine_torch",
        )
    )
    te.DType, te.QuantizedTensor, te.DotProductAttention = DType, Quantized, DotProductAttention
    te.get_cudnn_version = torch_cudnn_version
    te.Float8Quantizer = Float8Quantizer
    te.Float8CurrentScalingQuantizer = Float8CurrentScalingQuantizer
    extensions.general_gemm = general_gemm
    extensions.general_grouped_gemm = general_grouped_gemm
    constants.TE_DType = {d: d for d in (torch.float32, torch.bfloat16, torch.float16)}
    tex.rmsnorm_fwd, tex.rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
    tex.layernorm_fwd, tex.layernorm_bwd = layernorm_fwd, layernorm_bwd
    package = ModuleType("transformer_engine")
    return {module.__name__: module for module in (package, te, extensions, constants, tex)}


@pytest.fixture
def engine(monkeypatch):
    """The stub in the place of the library; what was called."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    CALLS.clear()
    return CALLS


SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "window_size": (5, 0),
    "qk_layernorm": True,
    "init_method_std": 0.3,
}
IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
LAYER_NORM = {"normalization": "LayerNorm", "attn_logit_softcapping": 9.0}


def built(changes, moe, fp8):
    config, ctx = Fp8Config(**fp8), ParallelContext.single()
    scales = delayed_scales(config, ctx)
    gemms = layer_gemms(config, ctx, 2, WeightCasts(), scales)
    model = GPT(
        TransformerConfig(**(SHAPE | changes)),
        ctx,
        vocab_size=61,
        moe=MoEConfig(**moe),
        execution=Execution(gemms=gemms),
        seed=3,
    )
    return model, scales


def two_steps(model, scales, documents):
    """Losses, main gradients and histories of two steps, of which the second adds."""
    for parameter in model.parameters():
        slot = grad_slot(parameter)
        slot.main, slot.is_stale = torch.zeros_like(parameter), slot.overwrites
        slot.main += 7.0 * slot.is_stale
    losses = []
    for _ in range(2):
        with nullcontext() if scales is None else scales.noting():
            hidden, _ = model(IDS, documents=documents)[:2]
            loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), IDS.t().flatten())
            loss.backward()
        if scales is not None:
            scales.move_on()
        losses.append(loss.detach())
    mains = [p.grad if p.grad is not None else grad_slot(p).main for p in model.parameters()]
    histories = [] if scales is None else [s.pieces[0].data for s in scales.shards().values()]
    return [*losses, *mains, *histories]


@pytest.mark.parametrize(
    ("changes", "moe", "is_packed", "fp8"),
    [
        ({}, {}, False, {"fp8_format": "hybrid"}),
        (LAYER_NORM, {}, True, {"fp8_format": "e4m3", "fp8_recipe": "delayed"}),
        ({}, {"num_experts": 4, "moe_router_topk": 2}, False, {}),
    ],
)
def test_a_model_computes_the_same_by_the_librarys_signatures(
    engine, changes, moe, is_packed, fp8
):
    documents = Documents([[0, 5, 16], [0, 9, 16]]) if is_packed else None
    want = two_steps(*built(changes, moe, fp8), documents)
    assert engine == []
    model, scales = built(changes, moe, fp8)
    names = {name: shard.shape for name, shard in named_shards(model).items()}
    use_transformer_engine(model)
    assert {name: shard.shape for name, shard in named_shards(model).items()} == names
    got = two_steps(model, scales, documents)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    # The trial of attention has no documents.
    kinds = {"TN", "NN", "NT", "rmsnorm", "attention"} | ({"thd"} if is_packed else set())
    experts = {f"grouped {layout}" for layout in ("TN", "NN", "NT")} if moe else set()
    assert set(engine) == kinds | experts


def test_attention_that_was_named_stays_this_packages(engine):
    model, _ = built({}, {}, {})
    use_transformer_engine(model, "unfused")
    model(IDS)
    assert "rmsnorm" in engine
    assert "attention" not in engine


def test_attention_that_is_wrong_is_replaced_and_another_cudnn_refused(
    engine, monkeypatch, caplog
):
    te = sys.modules["transformer_engine.pytorch"]
    call = DotProductAttention.__call__
    monkeypatch.setattr(DotProductAttention, "__call__", lambda *a, **k: 0 * call(*a, **k))
    model, scales = built({}, {}, {})
    want = two_steps(model, scales, None)
    model, scales = built({}, {}, {})
    use_transformer_engine(model)
    for a, b in zip(two_steps(model, scales, None), want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    assert "attention of Transformer Engine: ArithmeticError: result 0 is off" in caplog.text
    monkeypatch.setattr(te, "get_cudnn_version", lambda: (8, 1, 0))
    with pytest.raises(ValueError, match="Set CUDNN_HOME"):
        use_transformer_engine(model)


def test_a_recipe_that_the_library_has_not_is_refused_and_so_is_its_absence():
    gemm = Fp8Gemm(grad_dtype=torch.float8_e5m2, recipe=Rowwise())
    with pytest.raises(ValueError, match="no --fp8-recipe rowwise"):
        by_transformer_engine(gemm)
    assert refusal() == EXTRA


def test_another_cudnn_than_torchs_is_answered_with_what_mends_it(monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for said, kind, found in (
        ("/lib/libcudnn_heuristic.so.9: undefined symbol", ValueError, "LD_LIBRARY_PATH"),
        ("/lib/libnccl.so.2: no such file", OSError, "libnccl"),
    ):
        (package / "pytorch.py").write_text(f"raise OSError({said!r})")
        with pytest.raises(kind, match=found):
            use_transformer_engine(torch.nn.Identity())
    monkeypatch.delitem(sys.modules, "transformer_engine")
