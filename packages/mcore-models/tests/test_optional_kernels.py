"""flash-attn-4 that is installed and raises, as a made-up package: torch attends."""

import sys
from dataclasses import replace

import pytest
import torch

from mcore_models.config import KernelConfig, TransformerConfig
from mcore_models.kernels import availability
from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.choice import optional_kernels
from mcore_models.kernels.flash4_attention import flash4_attention
from mcore_models.kernels.norm import add_and_norm, norm
from mcore_models.kernels.qk_norm_rope import norm_rotary_split
from mcore_moe.config import MoEConfig
from mcore_parallel import optional_kernels as mechanism
from mcore_parallel.optional_kernels import kernel_failure

CPU = torch.device("cpu")
INTERFACE = """
import torch

def _attend(q, k, v):
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)

def _flash_attn_fwd(q, k, v, *, out, **options):
    {forward}
    out.copy_(_attend(q, k, v))
    return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device)

def _flash_attn_bwd(q, k, v, out, dout, lse, *options, dq, dk, dv, **others):
    {backward}
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(_attend(*leaves), leaves, dout)
    for to, grad in zip((dq, dk, dv), grads):
        to.copy_(grad)
"""
RAISE = "raise TypeError('epilogue fn has no fail-closed semantic key')"


@pytest.fixture
def package(request, tmp_path, monkeypatch):
    """flash-attn-4 9.9, broken in the pass that the parameter names, if in any."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    passes = {name: RAISE if request.param == name else "pass" for name in PASSES}
    (folder / "interface.py").write_text(INTERFACE.format(**passes))
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    metadata = tmp_path / "flash_attn_4-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 9.9\n")
    real = {name for name in sys.modules if name.split(".")[0] == "flash_attn"}
    for name in real:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mechanism, "_FAILURES", {})
    availability.is_installed.cache_clear()
    yield request.param
    availability.is_installed.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


PASSES = ("forward", "backward")


@pytest.mark.parametrize("package", ["none", *PASSES], indirect=True)
def test_flash4_is_tried_in_both_passes(package, caplog):
    failure = kernel_failure(flash4_attention, CPU, torch.bfloat16, 64, 2)
    assert ("TypeError: epilogue fn" in failure) == (package != "none")
    assert ("flash-attn-4 9.9" in failure) == (package != "none")
    assert len(caplog.records) == (package != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("package", PASSES, indirect=True)
def test_a_flash4_that_raises_is_left_out_by_auto_and_refused_by_name(package, caplog):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("flash-attn-4 is for Hopper")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1024, 1, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    for _ in range(2):
        attend(q, k, v).sum().backward()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "flash-attn-4 9.9" in caplog.text
    with pytest.raises(ValueError, match="flash4 cannot be used: TypeError: epilogue fn"):
        attend(q, k, v, backend="flash4")


def test_what_a_model_may_choose_is_listed_and_nothing_that_does_not_fit():
    small = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2)
    wide = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=8)
    names = [
        [
            kernel.name
            for kernel, _ in optional_kernels(config, KernelConfig(), CPU, dtype, moe=moe)
        ]
        for config, dtype, moe in (
            (small, torch.bfloat16, MoEConfig()),
            (wide, torch.bfloat16, MoEConfig()),
            (wide, torch.float64, MoEConfig()),
            (wide, torch.bfloat16, MoEConfig(num_experts=4)),
        )
    ]
    assert set(names[1]) - set(names[0]) == {norm.name, add_and_norm.name}
    assert len(names[1]) == 9  # flash-attn-4 is not for a CPU
    assert len(names[2]) == 2
    assert len(names[3]) == len(names[1]) + 6  # nor is quack
    for changes, rotary in (
        ({}, ["rotary embedding in Triton"]),
        ({"qk_layernorm": True}, [norm_rotary_split.name]),
        ({"qk_layernorm": True, "qk_norm_width": "layer"}, []),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, []),
        ({"qk_l2_norm": True}, []),
        ({"rotary_percent": 0.5}, []),
        ({"rotary_interleaved": True}, []),
    ):
        kernels = optional_kernels(
            replace(wide, **changes), KernelConfig(), CPU, torch.bfloat16
        )
        assert [k.name for k, _ in kernels if "rotary" in k.name] == rotary, changes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_that_a_model_may_choose_works_on_this_gpu(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = []
    for size, has_norms in ((64, False), (64, True), (128, True)):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=512,
            num_attention_heads=8,
            kv_channels=size,
            qk_layernorm=has_norms,
        )
        moe = MoEConfig(num_experts=4)
        wanted += optional_kernels(config, KernelConfig(), device, dtype, moe=moe)
    assert len(wanted) >= 3 * 8
    failures = {kernel.name: kernel_failure(kernel, device, *kind) for kernel, kind in wanted}
    assert not any(failures.values()), failures
