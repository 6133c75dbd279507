"""GPT on one rank: what it computes, forgets, caches and refuses."""

import pytest
import torch
import torch.nn.functional as F
from warm_ranks import run_ranks

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.flops import rank_bytes
from mcore_models.gpt import GPT
from mcore_models.kernels.attention_backends import attend
from mcore_models.layers.attention import Attention
from mcore_models.layers.layer_setup import Execution
from mcore_models.protocol import LayerState, ModelState
from mcore_moe.config import MoEConfig
from mcore_parallel import ParallelConfig, ParallelContext, Stage
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import WeightCasts, layer_gemms
from mcore_parallel.rng import RngStreams, StreamDropout

VOCAB = 37
SMALL = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 20,
    "max_position_embeddings": 16,
    "init_method_std": 0.3,
}
LEARNED = {"position_embedding_type": "learned_absolute"}
STREAMS = {
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "per_layer_embedding_size": 4,
    "per_layer_embedding_vocab_size": 30,
    "activation_sparsity_pattern": (0.6, 0.0, 0.3),
    "num_kv_shared_layers": 1,
}
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
EXPERTS = {"num_experts": 4, "moe_aux_loss_coeff": 0.1, "moe_layer_freq": "2"}


def gpt(changes=None, moe=None, dtype=torch.float64, **options):
    return GPT(
        TransformerConfig(**(SMALL | (changes or {}))),
        ParallelContext.single(),
        vocab_size=VOCAB,
        moe=MoEConfig(**(moe or {})),
        dtype=dtype,
        **options,
    )


def tokens(rows=2, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def logits(model, ids, **options):
    return model.logits(model(ids, **options)[0])[..., :VOCAB]


@pytest.mark.parametrize("changes", [{}, LEARNED, STREAMS, {"window_size": (3, 0)}])
def test_a_token_does_not_see_later_ones(changes):
    model, ids = gpt(changes), tokens()
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % VOCAB
    before, after = logits(model, ids), logits(model, other)
    assert torch.equal(before[:7], after[:7])
    assert not torch.isclose(before[7], after[7]).any(-1).all()


def test_a_window_forgets_what_no_layer_carries_on():
    model, ids = gpt({"window_size": (2, 0), "num_layers": 2}), tokens()
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1) % VOCAB
    changed = (logits(model, ids) != logits(model, other)).any(-1).any(-1)
    # Two layers of two earlier tokens each carry a token four places on.
    assert changed.tolist() == [3 <= place <= 7 for place in range(12)]


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.3)])
@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_cross_entropy_of_the_true_vocabulary(label_smoothing, z_loss, tied):
    options = {"label_smoothing": label_smoothing, "z_loss_coeff": z_loss}
    model = gpt({"untie_embeddings_and_output_weights": not tied, **options})
    ids, labels = tokens(), tokens(seed=1)
    hidden, _ = model(ids)
    want = F.cross_entropy(
        model.logits(hidden)[..., :VOCAB].permute(1, 2, 0),
        labels,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    got = model.token_losses(hidden, labels, label_smoothing)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    want = want + z_loss * model.logits(hidden)[..., :VOCAB].logsumexp(-1).square().t()
    weights = torch.rand(2, 12, dtype=torch.float64)
    total, losses = model.loss(hidden, labels, weights)
    torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, (want * weights).sum(), rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    fast = torch.autograd.grad(total, parameters, retain_graph=True)
    slow = torch.autograd.grad((want * weights).sum(), parameters)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class PagedState:
    """Keeps keys and values in pages of three tokens, scattered over one pool a layer."""

    def __init__(self, num_layers):
        self.layers = [PagedLayer(self) for _ in range(num_layers)]
        self.length = 0

    def layer(self, number):
        return self.layers[number]


class PagedLayer:
    def __init__(self, state):
        self.state = state
        self.pool = torch.full((7 * 3, 2, 2, 2, 6), torch.nan, dtype=torch.float64)

    def attend(self, q, k, v, *, window=-1, backend="auto"):
        begin, end = self.state.length, self.state.length + k.shape[0]
        slots = [(5 * (place // 3) % 7) * 3 + place % 3 for place in range(end)]
        self.pool[slots[begin:]] = torch.stack([k, v], 1)
        keys, values = self.pool[slots].unbind(1)
        if self is self.state.layers[-1]:
            self.state.length = end
        return attend(q, keys, values, window=window, backend=backend)


@pytest.mark.parametrize("changes", [{}, LEARNED, {"window_size": (3, 0)}])
def test_any_state_gives_the_logits_of_the_whole_sequence(changes):
    model, ids = gpt(changes).eval(), tokens()
    state = PagedState(3)
    assert isinstance(state, ModelState)
    assert isinstance(state.layer(0), LayerState)
    with torch.no_grad():
        want = logits(model, ids)
        parts = [logits(model, part, state=state) for part in ids.split([5, 1, 4, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, LEARNED])
def test_positions_may_begin_anew_in_each_sequence(changes):
    model, ids = gpt(changes), tokens(1, 8)
    by_hand = logits(model, ids, positions=torch.arange(8).repeat(1, 1))
    torch.testing.assert_close(by_hand, logits(model, ids))
    # A single token does not know its place but by the learned table.
    pair = torch.cat([ids, ids])
    shifted = torch.stack([torch.arange(8), torch.arange(8) + 5])
    rows = logits(model, pair, positions=shifted)
    is_same = torch.allclose(rows[:, 0], rows[:, 1], rtol=1e-9)
    assert is_same == (not changes), "rotary scores depend on distance alone"


@pytest.mark.parametrize(
    "recomputing",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_num_layers": 2},
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
        },
        {"recompute_granularity": "selective"},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp", "moe", "layernorm"),
        },
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "mlp_act", "moe_act", "shared_experts"),
        },
    ],
)
@pytest.mark.parametrize(("changes", "moe"), [(DROPS, EXPERTS), (DROPS | STREAMS, {})])
def test_recomputing_changes_no_bit(recomputing, changes, moe):
    ids, found = tokens(), []
    for config in (RecomputeConfig(), RecomputeConfig(**recomputing)):
        model = gpt(changes, moe, execution=Execution(recomputing=config))
        hidden, aux = model(ids)
        loss = model.token_losses(hidden, ids).sum() + aux
        loss.backward()
        after = torch.stack([state.sum() for state in model.streams.state().values()])
        found.append([loss.detach(), *(p.grad for p in model.parameters()), after])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def saved_bytes(recomputing, ids=None, changes=None, gemms=(), **options):
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    execution = Execution(recomputing=RecomputeConfig(**recomputing), gemms=gemms)
    model = gpt(changes, execution=execution, **options)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(tokens() if ids is None else ids)
    return sum(size for place, size in seen.items() if place not in own)


def test_recomputing_keeps_less():
    whole = saved_bytes({})
    selective = saved_bytes({"recompute_granularity": "selective"})
    full = saved_bytes({"recompute_granularity": "full"})
    pairs = saved_bytes({"recompute_granularity": "full", "recompute_num_layers": 2})
    block = {"recompute_method": "block", "recompute_num_layers": 1}
    one = saved_bytes({"recompute_granularity": "full", **block})
    assert full * 3 < selective < whole
    assert pairs < full < one < whole


def test_fp8_keeps_what_the_planner_counts():
    # Gates in plain torch keep an intermediate that the planner does not count.
    changes = {"hidden_size": 32, "ffn_hidden_size": 48, "swiglu": False}
    config, ids = Fp8Config(fp8_format="e4m3", first_last_layers_bf16=True), tokens(2, 16)
    model = TransformerConfig(**(SMALL | changes))
    saved, counted = [], []
    for fp8 in (config, Fp8Config()):
        casts = WeightCasts()
        gemms = layer_gemms(fp8, ParallelContext.single(), 3, casts)
        with casts.keeping():
            options = {"dtype": torch.float32, "gemms": gemms}
            saved.append(saved_bytes({}, ids, changes, **options))
            saved[-1] += sum(f.numbers.nbytes for cast in casts._kept.values() for f in cast)
        found = rank_bytes(
            model,
            VOCAB,
            ParallelConfig(),
            world_size=1,
            seq_length=16,
            micro_batch_size=2,
            fp8=fp8,
            weight_bytes=4,
        )
        # Codes of the gradient that passes within a layer are counted, and not kept.
        passing = 2 * 16 * 48 * bool(fp8.fp8_format)
        counted.append(found.weights + found.activations - passing)
    # Beside the codes a float32 scale an input, and what is smaller than that.
    assert saved[0] - saved[1] == pytest.approx(counted[0] - counted[1], abs=4 * 5)


@pytest.mark.parametrize("kind", DROPS)
def test_dropout_is_off_in_eval_and_continues_from_its_state(kind):
    drops = {kind: DROPS[kind]}
    model, ids = gpt(drops), tokens()
    one, two = logits(model, ids), logits(model, ids)
    assert not torch.equal(one, two)
    again = gpt(drops)
    assert torch.equal(logits(again, ids), one)
    state = again.streams.state()
    assert torch.equal(logits(again, ids), two)
    again.streams.set_state(state)
    assert torch.equal(logits(again, ids), two)
    model.eval()
    assert torch.equal(logits(model, ids), logits(model, ids))


def test_chunks_of_one_rank_share_their_streams():
    ctx = ParallelContext.single()
    streams = RngStreams(1, ctx)
    assert gpt(execution=Execution(streams=streams)).streams is streams


def masks(sequence_parallel):
    """Where every dropout of a model strikes on this tensor rank, by path."""
    ctx = ParallelContext.build(
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    )
    model = GPT(TransformerConfig(**(SMALL | DROPS)), ctx, vocab_size=VOCAB)
    equal = torch.ones(8, 1, 2, 4)
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, StreamDropout):
            found[path] = module(equal)
        if isinstance(module, Attention):
            found[path] = module._attend(equal, equal, equal, None)
    ctx.destroy()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_drop_alike_what_they_hold_alike_and_nothing_else(sequence_parallel):
    one, two = run_ranks(masks, 2, sequence_parallel)
    assert len(one) == 1 + 2 * SMALL["num_layers"]
    for path, mask in one.items():
        has_own_heads = path.endswith("attention")
        is_alike = not (sequence_parallel or has_own_heads)
        assert torch.equal(mask, two[path]) == is_alike, path


def test_auxiliary_losses_of_all_layers_are_summed():
    model, ids = gpt({}, EXPERTS), tokens()
    _, aux = model(ids)
    assert aux.item() > 0
    assert aux.requires_grad
    double = gpt({}, EXPERTS | {"moe_layer_freq": "1"})
    assert double(ids)[1].item() > 1.2 * aux.item()
    assert gpt()(ids)[1].item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_activations_keep_the_models_dtype_and_losses_are_wide(dtype):
    model, ids = gpt(DROPS, EXPERTS, dtype=dtype), tokens()
    hidden, aux = model(ids)
    wide = torch.promote_types(dtype, torch.float32)
    assert hidden.dtype == dtype
    assert aux.dtype == model.token_losses(hidden, ids).dtype == wide


def test_bfloat16_is_near_float64():
    wide, narrow = gpt(), gpt(dtype=torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
        ids = tokens()
        got = narrow.token_losses(narrow(ids)[0], ids).double()
        want = wide.token_losses(wide(ids)[0], ids)
    assert (got - want).abs().mean() / want.abs().mean() < 1.6e-2


def test_it_learns_a_sequence_by_heart():
    model, ids = gpt({"init_method_std": 0.02}, dtype=torch.float32), tokens(1, 16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.token_losses(model(ids[:, :-1])[0], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("changes", [LEARNED, STREAMS])
def test_stages_in_a_row_are_the_whole_model(changes):
    whole, ids = gpt(changes), tokens()
    hidden = ids
    for stage in (
        Stage(0, range(1), has_embedding=True, has_loss=False),
        Stage(1, range(1, 1), has_embedding=False, has_loss=False),
        Stage(2, range(1, 3), has_embedding=False, has_loss=True),
    ):
        hidden, _ = gpt(changes, stage=stage)(hidden)
    torch.testing.assert_close(hidden, whole(ids)[0], rtol=0, atol=0)


def test_a_stage_without_the_keys_of_its_layers_is_refused():
    stage = Stage(1, range(2, 3), has_embedding=False, has_loss=True)
    with pytest.raises(ValueError, match="--decoder-last-pipeline-num-layers 2 or more"):
        gpt(STREAMS, stage=stage)


def test_tokens_beyond_the_table_of_vectors_have_the_vector_of_token_0():
    model, ids = gpt(STREAMS), torch.tensor([[0, 29, 30, 36]])
    zeros = torch.zeros(4, 1, 24, dtype=torch.float64)
    vectors = model.per_layer_embedding(ids, zeros)[:, 0]
    assert torch.equal(vectors[2], vectors[0])
    assert torch.equal(vectors[3], vectors[0])
    assert not torch.equal(vectors[1], vectors[0])


def test_a_token_whose_embedding_is_0_has_finite_gradients_in_all_streams():
    model, ids = gpt(STREAMS), tokens()
    with torch.no_grad():
        model.embedding.weight[ids[0, 3]] = 0
    hidden, _ = model(ids)
    model.token_losses(hidden, ids).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_sequences_longer_than_the_positions_are_refused():
    model = gpt()
    words = "17 tokens is longer than --max-position-embeddings 16"
    with pytest.raises(ValueError, match=words):
        model(tokens(1, 17))
    state = PagedState(3)
    state.length = 10
    with pytest.raises(ValueError, match=words):
        model(tokens(1, 7), state=state)


def test_positions_outside_the_table_are_refused():
    with pytest.raises(ValueError, match="positions lie in 0 to 16"):
        gpt(LEARNED)(tokens(1, 2), positions=torch.tensor([0, 16]))


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="token ids lie in 0 to 37"):
        gpt()(torch.tensor([[0, VOCAB]]))


def refusals():
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=2))
    with pytest.raises(ValueError, match=r"give each rank its stage.*split_layers"):
        GPT(TransformerConfig(**SMALL), ctx, vocab_size=VOCAB)
    ctx.destroy()
    ctx = ParallelContext.build(
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    )
    model = GPT(TransformerConfig(**SMALL), ctx, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="--sequence-parallel cannot split 7 tokens"):
        model(tokens(1, 7))
    one_head = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    with pytest.raises(ValueError, match="--num-attention-heads 1 cannot be split"):
        GPT(one_head, ctx, vocab_size=VOCAB)
    ctx.destroy()


def cache_over_context_ranks():
    ctx = ParallelContext.build(ParallelConfig(context_parallel_size=2))
    model = GPT(TransformerConfig(**SMALL), ctx, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="--context-parallel-size 2 does not support a cache"):
        model(tokens(1, 4), state=PagedState(3))
    ctx.destroy()


def test_a_cache_under_context_parallelism_is_refused():
    run_ranks(cache_over_context_ranks, 2)


def test_layouts_that_do_not_fit_are_refused_on_every_rank():
    run_ranks(refusals, 2)


def eager_and_compiled(changes, moe):
    """Hidden state and gradients of plain and of compiled blocks."""
    ids, found = tokens(), []
    for is_compiled in (False, True):
        model = gpt({"num_layers": 1} | changes, moe)
        if is_compiled:
            for block in model.blocks.values():
                block.compile(backend="aot_eager", fullgraph=not moe)
        hidden, aux = model(ids)
        (model.token_losses(hidden, ids).sum() + aux).backward()
        found.append([hidden.detach(), *(p.grad for p in model.parameters())])
    return found


@pytest.mark.parity_long  # tests/alacarte compiles a GPT by default
@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, {}),
        (LEARNED | {"normalization": "LayerNorm"}, {}),
        ({}, EXPERTS),
        (STREAMS | {"activation_sparsity_pattern": (0.6,), "num_kv_shared_layers": 0}, {}),
    ],
)
def test_compiled_blocks_equal_eager_ones(changes, moe):
    (found,) = run_ranks(eager_and_compiled, 1, changes, moe, check_shapes=False)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
