"""DeepSeek-V2 and V3 as tiny models of transformers: their logits and all their gradients.

Weights come from the folder that transformers writes, and so do its gradients: it saves a
model whose parameters they are, which is read like any other.
"""

import pytest
import torch
import torch.nn.functional as F

from mcore_infer.generation import next_logits
from mcore_infer.kv_cache import StaticCache
from mcore_infer.loading import load_model
from mcore_models.flops import num_parameters
from mcore_parallel import ParallelContext, named_parameters

transformers = pytest.importorskip("transformers")

VOCAB, ROWS, LENGTH = 37, 2, 17
LATENT = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-4,  # the norms of latent vectors keep their own
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MODELS = {
    "v2 lite": ("DeepseekV2", {"q_lora_rank": None}),
    "v2": (
        "DeepseekV2",
        {"q_lora_rank": 8, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "v3": ("DeepseekV3", {"q_lora_rank": 8, "rope_parameters": YARN}),
    "v3, rotated by halves": (
        "DeepseekV3",
        {"q_lora_rank": 8, "rope_interleave": False, "norm_topk_prob": False},
    ),
}


def theirs(name):
    architecture, values = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**LATENT | values)
    torch.manual_seed(3)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.uniform_(0.0, 0.3)
    return model


def ours(folder):
    loaded = load_model(folder, ParallelContext.single(), dtype=torch.float32)
    return loaded.description, loaded.model


def tokens():
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_those_of_transformers(tmp_path, name):
    reference = theirs(name)
    reference.save_pretrained(tmp_path / "weights")
    made, model = ours(tmp_path / "weights")
    ids = tokens()
    labels = ids.roll(-1, 1)

    want = reference(ids).logits
    F.cross_entropy(want.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
        for buffer_name, buffer in reference.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.zero_()
    reference.save_pretrained(tmp_path / "gradients")
    _, gradients = ours(tmp_path / "gradients")

    hidden, _ = model(ids)
    logits = model.logits(hidden)[..., :VOCAB].transpose(0, 1)  # [S, B, V] -> [B, S, V]
    torch.testing.assert_close(logits, want, rtol=2e-5, atol=2e-5)
    model.loss(hidden, labels, torch.full(ids.shape, 1 / ids.numel()))[0].backward()
    expected = {n.layout.parts[0].name: n.parameter for n in named_parameters(gradients)}
    largest = max(p.abs().max().item() for p in expected.values())
    for named in named_parameters(model):
        part = named.layout.parts[0].name
        if part.endswith("expert_bias"):
            continue
        grad, wanted = named.parameter.grad, expected[part]
        error = (grad - wanted).abs().max() / max(wanted.abs().max(), 1e-3 * largest)
        assert error < 2e-5, (part, error)
    assert num_parameters(made.config, VOCAB, made.moe) == sum(
        p.numel() for p in reference.parameters()
    ) + sum(b.numel() for n, b in reference.named_buffers() if "correction_bias" in n)


def test_generation_from_the_cache_of_latent_vectors_equals_that_without(tmp_path):
    theirs("v3").save_pretrained(tmp_path)
    _, model = ours(tmp_path)
    ids, cache = tokens(), StaticCache(LENGTH)
    for begin, end in ((0, 9), (9, 10), (10, LENGTH)):
        got = next_logits(model, ids[:, begin:end], cache)
    torch.testing.assert_close(got, next_logits(model, ids), rtol=2e-5, atol=2e-5)
    # One latent vector and one rotated key a token, in float32.
    assert cache.num_bytes == 3 * ROWS * LENGTH * (6 + 4) * 4
