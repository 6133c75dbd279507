"""Every ``--attention-backend`` on a GPU: what it claims is right, the rest is refused."""

import pytest
import torch

from mcore_models.kernels import flash4_attention as flash4
from mcore_models.kernels import flash_attention as flash2
from mcore_models.kernels.attention_backends import attend
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.optional_kernels import both_passes

pytestmark = pytest.mark.gpu

S = 384
PACKED = Documents([[0, 100, S], [0, 311, S]])
RULES = {
    "all heads": {},
    "grouped heads": {},
    "window": {"window": 60},
    "chunks": {"chunk": 100},
    "varlen": {"documents": PACKED},
    "varlen and window": {"documents": PACKED, "window": 60},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": 0.5},
}
REFUSED = {
    "fused": {"softcap", "sinks"},
    "flash": {"window", "softcap", "sinks"},
    "flash4": {"varlen", "varlen and window", "softcap", "sinks"},
}
"""All others compute everything; with flash-attn, ``flash`` refuses only sinks."""


@pytest.mark.parametrize("what", RULES)
@pytest.mark.parametrize("backend", ["auto", "flash4", "fused", "flash", "unfused", "local"])
def test_a_backend_computes_what_it_claims_and_refuses_the_rest_by_name(backend, what):
    if backend == "flash4" and not flash4.is_installed():
        pytest.skip("flash-attn-4 is not installed")
    refused = (
        {"sinks"} if backend == "flash" and flash2.is_installed() else REFUSED.get(backend, ())
    )
    generator = torch.Generator("cuda").manual_seed(0)
    G = 8 if what == "all heads" else 2
    shapes = (S, 2, 8, 128), (S, 2, G, 128), (S, 2, G, 128)
    inputs = [torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes]
    rules = dict(RULES[what])
    if "sinks" in rules:
        rules["sinks"] = torch.full((8,), rules["sinks"], device="cuda")
    if what in refused:
        with pytest.raises(ValueError, match=f"--attention-backend {backend}"):
            attend(*inputs, **rules, backend=backend)
        return
    got = both_passes(lambda *qkv: attend(*qkv, **rules, backend=backend), *inputs)
    wide = [t.double() for t in inputs]
    want = both_passes(lambda *qkv: attend(*qkv, **rules, backend="local"), *wide)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < 1.6e-2
