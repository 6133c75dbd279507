"""QK-clip on one rank: scores come down to the threshold; layouts are in tests/parity."""

import pytest
import torch

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.attention_backends import same_document, visible_keys
from mcore_models.qk_clip.config import QKClipConfig
from mcore_models.qk_clip.row_factors import row_factors, track_scores
from mcore_models.qk_clip.score_tracking import ScoreTracker, largest_scores
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig

GROUPED = {"num_query_groups": 2, "add_qkv_bias": True, "attention_output_gate": True}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
}


@pytest.mark.parametrize("piece_elements", [1, 1 << 24])
@pytest.mark.parametrize(
    ("window", "chunk", "packed"),
    [(-1, 0, False), (2, 0, True), (-1, 4, False), (-1, 3, True)],
)
def test_the_largest_scores_are_those_of_the_keys_in_sight(
    piece_elements, window, chunk, packed
):
    S, B, N, G, H = 9, 2, 4, 2, 3
    q, k = (torch.randn(S, B, heads, H, dtype=torch.float64) for heads in (N, G))
    documents = Documents([[0, 4, 9], [0, 1, 6, 9]]) if packed else None
    rules = {"window": window, "chunk": chunk, "documents": documents}
    found = largest_scores(q, k, scale=0.7, piece_elements=piece_elements, **rules)
    scores = 0.7 * torch.einsum("sbnh,tbnh->bnst", q, k.repeat_interleave(N // G, 2))
    seen = visible_keys(S, S, window, None, chunk)[None, None]
    if documents is not None:
        seen = visible_keys(S, S, window)[None, None] & same_document(documents, S, S)
    if documents is not None and chunk:
        cut = Documents([[0, 3, 4, 7, 9], [0, 1, 4, 6, 9]])  # each document, by chunks
        seen = seen & same_document(cut, S, S)
    wanted = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_after_a_step_scores_have_come_down_to_the_threshold(options):
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, init_method_std=0.4, **options
    )
    single = ParallelContext.single()
    model = GPT(config, single, vocab_size=13, dtype=torch.float64)
    track_scores(model)
    data_parallel = DataParallel([model], single, DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    first = model.blocks["0"]  # later layers read what the earlier ones changed
    tracker = next(m.tracker for m in first.modules() if hasattr(m, "tracker"))

    def scores():
        tokens = torch.arange(24).view(2, 12) % 13
        hidden, _ = model(tokens)
        weights = torch.full((2, 12), 1 / 24, dtype=torch.float64)
        model.loss(hidden, tokens, weights)[0].backward()
        return tracker.largest.clone()

    before = scores()
    threshold = float(before.median()) * 0.9
    data_parallel.finish()
    clip = QKClipConfig(qk_clip=True, qk_clip_threshold=threshold, qk_clip_alpha=0.3)
    factors = row_factors([model], SINGLE, clip)
    optimizer.step(0.0, 0.0, 1.0, factors)
    data_parallel.zero_grad()
    after = scores()
    shared = (
        before.view(2, -1).amax(1).repeat_interleave(2)
        if "num_query_groups" in options
        else before
    )
    eta = threshold / shared.clamp(min=threshold)
    torch.testing.assert_close(after, before * eta)
    assert (eta < 1).any()


def test_factors_act_on_main_weights_which_the_weights_follow():
    layer = torch.nn.Linear(64, 6, dtype=torch.bfloat16)
    data_parallel = DataParallel([layer], ParallelContext.single(), DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    before = layer.weight.detach().float()
    layer(torch.zeros(1, 64, dtype=torch.bfloat16)).sum().backward()
    data_parallel.finish()
    factors = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.1, 1.0])
    optimizer.step(0.0, 0.0, 1.0, {"weight": factors})
    torch.testing.assert_close(
        layer.weight.detach(), (before * factors[:, None]).bfloat16(), rtol=0, atol=0
    )


def test_scores_are_taken_once_a_step():
    tracker = ScoreTracker(2)
    with pytest.raises(RuntimeError, match="run a micro-batch in training"):
        tracker.take()
    tracker.note(torch.tensor([1.0, -2.0]))
    tracker.note(torch.tensor([0.5, 3.0]))
    assert tracker.take().tolist() == [1.0, 3.0]
    assert tracker.take().tolist() == [0.0, 0.0]


def test_a_model_without_attention_has_nothing_to_clip():
    assert row_factors([torch.nn.Linear(2, 2)], SINGLE, QKClipConfig(qk_clip=True)) == {}
