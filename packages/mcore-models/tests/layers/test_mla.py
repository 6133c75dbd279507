"""Latent attention against its definition, decoded from latent vectors, and recomputed."""

import math

import pytest
import torch

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.attention_backends import attend
from mcore_models.layers.layer_setup import Execution
from mcore_parallel import ParallelContext

SHAPE = {
    "num_layers": 2,
    "hidden_size": 10,  # no multiple of the heads
    "num_attention_heads": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
    "qk_layernorm": True,
    "rotary_interleaved": True,
    "init_method_std": 0.4,
}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale_all_dim": 0.7,
}
WHOLE_QUERIES = {"q_lora_rank": 0, "qk_layernorm": False, "rotary_interleaved": False}


def gpt(changes, **options):
    config = TransformerConfig(**(SHAPE | changes))
    return GPT(config, ParallelContext.single(), vocab_size=29, dtype=torch.float64, **options)


def tokens(rows=2, length=12):
    return torch.randint(29, (rows, length), generator=torch.Generator().manual_seed(0))


class LatentState:
    """Keeps what it is given, however wide, and its bytes in view."""

    def __init__(self, num_layers):
        self.layers = [LatentLayer() for _ in range(num_layers)]

    @property
    def length(self):
        return self.layers[-1].length

    def layer(self, number):
        return self.layers[number]


class LatentLayer:
    def __init__(self):
        self.keys, self.length = None, 0

    def attend(self, q, k, v, *, value_dim=0, window=-1, backend="auto"):
        assert v is None
        self.keys = k if self.keys is None else torch.cat([self.keys, k])
        self.length += len(k)
        values = self.keys[..., :value_dim]
        return attend(q, self.keys, values, window=window, backend=backend)


@pytest.mark.parametrize("changes", [YARN, WHOLE_QUERIES], ids=["yarn", "whole queries"])
def test_decoding_from_latent_vectors_equals_attention_of_heads(changes):
    model, ids = gpt(changes), tokens()
    want = model(ids)[0]
    state = LatentState(2)
    parts = [model(ids[:, a:b], state=state)[0] for a, b in ((0, 5), (5, 6), (6, 7), (7, 12))]
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-11, atol=1e-11)
    # A token is one latent vector and one rotated key, whatever the number of heads.
    assert state.layers[0].keys.shape == (12, 2, 1, 5 + 4)


def test_scores_are_those_of_the_definition():
    model = gpt(YARN | {"num_layers": 1})
    layer = model.blocks["0"].mla
    x = torch.randn(6, 1, 10, dtype=torch.float64)
    got = layer(x)  # without rotation

    def norm(c, weight):
        return c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    x = x[:, 0]
    q = norm(x @ layer.q_down.weight.T, layer.q_norm.weight) @ layer.q_up.weight.T
    down = x @ layer.kv_down.weight.T
    kv = norm(down[:, :5], layer.kv_norm.weight) @ layer.kv_up.weight.T
    heads = []
    for head in range(4):
        own_q, own_kv = q[:, 7 * head : 7 * head + 7], kv[:, 10 * head : 10 * head + 10]
        k = torch.cat([own_kv[:, :3], down[:, 5:]], -1)
        scale = (0.1 * 0.7 * math.log(4) + 1) ** 2 / math.sqrt(7)
        scores = (own_q @ k.T * scale).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ own_kv[:, 3:])
    want = torch.cat(heads, -1) @ layer.proj.weight.T
    torch.testing.assert_close(got[:, 0], want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("modules", [("core_attn",), ("mla_up_proj",), ("mla_up_proj", "mlp")])
def test_recomputed_attention_has_the_same_gradients(modules):
    found = []
    for recomputing in (
        RecomputeConfig(),
        RecomputeConfig(recompute_granularity="selective", recompute_modules=modules),
    ):
        model = gpt(YARN, execution=Execution(recomputing=recomputing))
        model(tokens())[0].square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_channels": 8}, "--kv-channels 8 has no effect with --multi-latent-attention"),
        ({"window_size": (4, 0)}, "--window-size 4 0 has no effect with --multi-latent"),
        ({"num_query_groups": 2}, "--num-query-groups 2: .* Use 0 or .* 4"),
        ({"qk_pos_emb_head_dim": 3}, "--qk-pos-emb-head-dim 3 must be even"),
        ({"v_head_dim": 0}, "--v-head-dim 0 must be above 0"),
    ],
)
def test_options_that_latent_attention_lacks_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**(SHAPE | changes))
