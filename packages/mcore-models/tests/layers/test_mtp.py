"""Predicting further tokens: against the definition, over borders, and over ranks."""

import pytest
import torch
import torch.nn.functional as F

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import Execution
from mcore_models.layers.mtp import has_token, shifted
from mcore_models.layers.residual import Residual
from mcore_models.layers.rope import build_rotary
from mcore_models.protocol import MicroBatch
from mcore_parallel import ParallelContext
from mcore_parallel.context_parallel.packed_sequences import Documents

VOCAB, DEPTHS = 23, 2
SHAPE = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "ffn_hidden_size": 10,
    "mtp_num_layers": DEPTHS,
    "mtp_loss_scaling_factor": 0.3,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.3,
}


def gpt(changes=None, **options):
    config = TransformerConfig(**(SHAPE | (changes or {})))
    ctx = ParallelContext.single()
    return GPT(config, ctx, vocab_size=VOCAB, dtype=torch.float64, **options)


def batch(rows=2, length=9):
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.8).double()
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}


def losses_of(model, whole, documents=None):
    """Every loss as a mean over its own tokens."""
    micro = MicroBatch(model.prepare(whole), documents=documents)
    output, aux = model.run_stage(micro, None)
    masks, losses = model.loss_masks(micro), model.unreduced_losses(output, micro)
    weights = {n: m / m.sum() * model.loss_coefficients[n] for n, m in masks.items()}
    totals = model.losses(output, micro, weights)
    for name, total in totals.items():
        torch.testing.assert_close(total, (losses[name] * weights[name]).sum())
    return totals, losses, masks, aux


def test_each_depth_is_what_the_paper_says():
    model, whole = gpt(), batch()
    _, losses, masks, _ = losses_of(model, whole)
    assert list(losses) == ["lm loss", "mtp_1 loss", "mtp_2 loss"]
    assert model.loss_coefficients == {"lm loss": 1.0, "mtp_1 loss": 0.15, "mtp_2 loss": 0.15}
    tokens, labels, mask = whole.values()
    length = tokens.shape[1]
    rotary = build_rotary(model.config, torch.arange(length), torch.float64)
    hidden = model(tokens)[0]
    for depth, layer in enumerate(model.mtp):
        n = length - depth - 1  # places that have a token so far ahead
        later = model.embedding(tokens[:, depth + 1 :])
        joined = torch.cat([layer.enorm(later), layer.hnorm(hidden[: len(later)])], -1)
        x = joined @ layer.eh_proj.weight.T
        tables = tuple(table[:n] for table in rotary)
        stream = layer.block(Residual.begin(x), BlockInputs(rotary=tables))
        hidden = layer.final_norm(stream.total())
        logits = hidden @ model.head.weight[:VOCAB].T
        wanted = F.cross_entropy(
            logits.permute(1, 2, 0), labels[:, depth + 1 :], reduction="none"
        )
        name = f"mtp_{depth + 1} loss"
        torch.testing.assert_close(losses[name][:, :n], wanted, rtol=1e-11, atol=1e-11)
        assert torch.equal(masks[name][:, :n], mask[:, depth + 1 :])
        assert not masks[name][:, n:].any()


def test_packed_documents_predict_what_they_do_one_by_one():
    model, whole, borders = gpt(), batch(rows=1), (0, 2, 3, 9)
    packed = whole | {"cu_seqlens": torch.tensor([borders])}
    positions = torch.tensor([[0, 1, 0, 0, 1, 2, 3, 4, 5]])
    micro = MicroBatch(model.prepare(packed), positions, Documents([borders]))
    output, _ = model.run_stage(micro, None)
    found = {
        name: (loss * model.loss_masks(micro)[name]).sum()
        for name, loss in model.unreduced_losses(output, micro).items()
    }
    wanted = dict.fromkeys(found, 0.0)
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        alone = {name: tensor[:, begin:end] for name, tensor in whole.items()}
        micro = MicroBatch(model.prepare(alone))
        output, _ = model.run_stage(micro, None)
        masks = model.loss_masks(micro)
        for name, loss in model.unreduced_losses(output, micro).items():
            wanted[name] = wanted[name] + (loss * masks[name]).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_whole_layers_are_recomputed_with_the_same_gradients(tied):
    found = []
    changes = {"untie_embeddings_and_output_weights": not tied}
    for recomputing in (RecomputeConfig(), RecomputeConfig(recompute_granularity="full")):
        model = gpt(changes, execution=Execution(recomputing=recomputing))
        torch.autograd.backward(list(losses_of(model, batch())[0].values()))
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        found.append([p.grad for p in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_rows_shift_whole_and_places_know_their_documents_end():
    assert shifted(torch.tensor([[1, 2, 3, 4]]), 3).tolist() == [[4, 0, 0, 0]]
    documents = Documents([[0, 3, 4, 6], [0, 1, 2, 6]])
    assert has_token(2, 6, 2, documents).tolist() == [
        [True, False, False, False, False, False],
        [False, False, True, True, False, False],
    ]
    assert has_token(1, 3, 1, None).tolist() == [[True, True, False]]


def test_learned_positions_are_refused():
    learned = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 9}
    refused = "--mtp-num-layers 2 and --position-embedding-type learned_absolute exclude"
    with pytest.raises(ValueError, match=refused):
        TransformerConfig(**(SHAPE | learned))
