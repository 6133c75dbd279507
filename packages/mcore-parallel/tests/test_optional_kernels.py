"""Kernels of a made-up package that raise, or are wrong: torch does the work, said once."""

import re
import sys
import time
from importlib import import_module
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel import optional_kernels
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.optional_kernels import (
    OptionalKernel,
    Sample,
    agree_on_kernels,
    both_passes,
    compared,
    give_up,
    kernel_failure,
    optional_kernel,
    sine_leaf,
    wave,
    works,
)

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


def test_agreement_on_one_rank_is_a_trial_and_names_the_kernels_that_took_longest(
    monkeypatch, caplog
):
    monkeypatch.setattr(optional_kernels, "_FAILURES", {})
    kernel = OptionalKernel("broken", ("torch",), _fails_on_one(1))

    def slow_trial(device):
        time.sleep(0.1)
        return ()

    slow = OptionalKernel("slow", ("torch",), slow_trial)
    with caplog.at_level("INFO"):
        agree_on_kernels([(kernel, ()), (slow, ())], CPU, SINGLE)
    assert not works(kernel, CPU)
    assert re.search(r"tried 2 kernels in 0\.\d s; longest: slow 0\.\d s, broken", caplog.text)


def scaled_reference(x, factor, total):
    total.add_(x.detach())
    return factor * x


def scaled_samples(device, dtype=torch.float32):
    x = sine_leaf(3, 5, device=device, dtype=dtype)
    yield Sample(x, 2.0, wave(3, 5, device=device, dtype=dtype))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, slope):
        ctx.slope = slope
        return factor * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.slope * grad, None, None


def build_scaled(forward=1.0, backward=1.0, written=1.0):
    """Decorate a function whose results are off by these factors."""

    @optional_kernel(
        "scaling", reference=scaled_reference, kind=lambda: (), samples=scaled_samples
    )
    def scaled(x, factor, total):
        """Return x times a factor; add x to the total."""
        total.add_(written * x.detach())
        return Scaled.apply(x, forward * factor, backward * factor)

    return scaled


def test_a_trial_compares_results_gradients_and_what_is_written_in_place():
    assert kernel_failure(build_scaled(), CPU) == ""
    for wrong, number in (({"forward": 1.1}, 0), ({"written": 1.2}, 1), ({"backward": 3.0}, 2)):
        failure = kernel_failure(build_scaled(**wrong), CPU)
        assert f"ArithmeticError: result {number} is off by" in failure, wrong
    (sample,) = scaled_samples(CPU)
    assert len(compared(build_scaled(), sample)) == 3
    assert sample.args[0].grad is None
    assert torch.equal(sample.args[2], wave(3, 5, device=CPU, dtype=torch.float32))


def declare(kind):
    """Decorate a function of three parameters with a kind."""

    @optional_kernel("adding", reference=lambda: None, kind=kind, samples=lambda _: ())
    def add(out, x, *, alpha=1.0):
        """Return nothing."""

    return add


def test_a_kind_reads_arguments_given_by_position_by_name_and_by_default():
    kernel = declare(lambda alpha, x: (x, alpha))
    assert kernel.kind_of("out", "x") == ("x", 1.0)
    assert kernel.kind_of(x="x", out="out", alpha=2.0) == ("x", 2.0)
    assert kernel.kind_of("out", x="x", alpha=3.0) == ("x", 3.0)


def test_a_kind_that_reads_no_parameter_of_the_kernel_is_refused():
    with pytest.raises(TypeError, match=r"kind reads weight, .*: out, x, alpha\."):
        declare(lambda x, weight: (x, weight))


def test_on_a_cpu_and_in_compiled_code_the_reference_runs_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(optional_kernels, "_FAILURES", {})
    scaled = build_scaled(forward=5.0)
    assert scaled.__doc__ == "Return x times a factor; add x to the total."
    x, total = torch.ones(2), torch.zeros(2)
    assert scaled(x, 2.0, total).tolist() == [2.0, 2.0]
    assert scaled.launch(x, 2.0, total).tolist() == [10.0, 10.0]
    compiled = torch.compile(lambda x: scaled(x, 3.0, total), backend="eager", fullgraph=True)
    assert compiled(x).tolist() == [3.0, 3.0]
    assert not optional_kernels._FAILURES


def test_without_triton_kernels_are_declared_and_their_trial_raises_the_import_error(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = spec_from_file_location("without_triton", optional_kernels.__file__)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_triton", module)  # for its dataclass
    spec.loader.exec_module(module)

    @module.triton.jit(do_not_specialize=["size"])
    def double(x, size, WIDTH: module.tl.constexpr = 4):
        """A kernel."""

    @module.optional_kernel(
        "doubling",
        reference=lambda x: 2 * x,
        kind=lambda: (),
        samples=lambda device: [module.Sample(torch.ones(3, device=device))],
    )
    def doubled(x):
        double[(1,)](x, 3)
        return x

    assert doubled(torch.ones(1)).item() == 2.0
    assert "ModuleNotFoundError: import of triton halted" in module.try_kernel(doubled, CPU)
