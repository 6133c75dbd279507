"""Triton kernels without a GPU: interpreted, against their references."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_samples import all_kernels

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
UNDER_THE_HOOK = f"""
import runpy, sys
sys.path.append({str(SCRIPT.parents[4] / "tests")!r})
from shape_checks import install_shape_checks
install_shape_checks()
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
DEFAULT = {
    "mcore_parallel.kernels.adam:adamw_update",
    "mcore_parallel.kernels.embedding:add_rows_",
    "mcore_parallel.kernels.loss:row_stats",
    "mcore_parallel.kernels.loss:softmax_gradient_",
    "mcore_models.kernels.norm:norm",
    "mcore_models.kernels.norm:add_and_norm",
    "mcore_models.kernels.rope:rotary_split",
}
"""Of the five modules that every dense model trains with."""
OF_PACKAGES = {
    "mcore_models.kernels.flash4_attention:flash4_attention",
    "mcore_moe.kernels.quack_gemm:multiply_by_tile",
    "mcore_moe.kernels.quack_gemm:add_weight_gradient",
    "mcore_parallel.precision.fp8_accumulation:add_scaled_matmul",
}
"""Kernels that are not Triton's."""


def interpret(names):
    """Compare kernels in a process of their own: Triton decides when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_THE_HOOK, *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line.removesuffix(": equal") for line in done.stdout.splitlines()}


def test_kernels_of_dense_training_equal_their_references_when_interpreted():
    checks = "check_gradients_of_norms_into_main_gradients", "check_masked_updates_bit_by_bit"
    names = {*DEFAULT, *checks}
    assert interpret(names) == names


@pytest.mark.parity_long
def test_all_other_kernels_equal_their_references_when_interpreted():
    kernels = set(all_kernels())
    assert kernels > DEFAULT | OF_PACKAGES
    others = kernels - DEFAULT - OF_PACKAGES
    found = interpret([*others, "checks"])
    assert found > others
    assert len(found - others) == 6


@pytest.mark.gpu
def test_every_kernel_passes_its_trial_on_this_gpu():
    import torch

    from mcore_parallel.optional_kernels import kernel_failure

    device = torch.device("cuda", torch.cuda.current_device())
    failures = {}
    for name, kernel in all_kernels().items():
        if name in OF_PACKAGES:  # tried where a model takes them
            continue
        for sample in kernel.samples(device):
            kind = kernel.kind_of(*sample.args, **sample.kwargs)
            if kind is not None:
                failures[name, kind] = kernel_failure(kernel, device, *kind)
    assert len({name for name, _ in failures}) > 15
    assert not any(failures.values()), failures
