import pytest
import torch

from mcore_infer import StaticCache, cache_bytes
from mcore_models.protocol import KVCache


def test_cache_returns_all_keys_of_a_layer_oldest_first():
    cache = StaticCache(capacity=4)
    k = torch.arange(4.0)[:, None, None, None].expand(4, 2, 1, 3)
    for begin, end in ((0, 2), (2, 3)):
        for layer in (0, 5):
            keys, values = cache.append(layer, k[begin:end] + layer, -k[begin:end])
            assert cache.length == begin
            assert torch.equal(keys, k[:end] + layer)
            assert torch.equal(values, -k[:end])
        cache.advance(end - begin)
    assert isinstance(cache, KVCache)
    assert cache.num_bytes == cache_bytes(
        4, 2, num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.float32
    )


def test_too_many_tokens_are_refused():
    cache = StaticCache(capacity=2)
    with pytest.raises(ValueError, match="3 tokens do not fit into a cache of 2"):
        cache.append(0, torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1))
