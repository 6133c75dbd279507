"""The recurrences of other libraries, called as ours are; those that can be imported.

flash-linear-attention's ``fla-core`` and the Triton files of mamba-ssm. Neither is installed
with this workspace: put them on the path to compare. Both want the batch first; with one
sequence, as ``bench_mamba.py`` has, that is a view.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from torch import Tensor

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def peers(kind: str) -> dict[str, Recurrence]:
    """Return what other libraries have for a kind of mixer, by the library's name."""
    found: dict[str, Recurrence] = {}
    with suppress(ImportError):
        if kind == "mamba":
            found["mamba_ssm"] = _mamba_ssm()
        else:
            found["fla"] = _fla()
    return found


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compile all that an autotuner of Triton tries, on all cores, before it tries the first.

    mamba-ssm tries some 110 kernels, which take two minutes one after the other.
    """
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    run, met = Autotuner.run, set()

    def compile_and_run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if tuner not in met:
            met.add(tuner)
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            with AsyncCompileMode(pool, ignore_errors=True):
                tuner.warmup(*args, **given)
        return run(tuner, *args, **kwargs)

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        patch.object(Autotuner, "run", compile_and_run),
    ):
        yield


def _mamba_ssm() -> Recurrence:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def scan(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (part.transpose(0, 1) for part in (x, dt, B, C))
        # Chunks of 256 tokens are what its layers take.
        y, end = mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, return_final_states=True)
        return y.transpose(0, 1), end

    return scan


def _fla() -> Recurrence:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (part.transpose(0, 1) for part in (q, k, v, g, beta))
        y, end = chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)
        return y.transpose(0, 1), end

    return rule
