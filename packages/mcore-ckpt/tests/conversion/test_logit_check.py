"""What a family's rules mean: our model computes transformers' logits from its weights."""

import pytest
import torch

from mcore_ckpt.conversion.conversion import hf_to_mcore
from mcore_ckpt.save_load.loading import load, read_index
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_parallel.testing.ranks import run_ranks

pytest.importorskip("mcore_models")

ODD = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "vocab_size": 37,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
# Their grouped products take no float64.
ODD_MOE = ODD | {"experts_implementation": "eager"}
# Heads x head dim is not the hidden size; two key/value heads for four queries.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}
MODELS = {
    "llama": ("Llama", {**ODD, **HEADS}),
    "llama tied, llama3 scaling": (
        "Llama",
        {**ODD, **HEADS, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama with biases": ("Llama", {**ODD, **HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama linear scaling": (
        "Llama",
        {
            **ODD,
            **HEADS,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "mistral": ("Mistral", {**ODD, **HEADS, "sliding_window": 5}),
    "qwen2": ("Qwen2", {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {**ODD, **HEADS}),
    "phi3": (
        "Phi3",
        {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0},
    ),
    "nemotron": ("Nemotron", {**ODD, **HEADS, "head_dim": 8, "norm_eps": 1e-4}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 20,
            "n_layer": 3,
            "n_head": 2,
            "n_inner": 26,
            "n_positions": 32,
            "vocab_size": 37,
            "attn_implementation": "eager",
        },
    ),
    "mixtral": (
        "Mixtral",
        {**ODD_MOE, **HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **ODD_MOE,
            **HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 8,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe, weights that do not sum to 1": (
        "Qwen3Moe",
        {
            **ODD_MOE,
            **HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 8,
        },
    ),
}


def theirs(name, folder):
    """Save a random model of theirs; return tokens and its logits, in float64."""
    import transformers  # seconds that the ranks need not spend

    architecture, values = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**values)
    head = "GPT2LMHeadModel" if architecture == "GPT2" else f"{architecture}ForCausalLM"
    torch.manual_seed(3)
    model = getattr(transformers, head)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokens = torch.randint(37, (2, 23))
    with torch.no_grad():
        return tokens, model(tokens).logits


def ours(run, tokens, **degrees):
    """Load the run folder under a layout; return this rank's slice of the logits [B, S, v]."""
    from mcore_models.config import TransformerConfig, config_from_dict
    from mcore_models.gpt import GPT
    from mcore_moe.config import MoEConfig

    description = read_index(run / "release").extra["model"]
    ctx = ParallelContext.build(ParallelConfig(**degrees))
    model = GPT(
        config_from_dict(TransformerConfig, description["config"]),
        ctx,
        vocab_size=description["vocab_size"],
        moe=config_from_dict(MoEConfig, description["moe"]),
        dtype=torch.float64,
    ).eval()
    shards = {f"model.{n}": s for n, s in named_shards(model, ctx.data_axes()).items()}
    load(run, shards, world=ctx.world)
    with torch.no_grad():
        hidden, _ = model(tokens)
        logits = model.logits(hidden).transpose(0, 1)
    ctx.destroy()
    return logits


# transformers rotates in float32 whatever the model's dtype, and norms in float32.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", MODELS)
def test_our_model_computes_the_familys_logits(tmp_path, name):
    tokens, wanted = theirs(name, tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    found = ours(tmp_path / "run", tokens)[..., :37]
    torch.testing.assert_close(found, wanted, **FLOAT32)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_under_tensor_parallelism_too(tmp_path, name):
    tokens, wanted = theirs(name, tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    slices = run_ranks(ours_split, 2, tmp_path / "run", tokens)
    torch.testing.assert_close(torch.cat(slices, dim=-1)[..., :37], wanted, **FLOAT32)


def ours_split(run, tokens):
    return ours(run, tokens, tensor_model_parallel_size=2)
