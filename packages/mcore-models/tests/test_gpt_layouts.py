"""One rank against every layout: token losses and all logical gradients in float64.

Gradients are finalised by hand here (partial sums, tied copies, data ranks), from nothing
but the model's layouts: what the model declares is what is tested.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.protocol import MicroBatch
from mcore_moe.config import MoEConfig
from mcore_parallel import ParallelConfig, ParallelContext, named_parameters
from mcore_parallel.collectives import all_reduce, own_slice
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_join, zigzag_split
from mcore_parallel.pipeline_parallel.stages import split_layers
from mcore_parallel.rng import fill_parameter_

VOCAB, BATCH, SEQUENCE = 13, 2, 8
TOLERANCE = 1e-10

LLAMA = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 12,
    "rotary_percent": 0.7,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 4,
    "init_method_std": 0.2,
}
GPT2 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 9,
    "normalization": "LayerNorm",
    "swiglu": False,
    "openai_gelu": True,
    "add_bias_linear": True,
    "make_vocab_size_divisible_by": 3,
    "init_method_std": 0.2,
}
ALIBI = GPT2 | {
    "hidden_size": 18,
    "num_attention_heads": 6,  # no power of two
    "position_embedding_type": "alibi",
    "embedding_layernorm": True,
}
CHUNKED = LLAMA | {
    "qk_layernorm": False,
    "qk_l2_norm": True,
    "attention_chunk_size": 3,
    "window_attn_skip_freq": "2",
    "rope_skip_freq": "2",
    "attention_temperature_span": 2,
}
MLA = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 12,
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "rotary_interleaved": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale_all_dim": 0.7,
    "make_vocab_size_divisible_by": 4,
    "init_method_std": 0.2,
}
HYBRID = {
    "num_layers": 4,
    "hybrid_override_pattern": "M*M[M-]",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "position_embedding_type": "none",
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "mamba_conv_kernel": 3,
    "mamba_chunk_size": 3,
    "mamba_proj_bias": True,
    "mamba_dt_limit": (0.002, 0.6),
    "make_vocab_size_divisible_by": 4,
    "init_method_std": 0.2,
}
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
ONE_FURTHER = FURTHER | {"mtp_num_layers": 1}  # documents are too short for a second
DELTA_NET = {
    "num_layers": 2,
    "hybrid_override_pattern": "[G-][*E]",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "rotary_percent": 0.4,
    "ffn_hidden_size": 12,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "make_vocab_size_divisible_by": 4,
    "init_method_std": 0.2,
}
GATED_EXPERTS = {
    "num_experts": 4,
    "moe_aux_loss_coeff": 0.3,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}
EXPERTS = {"num_experts": 4, "moe_aux_loss_coeff": 0.3, "moe_layer_freq": "2"}


DEEPSEEK = {
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 8,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
}


@dataclass(frozen=True)
class Case:
    model: dict
    parallel: dict = field(default_factory=dict)
    moe: dict = field(default_factory=dict)
    packed: bool = False


# Borders of the documents in the batch's rows, on, beside and inside the chunks of a rank.
PACKED = ((0, 1, 4, SEQUENCE), (0, 3, 5, SEQUENCE))


def layout(**degrees):
    names = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
    long = {
        f"{name}_model_parallel_size": degrees.pop(k)
        for k, name in names.items()
        if k in degrees
    }
    if "cp" in degrees:
        long["context_parallel_size"] = degrees.pop("cp")
    return long | degrees


CP_LEVELS = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
TWO_RANKS = {
    "tp2": Case(LLAMA, layout(tp=2)),
    "tp2 sp": Case(LLAMA, layout(tp=2, sequence_parallel=True)),
    "tp2, learned positions": Case(GPT2, layout(tp=2)),
    "tp2 sp, learned positions": Case(GPT2, layout(tp=2, sequence_parallel=True)),
    "cp2": Case(LLAMA, layout(cp=2)),
    "tp2 sp, alibi": Case(ALIBI, layout(tp=2, sequence_parallel=True)),
    "pp2, alibi": Case(ALIBI, layout(pp=2)),
    "cp2, learned positions": Case(GPT2, layout(cp=2)),
    "cp2, window": Case(LLAMA | {"window_size": (2, 0)}, layout(cp=2)),
    "pp2": Case(LLAMA, layout(pp=2)),
    "pp2, tied": Case(GPT2, layout(pp=2)),
    "dp2": Case(LLAMA),
    "ep2": Case(LLAMA, layout(ep=2), EXPERTS),
    "tp2, experts": Case(LLAMA | {"add_bias_linear": True}, layout(tp=2), EXPERTS),
    "tp2 sp, experts": Case(LLAMA, layout(tp=2, sequence_parallel=True), EXPERTS),
    "tp2 ep2, experts": Case(
        LLAMA,
        layout(tp=2, ep=2, expert_tensor_parallel_size=1, sequence_parallel=True),
        EXPERTS,
    ),
    "cp2, experts": Case(LLAMA, layout(cp=2), EXPERTS),
    "cp2, all-gather": Case(LLAMA, layout(cp=2, cp_comm_type="all_gather")),
    "cp2, chunks, packed": Case(CHUNKED, layout(cp=2, cp_comm_type="all_gather"), packed=True),
    "cp2, a2a": Case(LLAMA, layout(cp=2, cp_comm_type="a2a")),
    "cp2, a2a, window": Case(LLAMA | {"window_size": (2, 0)}, layout(cp=2, cp_comm_type="a2a")),
    "cp2, packed": Case(LLAMA, layout(cp=2), packed=True),
    "cp2, all-gather, packed": Case(
        LLAMA, layout(cp=2, cp_comm_type="all_gather"), packed=True
    ),
    "cp2, window, packed": Case(LLAMA | {"window_size": (2, 0)}, layout(cp=2), packed=True),
    "cp2, a2a, packed": Case(LLAMA, layout(cp=2, cp_comm_type="a2a"), packed=True),
    "tp2 sp, packed": Case(LLAMA, layout(tp=2, sequence_parallel=True), packed=True),
    "pp2, packed": Case(GPT2, layout(pp=2), packed=True),
    "tp2, latent": Case(MLA | {"q_lora_rank": 0}, layout(tp=2)),
    "tp2 sp, latent, packed": Case(
        MLA | ONE_FURTHER, layout(tp=2, sequence_parallel=True), packed=True
    ),
    "cp2, latent, packed": Case(MLA | ONE_FURTHER, layout(cp=2), packed=True),
    "tp2, further tokens": Case(LLAMA | FURTHER, layout(tp=2)),
    "pp2, further tokens": Case(LLAMA | FURTHER, layout(pp=2)),
    "dp2, further tokens": Case(MLA | FURTHER, {}, DEEPSEEK),
    "cp2, latent, all-gather": Case(MLA, layout(cp=2, cp_comm_type="all_gather")),
    "cp2, latent, a2a": Case(MLA, layout(cp=2, cp_comm_type="a2a")),
    "pp2, latent, experts": Case(MLA | FURTHER, layout(pp=2), DEEPSEEK),
    "ep2, latent, experts": Case(MLA, layout(ep=2), DEEPSEEK),
    "tp2 sp, hybrid, packed": Case(HYBRID, layout(tp=2, sequence_parallel=True), packed=True),
    "cp2, hybrid, packed": Case(HYBRID, layout(cp=2), packed=True),
    "pp2, hybrid": Case(
        HYBRID | ONE_FURTHER | {"hybrid_override_pattern": "M*M[M-]/M-"}, layout(pp=2)
    ),
    "tp2 sp, delta net, packed": Case(
        DELTA_NET, layout(tp=2, sequence_parallel=True), GATED_EXPERTS, packed=True
    ),
    "cp2, delta net, packed": Case(DELTA_NET, layout(cp=2), GATED_EXPERTS, packed=True),
    "pp2, delta net": Case(DELTA_NET, layout(pp=2), GATED_EXPERTS),
}
FOUR_RANKS = {
    "tp4, 2 kv heads": Case(LLAMA, layout(tp=4)),
    "tp4 sp, 2 kv heads": Case(LLAMA, layout(tp=4, sequence_parallel=True)),
    "tp2 cp2 sp": Case(LLAMA, layout(tp=2, cp=2, sequence_parallel=True)),
    "tp2 pp2, tied": Case(GPT2, layout(tp=2, pp=2, sequence_parallel=True)),
    "cp2 dp2 ep4": Case(LLAMA, layout(cp=2, ep=4), EXPERTS),
    "cp4, 2 kv heads": Case(LLAMA, layout(cp=4)),
    "cp4, 2 kv heads, all-gather": Case(LLAMA, layout(cp=4, cp_comm_type="all_gather")),
    "cp4, 2 kv heads, a2a": Case(LLAMA, layout(cp=4, cp_comm_type="a2a")),
    "cp2x2, 2 kv heads, packed": Case(LLAMA, layout(cp=4, **CP_LEVELS), packed=True),
    "cp2x2, latent, packed": Case(MLA, layout(cp=4, **CP_LEVELS), packed=True),
    "tp2 cp2, 1 kv head a rank, a2a": Case(LLAMA, layout(tp=2, cp=2, cp_comm_type="a2a")),
    "tp2 cp2 sp, latent, experts": Case(
        MLA | FURTHER, layout(tp=2, cp=2, ep=2, sequence_parallel=True), DEEPSEEK
    ),
    "cp4, packed": Case(LLAMA, layout(cp=4), packed=True),
    "tp4, hybrid, 2 groups": Case(HYBRID, layout(tp=4)),
    "tp2 cp2, delta net": Case(
        DELTA_NET | ONE_FURTHER | {"hybrid_override_pattern": "[G-][*E]/G-"},
        layout(tp=2, cp=2, ep=2, sequence_parallel=True),
        GATED_EXPERTS,
    ),
    "tp2 cp2, hybrid, 1 group a rank": Case(HYBRID, layout(tp=2, cp=2), packed=True),
}


def batch():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    mask = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.7
    mask[0, :5] = False
    return tokens, labels, mask.double()


def build(case, ctx, stage=None):
    model = GPT(
        TransformerConfig(**case.model),
        ctx,
        vocab_size=VOCAB,
        moe=MoEConfig(**case.moe),
        stage=stage,
        dtype=torch.float64,
    )
    # Biases and norms begin at constants that would hide mistakes: shake them by name.
    with torch.no_grad():
        for named in named_parameters(model):
            if len(named.layout.parts[0].shape) == 1:
                constant = named.parameter.clone()
                fill_parameter_(named, seed=9, std=0.3)
                named.parameter.add_(constant)
    return model


def step(case):
    """Losses of all tokens, sum and gradients of this rank's share of the batch."""
    ctx = ParallelContext.build(ParallelConfig(**case.parallel))
    stages = split_layers(case.model["num_layers"], ctx.pp.size)
    model = build(case, ctx, stages[ctx.pp.rank] if ctx.pp.size > 1 else None)
    tokens, labels, mask = batch()
    whole = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    if case.packed:
        whole["cu_seqlens"] = torch.tensor(PACKED)
    prepared = {name: model.prepare(whole)[name] for name in model.entries}
    num_valid = None
    if model.stage.has_loss:
        masks = model.loss_masks(MicroBatch(prepared))
        num_valid = {name: mask.sum() for name, mask in masks.items()}
    losses = []
    for one in own_slice(torch.arange(BATCH), ctx.dp):
        before = receive(ctx, model) if ctx.pp.rank else None
        documents, positions = None, None
        if case.packed:
            documents = Documents(PACKED[one : one + 1])
            positions = zigzag_split(counted(PACKED[one])[None], ctx.cp, dim=1)
        row = {n: zigzag_split(t[one : one + 1], ctx.cp, dim=1) for n, t in prepared.items()}
        batch_of_one = MicroBatch(row, positions, documents)
        hidden, aux = model.run_stage(batch_of_one, before)
        roots = [aux / BATCH] if aux.requires_grad else []
        if ctx.pp.rank + 1 < ctx.pp.size:
            dist.send(hidden.detach(), ctx.pp.ranks[ctx.pp.rank + 1])
            grad = torch.empty_like(hidden)
            dist.recv(grad, ctx.pp.ranks[ctx.pp.rank + 1])
            torch.autograd.backward([hidden, *roots], [grad, *(None for _ in roots)])
            continue
        every = model.unreduced_losses(hidden, batch_of_one)
        weights = {
            name: mask / num_valid[name] * model.loss_coefficients[name]
            for name, mask in model.loss_masks(batch_of_one).items()
        }
        totals = model.losses(hidden, batch_of_one, weights)
        for name, total in totals.items():
            again = (every[name] * weights[name]).sum()
            torch.testing.assert_close(again, total, rtol=TOLERANCE, atol=TOLERANCE)
        token_losses = torch.stack([loss.detach() for loss in every.values()], -1)
        torch.autograd.backward([sum(totals.values()), *roots])
        if before is not None:
            dist.send(before.grad, ctx.pp.ranks[ctx.pp.rank - 1])
        losses.append(zigzag_join(token_losses, ctx.cp, dim=1))
    found = pieces(model, ctx), torch.cat(losses) if losses else None
    held = [0, 0]  # numbers in matrices outside experts, and in experts
    for name, p in model.blocks.named_parameters():
        held[".experts." in name] += p.numel() if p.dim() > 1 else 0
    ctx.destroy()
    return *found, (len(hidden), *held)


def counted(borders):
    """Positions that begin at 0 in every document."""
    return torch.cat([torch.arange(b - a) for a, b in pairwise(borders)])


def receive(ctx, model):
    rows = SEQUENCE // ctx.cp.size // (ctx.tp.size if model.sequence_parallel else 1)
    hidden = torch.empty(rows, 1, model.config.hidden_size, dtype=torch.float64)
    dist.recv(hidden, ctx.pp.ranks[ctx.pp.rank - 1])
    return hidden.requires_grad_()


def pieces(model, ctx):
    """Finalised gradients of this rank as (name, shape, offsets, tensor)."""
    found = []
    for named in named_parameters(model):
        grad = named.parameter.grad.clone()
        grad = all_reduce(grad, named.layout.tied)
        grad = all_reduce(grad, ctx.data_axes()[named.layout.data])
        for part in named.layout.parts:
            view = all_reduce(part.view(grad).contiguous(), part.partial)
            found.append((part.name, part.shape, part.offsets, view))
    return found


def assemble(ranks):
    """Whole logical gradients; copies of one piece on several ranks must be equal."""
    whole = {}
    for name, shape, offsets, data in (piece for rank in ranks for piece in rank):
        target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        box = target[tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))]
        known = ~box.isnan()
        torch.testing.assert_close(box[known], data[known], rtol=0, atol=1e-13)
        box.copy_(data)
    assert not any(t.isnan().any() for t in whole.values())
    return whole


def all_steps(cases):
    return [step(case) for case in cases]


ORACLES = {}


def on_one_rank(case):
    """Gradients and losses of a case's model, computed once for all its layouts."""
    case = Case(case.model, {}, case.moe, case.packed)
    if repr(case) not in ORACLES:
        gradients, losses, _ = step(case)
        ORACLES[repr(case)] = assemble([gradients]), losses
    return ORACLES[repr(case)]


def compare(case, results):
    want, want_losses = on_one_rank(case)
    got = assemble([pieces for pieces, *_ in results])
    seen = [losses for _, losses, _ in results if losses is not None]
    got_losses = torch.cat(seen) if len(seen[0]) < BATCH else seen[0]
    if len(seen[0]) < BATCH:  # data ranks hold different rows, context and tensor ranks equal
        got_losses = torch.cat([seen[0], seen[-1]])
    torch.testing.assert_close(got_losses, want_losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert got.keys() == want.keys()
    floor = 1e-3 * max(t.abs().max() for t in want.values())
    for name, tensor in want.items():
        error = (got[name] - tensor).abs().max() / max(tensor.abs().max(), floor)
        assert error < TOLERANCE, (name, error)
        assert tensor.abs().max() > 0, name


LONG = {
    *("tp2, learned positions", "pp2, alibi", "cp2, learned positions", "cp2, window"),
    *("pp2, tied", "tp2, experts", "cp2, all-gather", "cp2, a2a", "cp2, window, packed"),
    *("cp2, a2a, packed", "pp2, packed", "tp2, latent", "tp2, further tokens"),
    *("cp2, latent, all-gather", "cp2, latent, a2a", "tp4, 2 kv heads"),
    *("cp4, 2 kv heads, all-gather", "cp4, packed", "cp2x2, latent, packed"),
}
"""Cases that others nearly hold: in the long suite."""


@cache
def of_ranks(world_size, is_long):
    """What each rank found in all cases of one world size, by name."""
    cases = {2: TWO_RANKS, 4: FOUR_RANKS}[world_size]
    cases = {name: case for name, case in cases.items() if (name in LONG) == is_long}
    # Four ranks run the code of two, whose shapes are checked.
    is_checked = world_size == 2
    found = run_ranks(all_steps, world_size, list(cases.values()), check_shapes=is_checked)
    return dict(zip(cases, zip(*found, strict=True), strict=True))


def marked(names):
    long = pytest.mark.parity_long
    return [pytest.param(name, marks=long) if name in LONG else name for name in names]


@pytest.mark.parametrize("name", marked(TWO_RANKS))
def test_two_ranks_give_the_losses_and_gradients_of_one(name):
    compare(TWO_RANKS[name], of_ranks(2, name in LONG)[name])


@pytest.mark.parametrize(
    ("name", "tokens", "dense", "experts"),
    [
        ("tp2", SEQUENCE, 1 / 2, 0),
        ("tp2 sp", SEQUENCE // 2, 1 / 2, 0),
        ("cp2", SEQUENCE // 2, 1, 0),
        ("pp2", SEQUENCE, 1 / 2, 0),
        ("ep2", SEQUENCE, 1, 1 / 2),
    ],
)
def test_ranks_hold_their_share_of_tokens_and_weights(name, tokens, dense, experts):
    held = [found[-1] for found in of_ranks(2, False)[name]]
    assert held == [shares(TWO_RANKS[name], tokens, dense, experts)] * 2


def shares(case, tokens, dense, experts):
    """What a rank holds: tokens, and of all weights outside and inside of experts a part."""
    *_, (_, whole, whole_experts) = step(Case(case.model, {}, case.moe))
    return tokens, dense * whole, experts * whole_experts


@pytest.mark.parametrize(
    ("name", "tokens", "dense", "experts"),
    [
        ("tp2 cp2 sp", SEQUENCE // 4, 1 / 2, 0),
        ("tp2 pp2, tied", SEQUENCE // 2, 1 / 4, 0),
        ("cp2 dp2 ep4", SEQUENCE // 2, 1, 1 / 4),
    ],
)
def test_axes_together_leave_each_rank_the_product(name, tokens, dense, experts):
    held = [found[-1] for found in of_ranks(4, False)[name]]
    assert held == [shares(FOUR_RANKS[name], tokens, dense, experts)] * 4


@pytest.mark.parametrize("name", marked(FOUR_RANKS))
def test_four_ranks_give_the_losses_and_gradients_of_one(name):
    compare(FOUR_RANKS[name], of_ranks(4, name in LONG)[name])


@pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT2, ALIBI, CHUNKED, HYBRID],
    ids=["rotary", "learned positions", "alibi", "chunks", "hybrid"],
)
def test_packed_documents_compute_what_they_do_one_by_one(shape):
    model = build(Case(shape), ParallelContext.single())
    tokens, labels, mask = batch()
    positions = torch.stack([counted(borders) for borders in PACKED])
    hidden, _ = model(tokens, positions, documents=Documents(PACKED))
    together, _ = model.loss(hidden, labels, mask)
    together.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row, borders in enumerate(PACKED):
        for a, b in pairwise(borders):
            hidden, _ = model(tokens[row : row + 1, a:b])
            loss, _ = model.loss(
                hidden, labels[row : row + 1, a:b], mask[row : row + 1, a:b].contiguous()
            )
            loss.backward()
            total += loss.detach()
    torch.testing.assert_close(together.detach(), total, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_documents_that_are_not_the_batchs_are_refused():
    model = build(Case(LLAMA), ParallelContext.single())
    with pytest.raises(ValueError, match="documents are of 1 rows of 8 tokens"):
        model(batch()[0], documents=Documents([[0, 8]]))
