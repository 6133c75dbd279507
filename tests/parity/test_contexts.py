"""Several layouts alive in one process, and one rank against a program that shares no code."""

import math

import pytest
import torch
from parity.case import GLOBAL_BATCH_SIZE, MODEL, NUM_STEPS, ROWS, train_in_two_contexts
from torch.nn import functional
from warm_ranks import run_ranks

from mcore_parallel.testing.layout_comparison import EXACT, tensor_errors


def test_two_layouts_train_in_turn_in_one_process(dense):
    for losses in run_ranks(train_in_two_contexts, 4, check_shapes=False):
        assert losses[0] == pytest.approx(dense["one"].losses, rel=1e-10)
        assert losses[1] == pytest.approx(dense["one"].losses, rel=1e-10)


def test_one_rank_trains_as_plain_torch_does(dense):
    """Loss, gradients, clipping by the norm, cosine, decay of matrices alone, AdamW."""
    oracle = dense["one"]
    w = {n: t.clone().requires_grad_() for n, t in oracle.initial.items()}
    matrices = [t for t in w.values() if t.dim() > 1]
    vectors = [t for t in w.values() if t.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step, expected in enumerate(oracle.losses):
        loss = plain_loss(w, step)
        assert loss.item() == pytest.approx(expected, rel=1e-10)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            errors = tensor_errors(oracle.gradients, {name: w[name].grad for name in w})
            assert max(errors.values()) < EXACT, errors
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), 0.5)
        if step == 0:
            assert oracle.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / NUM_STEPS)) / 2
        optimizer.step()


def plain_loss(w, step):
    """Mean loss over the valid tokens of a step's rows."""
    rows = [ROWS[step * GLOBAL_BATCH_SIZE + i] for i in range(GLOBAL_BATCH_SIZE)]
    tokens = torch.tensor([row["tokens"].tolist() for row in rows])
    labels = torch.tensor([row["labels"].tolist() for row in rows])
    mask = torch.tensor([row["loss_mask"].tolist() for row in rows], dtype=torch.float64)
    losses = functional.cross_entropy(
        plain_gpt(w, tokens).transpose(1, 2), labels, reduction="none"
    )
    return (losses * mask).sum() / mask.sum()


def plain_gpt(w, tokens):
    """Logits [B, S, V] of the case's model from its logical weights: plain torch, one page."""
    N, G = MODEL["num_attention_heads"], MODEL["num_query_groups"]
    x = w["embedding.weight"][tokens]
    B, S, D = x.shape
    H = D // N
    for i in range(MODEL["num_layers"]):
        block = f"blocks.{i}"
        h = norm(x, w[f"{block}.attention_norm.weight"])
        q, k, v = (
            linear(h, w, f"{block}.attention.qkv.{p}").view(B, S, -1, H).transpose(1, 2)
            for p in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(N // G, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / H**0.5
        future = torch.ones(S, S, dtype=torch.bool).triu(1)
        h = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + linear(h.transpose(1, 2).reshape(B, S, D), w, f"{block}.attention.proj")
        h = norm(x, w[f"{block}.mlp_norm.weight"])
        gate = functional.silu(linear(h, w, f"{block}.mlp.fc1.gate"))
        x = x + linear(gate * linear(h, w, f"{block}.mlp.fc1.up"), w, f"{block}.mlp.fc2")
    return norm(x, w["final_norm.weight"]) @ w["embedding.weight"].t()


def linear(x, w, name):
    return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotate(x):
    """Rotary positions, the halves of a head rotated together."""
    S, H = x.shape[-2:]
    inverse = 10000.0 ** (-torch.arange(0, H, 2, dtype=torch.float64) / H)
    angles = torch.outer(torch.arange(S, dtype=torch.float64), inverse)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
