"""The founding documents' program: only its import lines are ours."""

import math

import pytest
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader
from warm_ranks import run_ranks

from mcore_data import MockGPTDataset
from mcore_models import GPTModel, MultiTokenPrediction, TransformerBlock, TransformerConfig
from mcore_models.layers.layer_setup import LayerSetup
from mcore_moe import MixtureOfExperts, MoEConfig
from mcore_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallel_state,
)
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import RngStreams

SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


def program(world_size, num_steps=3, sequence_length=16, vocab_size=53, **model):
    """The program as it stands in the document, its sizes and length given from outside."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world_size, pipeline_model_parallel_size=1
    )
    config = TransformerConfig(**(SMALL | model))
    model = GPTModel(config, vocab_size=vocab_size)
    dataset = MockGPTDataset(sequence_length=sequence_length, vocab_size=vocab_size)
    dataloader = DataLoader(dataset, batch_size=4)
    optimizer = Adam(model.parameters())
    losses = []
    for batch in dataloader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == num_steps:
            break
    parallel_state.destroy_model_parallel()
    return losses


def test_one_switch_trains_in_fp8():
    plain = program(1, hidden_size=32)
    parallel_state.set_fp8_training_enabled(True)
    try:
        narrow = program(1, hidden_size=32)
    finally:
        parallel_state.set_fp8_training_enabled(False)
    assert plain[2] < plain[1] < plain[0]
    assert narrow != plain
    assert narrow == pytest.approx(plain, rel=5e-3)
    assert program(1, hidden_size=32) == plain


def test_its_mixture_of_experts_runs():
    moe_layer = MixtureOfExperts(hidden_size=12, ffn_hidden_size=20, num_experts=8, top_k=2)
    assert moe_layer(torch.randn(2, 3, 12)).shape == (2, 3, 12)


def batch_of(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 53, (rows, 8), generator=generator)
    mask = torch.rand(rows, 8, generator=generator) < 0.6
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask.float()}


def layouts(cases):
    """Loss and gradients after two accumulated backward passes, for each layout."""
    found = []
    for degrees, model, moe, rows_of in cases:
        parallel_state.initialize_model_parallel(**degrees)
        config = TransformerConfig(**(SMALL | model))
        parts = moe.get("parts", {})
        experts = MoEConfig() if parts else MoEConfig(**moe)
        module = GPTModel(config, 53, moe=experts, parts=parts, dtype=torch.float64)
        losses = []
        for seed in (1, 2):
            rows = rows_of[parallel_state.get_data_parallel_rank()]
            batch = {name: t[list(rows)] for name, t in batch_of(seed, 4).items()}
            loss = module(batch)
            loss.backward()
            losses.append(loss.item())
        norm = module.gpt.blocks["0"].attention_norm.weight.grad
        embedding = module.gpt.embedding.weight.grad.square().sum()
        parallel_state.destroy_model_parallel()
        found.append((losses, norm, embedding))
    return found


ALL, HALVES = ((0, 1, 2, 3),) * 2, ((0, 1), (2, 3))
QK = {"num_query_groups": 1, "qk_layernorm": True}


class Squared(torch.nn.Module):
    """A feed-forward layer of one's own: no gate, no kernel of ours."""

    def __init__(self, setup):
        super().__init__()
        split = {"axis": setup.ctx.tp, "dtype": setup.dtype, "init_std": 0.0}
        self.wide = ColumnParallelLinear(setup.config.hidden_size, 24, **split)
        self.narrow = RowParallelLinear(24, setup.config.hidden_size, **split)

    def forward(self, x):
        return self.narrow(self.wide(x).square())


EXPERTS = {
    "num_experts": 4,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def test_gradients_are_whole_in_backward_under_every_layout():
    cases = [
        ({}, QK, {}, HALVES),
        ({"tensor_model_parallel_size": 2}, QK, {}, ALL),
        ({"tensor_model_parallel_size": 2}, QK, {"parts": {"mlp": Squared}}, ALL),
        ({"tensor_model_parallel_size": 2}, {}, EXPERTS, ALL),
        ({"expert_model_parallel_size": 2}, {}, EXPERTS, ALL),
    ]
    alone = layouts([({}, model, moe, ALL) for _, model, moe, _ in cases])
    (plain, *_), (own, *_) = alone[1:3]
    assert own != plain
    for rank in run_ranks(layouts, 2, cases):
        for place, (losses, norm, embedding) in enumerate(rank):
            want_losses, want_norm, want_embedding = alone[place]
            assert losses == pytest.approx(want_losses, rel=1e-10), cases[place]
            torch.testing.assert_close(norm, want_norm, rtol=1e-10, atol=1e-14)
            if "tensor_model_parallel_size" not in cases[place][0]:
                torch.testing.assert_close(embedding, want_embedding, rtol=1e-10, atol=0)


def test_any_model_learns_to_predict_further_tokens():
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(11, 64), torch.nn.Linear(64, 11, bias=False)
    mtp = MultiTokenPrediction(hidden_size=64, num_predictions=2, num_attention_heads=2)
    assert len(MultiTokenPrediction(hidden_size=768, num_predictions=4).layers) == 4
    optimizer = Adam([*embedding.parameters(), *head.parameters(), *mtp.parameters()], 3e-3)
    text = torch.arange(36).view(2, 18) * 7 % 11  # each token says which comes two later
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = mtp(embedding(text), text, embedding, head)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0
    assert losses[-1] < 0.1
    assert all(p.grad is not None for p in mtp.parameters())  # of every prediction's layer
    other = text.clone()
    other[:, -1] += 1  # a target of the last predictions, and read by none of them
    assert mtp(embedding(text), other % 11, embedding, head) > losses[-1] + 0.1
    with pytest.raises(ValueError, match="rows of 3 tokens have no token 3 positions ahead"):
        mtp(embedding(text[:, :3]), text[:, :3], embedding, head)


def test_the_vocabulary_is_of_the_size_that_is_given():
    model = GPTModel(TransformerConfig(**SMALL), vocab_size=53)
    assert (model.gpt.vocab_size, len(model.gpt.embedding.weight)) == (53, 128)
    batch = next(iter(DataLoader(MockGPTDataset(sequence_length=16, vocab_size=53), 4)))
    # An untrained model finds each token equally likely.
    assert model(batch).item() == pytest.approx(math.log(53), rel=0.02)


def test_further_tokens_count_in_the_loss_of_the_plain_model():
    batch = next(iter(DataLoader(MockGPTDataset(sequence_length=16, vocab_size=53), 4)))
    plain, more = (
        GPTModel(TransformerConfig(**SMALL, mtp_num_layers=k), 53)(batch) for k in (0, 2)
    )
    # An untrained model knows nothing of any token: each is worth ln V.
    assert (more / plain).item() == pytest.approx(1.1, rel=0.02)


def refusals():
    with pytest.raises(RuntimeError, match="2 ranks but no layout"):
        GPTModel(TransformerConfig(**SMALL), 53)
    for degrees in ({"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        parallel_state.initialize_model_parallel(**degrees)
        with pytest.raises(ValueError, match="parallel_size 2 needs the trainer"):
            GPTModel(TransformerConfig(**SMALL), 53)
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(ValueError, match="parts name fc1: use attention, mla, mlp"):
        GPTModel(TransformerConfig(**SMALL), 53, parts={"fc1": Squared})
    with pytest.raises(ValueError, match="--num-attention-heads 3 cannot be split"):
        GPTModel(TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=3), 53)
    parallel_state.destroy_model_parallel()


def test_a_block_takes_a_module_of_ones_own():
    config, ctx = TransformerConfig(**SMALL), ParallelContext.single()
    setup = LayerSetup(config=config, ctx=ctx, layer=0, streams=RngStreams(0, ctx))
    assert isinstance(TransformerBlock(setup, parts={"mlp": Squared}).mlp, Squared)
    assert not isinstance(TransformerBlock(setup).mlp, Squared)


def test_layouts_that_the_plain_front_cannot_run_are_refused():
    run_ranks(refusals, 2)
