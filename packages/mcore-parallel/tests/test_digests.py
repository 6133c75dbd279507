"""Equal bits give equal digests, wherever and however they lie; anything else gives others."""

import pytest
import torch

from mcore_parallel import digests
from mcore_parallel.digests import digest


def changed(x, *places):
    """Exchange two numbers."""
    flat = x.clone().view(-1)
    flat[list(places)] = flat[list(reversed(places))]
    return flat.view(x.shape)


@pytest.mark.parametrize("part_bytes", [1 << 26, 1000])
def test_a_digest_depends_on_bits_and_places_and_not_on_strides(monkeypatch, part_bytes):
    monkeypatch.setattr(digests, "PART_BYTES", part_bytes)
    x = torch.randn(60, 47, generator=torch.Generator().manual_seed(0))
    x.view(-1)[[0, 1, 7, 2700]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        y = x.to(dtype)
        assert digest(y) == digest(y.t().contiguous().t())
        assert digest(y) == digest(torch.cat([y.view(-1)[:1], y.view(-1)])[1:].view(y.shape))
        moved = [x.flip(0), x.flip(1), changed(x, 0, 1), changed(x, 7, 2700)]
        others = [other.to(dtype) for other in moved]
        one_bit = y.clone()
        one_bit.view(torch.uint8)[59, -1] ^= 1
        found = {int(digest(other)) for other in [y, *others, one_bit]}
        assert len(found) == 6, dtype
    for small in (torch.tensor(3), torch.tensor(True), torch.tensor([1 + 2j])):
        assert digest(small) == digest(small.clone()) != digest(small + 1)


def test_nothing_has_a_digest_too():
    assert digest(torch.empty(0, 3)) == digest(torch.empty(2, 0)) == 0
