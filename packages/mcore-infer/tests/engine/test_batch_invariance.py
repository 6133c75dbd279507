"""Training and the engine give equal log probabilities to the bit, in every batch."""

from dataclasses import replace

import pytest
import torch

from mcore_infer import Engine, EngineConfig, SamplingConfig, ScoreRequest
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.batch_invariant import (
    fixed_order_attention,
    fixed_order_product,
    invariant_attention,
)
from mcore_models.kernels.batch_invariant_model import use_batch_invariant_kernels
from mcore_models.layers.layer_setup import Execution
from mcore_moe.config import MoEConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import WeightCasts, layer_gemms

LLAMA = TransformerConfig(
    num_layers=2,
    hidden_size=20,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    ffn_hidden_size=64,
    max_position_embeddings=120,
    init_method_std=0.3,
)
GPT2 = replace(
    LLAMA,
    num_query_groups=4,
    ffn_hidden_size=128,
    swiglu=False,
    openai_gelu=True,
    normalization="LayerNorm",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
    untie_embeddings_and_output_weights=False,
)
DENSE = MoEConfig()
EXPERTS = MoEConfig(num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=64)
CASES = {
    "llama": (LLAMA, DENSE, torch.float32),
    "llama in bfloat16": (LLAMA, DENSE, torch.bfloat16),
    "gpt": (GPT2, DENSE, torch.float32),
    "experts": (LLAMA, EXPERTS, torch.float32),
}
LENGTHS = (1, 17, 64, 70, 33)
NUM_NEW = 4
GREEDY = SamplingConfig(num_tokens=NUM_NEW, top_k=1)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(case, *, is_invariant=True, device="cpu"):
    config, moe, dtype = CASES[case]
    sizes = {"vocab_size": 51, "dtype": dtype, "seed": 3, "device": device}
    model = GPT(config, ParallelContext.single(device), moe=moe, **sizes)
    if is_invariant:
        use_batch_invariant_kernels(model)
    return model


def prompts():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(51, (n,), generator=random).tolist() for n in LENGTHS]


def engine_scores(model, texts, max_tokens):
    """Texts with their new tokens, and log probabilities of all tokens after the first."""
    config = EngineConfig(
        max_requests=5,
        max_sequence_tokens=100,
        num_pages=200,
        page_tokens=5,
        max_tokens=max_tokens,
    )
    engine = Engine(model.eval(), config)
    scores = ScoreRequest(prompt=True)
    numbers = [engine.add(text, GREEDY, scores=scores) for text in texts]
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    found = []
    for text, number in zip(texts, numbers, strict=True):
        result = results[number]
        new = [*text, *result.ids]
        found.append((new, [*result.prompt_log_probs, *result.log_probs]))
    return found


def training_scores(model, texts):
    """The same of a training forward of one padded batch."""
    model.train()
    longest = max(map(len, texts))
    padded = [text + [0] * (longest - len(text)) for text in texts]
    tokens = torch.tensor(padded, device=next(model.parameters()).device)
    hidden, _ = model(tokens[:, :-1])
    losses = model.token_losses(hidden, tokens[:, 1:])
    rows = (-losses).tolist()
    return [row[: len(text) - 1] for row, text in zip(rows, texts, strict=True)]


def differences(case, is_invariant=True, device="cpu"):
    """Count log probabilities that differ between training and each way to generate."""
    engines = build(case, is_invariant=is_invariant, device=device)
    trained = build(case, is_invariant=is_invariant, device=device)
    count = 0
    in_one = engine_scores(engines, prompts(), 200)
    ways = [
        in_one,
        engine_scores(engines, prompts(), 7),  # prompts in several chunks, beside new tokens
        [engine_scores(engines, [prompt], 200)[0] for prompt in prompts()],
    ]
    texts = [text for text, _ in in_one]
    expected = training_scores(trained, texts)
    alone = [training_scores(trained, [text])[0] for text in texts]
    for way in [*ways, list(zip(texts, alone, strict=True))]:
        assert not is_invariant or [text for text, _ in way] == texts
        for (_, found), scores in zip(way, expected, strict=True):
            assert len(found) == len(scores)
            count += sum(a != b for a, b in zip(found, scores, strict=True))
    return count


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_of_training_and_engine_are_equal_to_the_bit(case):
    assert differences(case) == 0


def test_without_the_kernels_they_are_not():
    assert differences("llama", is_invariant=False) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_equal_on_a_gpu(case):
    assert differences(case, device="cuda") == 0


def test_kernels_compute_products_and_attention():
    """Values and gradients are those of plain torch within the rounding of float64."""
    random = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)

    x, w = draw(37, 20), draw(30, 20)
    torch.testing.assert_close(fixed_order_product(x, w), x @ w.t())
    q, k, v = draw(70, 3, 4, 8), draw(70, 3, 2, 8), draw(70, 3, 2, 8)
    mine = invariant_attention(q, k, v)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).permute(2, 0, 1, 3)
    torch.testing.assert_close(mine, theirs)
    weights = torch.randn(mine.shape, generator=random, dtype=torch.float64)
    grads = [torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (mine, theirs)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    for begin in (0, 5, 66):  # queries at the end of a longer text
        part = fixed_order_attention(q[begin:, 0], k[:, 0], v[:, 0], 8**-0.5)
        assert torch.equal(part, mine[begin:, 0])


def test_training_has_the_gradients_of_plain_kernels():
    plain, fixed = (build("experts", is_invariant=flag) for flag in (False, True))
    for model in (plain, fixed):
        model.double()
        model.dtype = torch.float64
        tokens = torch.tensor(prompts()[3])[None]
        hidden, aux = model(tokens[:, :-1])
        (model.token_losses(hidden, tokens[:, 1:]).sum() + aux).backward()
    for (name, one), other in zip(plain.named_parameters(), fixed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)


def test_what_has_no_such_kernel_is_named_together():
    rules = {"attention_dropout": 0.1, "window_size": (8, 0), "attn_logit_softcapping": 30.0}
    config = replace(LLAMA, hidden_size=32, ffn_hidden_size=64, **rules)
    moe = replace(EXPERTS, moe_expert_capacity_factor=1.5)
    gemms = layer_gemms(
        Fp8Config(fp8_format="hybrid"), ParallelContext.single(), 2, WeightCasts()
    )
    sizes = {"vocab_size": 51, "device": "meta", "execution": Execution(gemms=gemms)}
    model = GPT(config, ParallelContext.single(), moe=moe, **sizes)
    with pytest.raises(ValueError, match="does not support") as error:
        use_batch_invariant_kernels(model)
    for word in ("dropout", "windows", "soft caps", "fp8", "capacity-factor"):
        assert word in str(error.value)
    narrow = GPT(replace(GPT2, ffn_hidden_size=52), ParallelContext.single(), vocab_size=51)
    with pytest.raises(ValueError, match=r"gelu_tanh on this device in widths \[52\]"):
        use_batch_invariant_kernels(narrow)
    with pytest.raises(ValueError, match=r"a Linear \(only GPT\)"):
        use_batch_invariant_kernels(torch.nn.Linear(2, 2))
