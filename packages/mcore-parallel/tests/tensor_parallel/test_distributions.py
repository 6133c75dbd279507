"""Distributions over a split vocabulary equal plain ones on the gathered logits."""

import pytest
import torch
import torch.nn.functional as F
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.tensor_parallel.distributions import (
    vocab_parallel_kl,
    vocab_parallel_log_probs,
    vocab_parallel_top_k,
)

VOCAB, PADDED, T = 9, 16, 1.7
"""With two ranks the second one has a single column that is not padding."""


def logits():
    draw = torch.Generator().manual_seed(5)
    both = torch.randn(2, 3, 4, PADDED, dtype=torch.float64, generator=draw) * 3
    ids = torch.randint(VOCAB, (3, 4, 2), generator=draw)
    factors = torch.randn(3, 4, 2, dtype=torch.float64, generator=draw)
    return *both, ids, factors


def plain():
    """Return what torch computes on whole logits: values, gradients, top ids."""
    student, teacher, ids, factors = logits()
    student.requires_grad_()
    q = F.log_softmax(student[..., :VOCAB] / T, -1)
    p = F.log_softmax(teacher[..., :VOCAB] / T, -1)
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    (kl_grad,) = torch.autograd.grad((kl * factors[..., 0]).sum(), student, retain_graph=True)
    picked = q.gather(-1, ids)
    (grad,) = torch.autograd.grad((picked * factors).sum(), student)
    return kl, kl_grad, picked, grad, p.topk(3, -1)


def split(tp):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    student, teacher, ids, factors = logits()
    width = PADDED // tp
    own = slice(ctx.tp.rank * width, (ctx.tp.rank + 1) * width)
    student = student[..., own].clone().requires_grad_()
    options = {"vocab_size": VOCAB, "axis": ctx.tp, "temperature": T}
    kl = vocab_parallel_kl(student, teacher[..., own], **options)
    (kl_grad,) = torch.autograd.grad((kl * factors[..., 0]).sum(), student)
    picked = vocab_parallel_log_probs(student, ids, **options)
    (grad,) = torch.autograd.grad((picked * factors).sum(), student)
    return (
        kl.detach(),
        kl_grad,
        picked.detach(),
        grad,
        vocab_parallel_top_k(teacher[..., own], 3, **options),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_divergence_log_probs_and_top_k_equal_those_of_whole_logits(tp):
    kl, kl_grad, picked, grad, top = plain()
    ranks = run_ranks(split, tp, tp)
    for each in ranks:
        torch.testing.assert_close(each[0], kl.detach())
        torch.testing.assert_close(each[2], picked.detach())
        assert torch.equal(each[4][0], top.indices)
        torch.testing.assert_close(each[4][1], top.values)
    torch.testing.assert_close(torch.cat([each[1] for each in ranks], -1), kl_grad)
    torch.testing.assert_close(torch.cat([each[3] for each in ranks], -1), grad)
