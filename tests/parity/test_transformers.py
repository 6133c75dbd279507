"""Families against transformers: one row each, a tiny random model with odd sizes.

A folder that transformers saved is loaded into our model, whose logits and all of whose
gradients must be transformers'. Gradients are compared under our names: transformers saves
them as if they were weights, and we load them.
"""

import pytest
import torch

from mcore_infer.loading import load_model
from mcore_parallel.mesh import ParallelContext

transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5
"""Of float32 logits and gradients, relative to the largest of a tensor."""

FAMILIES = {
    "mamba2": (
        "Mamba2",
        {
            "hidden_size": 18,
            "num_hidden_layers": 3,
            "vocab_size": 37,
            "num_heads": 6,
            "head_dim": 6,
            "state_size": 5,
            "n_groups": 2,
            "chunk_size": 4,
            "use_bias": True,
            "time_step_limit": (0.01, 0.8),
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "hidden_size": 16,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "vocab_size": 37,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "intermediate_size": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 4,
            "ssm_state_size": 5,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}


def theirs(name, folder):
    """Save a random model as transformers does; return it."""
    architecture, values = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**values)
    torch.manual_seed(3)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, so that none can be taken for another.
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    reference = theirs(name, tmp_path / "weights")
    tokens = torch.randint(0, 37, (2, 11))
    labels = torch.randint(0, 37, (2, 11))
    logits = reference(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
    reference.save_pretrained(tmp_path / "gradients")

    ctx = ParallelContext.single()
    model = load_model(tmp_path / "weights", ctx, dtype=torch.float32).model
    wanted = load_model(tmp_path / "gradients", ctx, dtype=torch.float32).model
    logits = logits.detach()
    hidden, _ = model(tokens)
    got = model.logits(hidden)[..., :37].transpose(0, 1)  # [S, B, V] -> [B, S, V]
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(got, logits, rtol=0, atol=TOLERANCE * logits.abs().max().item())
    model.token_losses(hidden, labels).mean().backward()
    gradients = {path: weight.detach() for path, weight in wanted.named_parameters()}
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for path, parameter in model.named_parameters():
        gradient = gradients[path]
        if parameter.grad is None:  # a bias that routers set, without a gradient
            assert path.endswith("expert_bias")
            continue
        error = (parameter.grad - gradient).abs().max().item()
        assert error < TOLERANCE * max(gradient.abs().max().item(), floor), path
