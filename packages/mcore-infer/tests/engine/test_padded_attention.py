"""Attention of decoding in plain torch, padded, against one request after the other."""

import pytest
import torch

from mcore_infer.engine import plain_attention
from mcore_infer.engine.fp8_cache import to_codes
from mcore_infer.engine.plain_attention import padded_decode, reference_decode


@pytest.mark.parametrize(
    "rules",
    [
        {"window": 5, "scale": 0.3},
        {"chunk": 8, "softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 0},
        {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]).double()},
        {"kv_scales": (0.02, 0.5)},
    ],
)
@pytest.mark.parametrize("at_once", [1, 7])
def test_requests_side_by_side_attend_as_each_alone(rules, at_once, monkeypatch):
    """Whatever other requests left behind their ends."""
    torch.manual_seed(0)
    q, keys = torch.randn(7, 4, 6).double(), torch.randn(30, 4, 2, 6).double()
    values = torch.randn(30, 4, 2, 5).double()
    tables, lengths = torch.randperm(28).view(7, 4), torch.tensor([1, 2, 16, 4, 5, 7, 12])
    for row, length in enumerate(lengths.tolist()):
        tables[row, -(-length // 4) :] = 29
    if "kv_scales" in rules:
        pairs = zip((keys, values), rules["kv_scales"], strict=True)
        keys, values = (to_codes(memory, scale) for memory, scale in pairs)
    else:
        keys[29] = values[29] = torch.nan
    where = keys, values, tables, lengths
    bytes_of_one = 16 * 2 * (6 + 5) * 8
    monkeypatch.setattr(plain_attention, "GATHERED_BYTES", at_once * bytes_of_one)
    got = padded_decode(q, *where, **rules)
    torch.testing.assert_close(got, reference_decode(q, *where, **rules), rtol=0, atol=1e-9)
