import pytest
import torch

from mcore_infer import StaticCache, cache_bytes
from mcore_models import LayerState, ModelState, attend


def test_each_layer_attends_to_all_its_keys():
    cache = StaticCache(capacity=4)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 2, 1, 3, generator=generator).unbind()  # of two layers
    for begin, end in ((0, 2), (2, 3)):
        for layer in (0, 1):
            state, new = cache.layer(layer), slice(begin, end)
            got = state.attend(q[layer][new], k[layer][new], v[layer][new], window=1)
            want = attend(q[layer][new], k[layer][:end], v[layer][:end], window=1)
            assert cache.length == begin
            assert torch.equal(got, want)
        cache.advance(end - begin)
    assert isinstance(cache, ModelState)
    assert isinstance(cache.layer(0), LayerState)
    assert cache.num_bytes == cache_bytes(
        4, 2, num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.float32
    )


def test_too_many_tokens_are_refused():
    layer, x = StaticCache(capacity=2).layer(0), torch.zeros(3, 1, 1, 1)
    with pytest.raises(ValueError, match="3 tokens do not fit into a cache of 2"):
        layer.attend(x, x, x)
