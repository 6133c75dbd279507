"""Our GPT against transformers' LLaMA and GPT-2 with the same weights, in float64.

transformers computes rotary tables and LLaMA's norms in float32 whatever the model's dtype,
so these two are replaced by the published formulas, written out here once more.
"""

import math
from functools import partial

import pytest
import torch

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.rope import rotary_frequencies, rotary_magnitude
from mcore_models.logical_tensors import ffn_size
from mcore_parallel import ParallelContext, named_shards

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-10

LLAMAS = {
    "odd shapes": {"num_layers": 3, "hidden_size": 42, "num_attention_heads": 3},
    "grouped heads of their own width": {
        "num_layers": 2,
        "hidden_size": 30,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "kv_channels": 14,
        "ffn_hidden_size": 33,
        "norm_epsilon": 1e-3,
        "add_qkv_bias": True,
        "add_bias_linear": True,
    },
    "stretched positions": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "rotary_base": 500_000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "rope_scaling_original_max_position_embeddings": 16,
        "untie_embeddings_and_output_weights": True,
    },
}


class Rotary(torch.nn.Module):
    """What transformers' rotary module returns, in float64."""

    def __init__(self, config, size):
        super().__init__()
        frequencies = []
        for i in range(0, size, 2):
            frequency = config.rotary_base ** (-i / size)
            if config.use_rope_scaling:
                context = config.rope_scaling_original_max_position_embeddings
                wavelength = 2 * math.pi / frequency
                if wavelength > context:
                    frequency /= config.rope_scaling_factor
                elif wavelength > context / 4:
                    s = (context / wavelength - 1) / 3
                    frequency *= (1 - s) / config.rope_scaling_factor + s
            frequencies.append(frequency)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64)

    def forward(self, x, position_ids):
        angles = position_ids.double()[..., None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def norm_in_float64(norm, x):
    """What transformers' norm returns, without its cast to float32."""
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def ours(changes, vocab_size):
    config = TransformerConfig(**changes)
    ctx = ParallelContext.single()
    return config, GPT(config, ctx, vocab_size=vocab_size, dtype=torch.float64)


def copy_weights(model, theirs, source_of):
    """Overwrite ours by theirs, by logical name; every tensor of theirs must be used."""
    unused = set(theirs)
    for name, shard in named_shards(model).items():
        (piece,) = shard.pieces
        source, take = source_of(name)
        piece.data.copy_(take(theirs[source].detach()))
        unused.discard(source)
    assert not unused


def llama_names(name):
    table = {
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in table:
        return table[name], lambda t: t
    for mine, yours in {
        "blocks.": "model.layers.",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.proj": "self_attn.o_proj",
        "mlp.fc1.gate": "mlp.gate_proj",
        "mlp.fc1.up": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
        **{f"attention.qkv.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    }.items():
        name = name.replace(mine, yours)
    return name, lambda t: t


@pytest.mark.parametrize("case", LLAMAS)
def test_logits_equal_those_of_a_llama_with_the_same_weights(case):
    torch.manual_seed(0)
    config, model = ours(LLAMAS[case], vocab_size=37)
    scaling = None
    if config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": (
                config.rope_scaling_original_max_position_embeddings
            ),
        }
    hf_config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels or None,
        intermediate_size=ffn_size(config),
        rms_norm_eps=config.norm_epsilon,
        rope_theta=config.rotary_base,
        rope_scaling=scaling,
        attention_bias=config.add_qkv_bias,
        mlp_bias=config.add_bias_linear,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
        max_position_embeddings=64,
    )
    theirs = transformers.LlamaForCausalLM(hf_config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rotary = Rotary(config, hf_config.head_dim)
    got = theirs.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(got, rotary.frequencies, rtol=1e-6, atol=0)
    theirs.model.rotary_emb = rotary
    for module in theirs.modules():
        if isinstance(module, transformers.models.llama.modeling_llama.LlamaRMSNorm):
            module.forward = partial(norm_in_float64, module)
    weights = dict(theirs.named_parameters())
    copy_weights(model, weights, llama_names)
    compare_logits(model, theirs, vocab_size=37)


@pytest.mark.parametrize(
    ("factor", "original", "scales"),
    [
        (40.0, 4096, {}),
        (40.0, 4096, {"mscale": 1.0, "mscale_all_dim": 0.707}),
        (4.0, 32, {"beta_fast": 1.5, "beta_slow": 1.0}),
        (4.0, 32768, {"beta_fast": 1.0, "beta_slow": 1.0}),
        (1.0, 64, {}),
    ],
)
def test_yarn_stretches_as_transformers_does(factor, original, scales):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        rope_type="yarn",
        rotary_scaling_factor=factor,
        original_max_position_embeddings=original,
        **scales,
    )
    theirs = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=int(original * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": factor,
            "original_max_position_embeddings": original,
            **scales,
        },
    )
    build = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, magnitude = build(theirs, "cpu")
    got = rotary_frequencies(config)
    torch.testing.assert_close(got, frequencies.double(), rtol=1e-5, atol=0)
    assert math.isclose(rotary_magnitude(config), magnitude, rel_tol=1e-12)


def gpt2_names(name):
    for mine, yours in {
        "position_embedding": "transformer.wpe",
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "blocks.": "transformer.h.",
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.proj": "attn.c_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }.items():
        name = name.replace(mine, yours)
    if ".qkv." in name:
        head, _, rest = name.partition("attention.qkv.")
        part, kind = rest.split(".")
        return f"{head}attn.c_attn.{kind}", lambda t: t.t().chunk(3)["qkv".index(part)]
    if any(product in name for product in ("c_proj", "c_fc")):
        return name, lambda t: t.t()  # GPT-2 keeps its matrices input first
    return name, lambda t: t


def test_logits_equal_those_of_a_gpt2_with_the_same_weights():
    torch.manual_seed(1)
    _, model = ours(
        {
            "num_layers": 3,
            "hidden_size": 20,
            "num_attention_heads": 5,
            "max_position_embeddings": 12,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "swiglu": False,
            "openai_gelu": True,
            "add_bias_linear": True,
        },
        vocab_size=31,
    )
    hf_config = transformers.GPT2Config(
        vocab_size=31,
        n_embd=20,
        n_layer=3,
        n_head=5,
        n_positions=12,
        activation_function="gelu_new",
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(hf_config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # A vector is its own transpose, so biases pass through ``t()``.
    copy_weights(model, dict(theirs.named_parameters()), gpt2_names)
    compare_logits(model, theirs, vocab_size=31)


def compare_logits(model, theirs, vocab_size):
    tokens = torch.randint(0, vocab_size, (2, 12))
    with torch.no_grad():
        hidden, aux = model(tokens)
        logits = model.logits(hidden)[..., :vocab_size].transpose(
            0, 1
        )  # [S, B, V] -> [B, S, V]
        want = theirs(tokens).logits
    assert aux == 0
    torch.testing.assert_close(logits, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert want.abs().max() > 1
