"""Kernels of a made-up package that raise, or are wrong: torch does the work, said once."""

from importlib import import_module
from importlib.metadata import version

import pytest
import torch

from mcore_parallel import optional_kernels
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.optional_kernels import (
    OptionalKernel,
    agree_on_kernels,
    both_passes,
    give_up,
    kernel_failure,
    wave,
    works,
)
from mcore_parallel.testing.ranks import run_ranks

CPU = torch.device("cpu")
PACKAGE = """
import torch

class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {forward}
        return {factor} * x

    @staticmethod
    def backward(ctx, grad):
        {backward}
        return 2 * grad

def double(x):
    return _Double.apply(x)
"""
FAULTS = {
    "none": ({}, ""),
    "forward": (
        {"forward": "raise TypeError('depends on a ContextVar')"},
        "TypeError: depends",
    ),
    "backward": ({"backward": "raise RuntimeError('no image')"}, "RuntimeError: no image"),
    "wrong": ({"factor": "3"}, "ArithmeticError: result 0 is off by 0.5"),
    "import": ({"forward": "raise ("}, "SyntaxError"),
    "nan": ({"factor": "float('nan')"}, "off by nan"),
}


@pytest.fixture
def kernel(request, tmp_path, monkeypatch):
    """A kernel of a package that is found on ``sys.path`` but in no ``site-packages``."""
    parts = {"forward": "pass", "backward": "pass", "factor": "2"} | FAULTS[request.param][0]
    name = f"made_up_{request.param}"
    (tmp_path / f"{name}.py").write_text(PACKAGE.format(**parts))
    metadata = tmp_path / f"{name}-4.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.2\n")
    monkeypatch.syspath_prepend(tmp_path)

    def trial(device, dtype):
        x = wave(3, 5, device=device, dtype=dtype)
        got = both_passes(import_module(name).double, x)
        return zip(got, both_passes(lambda x: 2 * x, x), strict=True)

    return OptionalKernel(f"doubling {request.param}", (name, "not-there"), trial)


@pytest.mark.parametrize("kernel", FAULTS, indirect=True)
def test_what_a_kernel_raises_is_one_warning_with_versions(kernel, caplog, request):
    name = kernel.name.split()[1]
    _, words = FAULTS[name]
    state = torch.get_rng_state()
    for _ in range(2):
        assert works(kernel, CPU, torch.float32) == (not words)
    assert torch.equal(torch.get_rng_state(), state)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (1 if words else 0)
    for message in messages:
        assert message.startswith(f"{kernel.name} cannot be used here")
        assert words in message
        assert f"(made_up_{name} 4.2, torch {version('torch')})" in message
    assert words in kernel_failure(kernel, CPU, torch.float32)


@pytest.mark.parametrize("kernel", ["none"], indirect=True)
def test_a_kernel_that_fails_where_it_is_used_is_not_chosen_again(kernel, caplog):
    assert works(kernel, CPU, torch.float32)
    give_up(kernel, CPU, torch.float32, error=RuntimeError("too large"))
    assert not works(kernel, CPU, torch.float32)
    assert works(kernel, CPU, torch.float64)
    (record,) = caplog.records
    assert "RuntimeError: too large (made_up_none 4.2, torch" in record.getMessage()


@pytest.mark.parametrize("kernel", ["none"], indirect=True)
def test_a_trial_sees_nothing_of_what_its_caller_set(kernel):
    def refuse(_):
        raise AssertionError("a tensor of the trial was packed")

    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
    ):
        assert works(kernel, CPU, torch.float32)
    assert works(kernel, CPU, torch.float64)  # another kind is tried again


def test_a_trial_that_asks_for_its_own_kernel_meets_the_fallback():
    def trial(device):
        x = wave(3, device=device, dtype=torch.float32)
        yield (x if works(kernel, device) else x.clone()), x

    kernel = OptionalKernel("asks for itself", ("torch",), trial)
    assert works(kernel, CPU)


def _fails_on_one(rank):
    def trial(device):
        if rank == 1:
            raise OSError("no compiler")
        return ()

    return trial


def check_agreement():
    ctx = ParallelContext.build(ParallelConfig())
    broken = OptionalKernel("broken on one", ("torch",), _fails_on_one(ctx.world.rank))
    sound = OptionalKernel("sound", ("torch",), _fails_on_one(0))
    agree_on_kernels([(broken, ()), (sound, ())], ctx.device, ctx.world)
    return kernel_failure(broken, ctx.device), works(sound, ctx.device)


def test_ranks_leave_out_alike_what_fails_on_one_of_them():
    (first, is_sound), (second, _) = run_ranks(check_agreement, 2)
    assert is_sound
    assert first == "it failed on 1 of 2 ranks"
    assert second.startswith("OSError: no compiler (torch ")


def test_agreement_on_one_rank_is_a_trial(monkeypatch):
    monkeypatch.setattr(optional_kernels, "_FAILURES", {})
    kernel = OptionalKernel("broken", ("torch",), _fails_on_one(1))
    agree_on_kernels([(kernel, ())], CPU, SINGLE)
    assert not works(kernel, CPU)
