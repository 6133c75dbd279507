"""Stochastic rounding: neighbours only, right on average, nothing where nothing is to round."""

import torch

from mcore_parallel.kernels.rounding import round_stochastically_


def rounded(wide, step=1):
    target = torch.empty_like(wide, dtype=torch.bfloat16)
    round_stochastically_(target, wide, step)
    return target.float()


def test_numbers_go_to_a_neighbour_as_often_as_it_is_near():
    positive = torch.arange(0x2000, 0x6000, dtype=torch.int16).view(torch.bfloat16)
    for share in (0.1, 0.5, 0.9):
        low = torch.cat([positive, -positive])  # each once, since equal ones go alike
        high = (low.view(torch.int16) + 1).view(torch.bfloat16).float()
        low = low.float()
        wide = low + share * (high - low)
        found = rounded(wide)
        assert ((found == low) | (found == high)).all()
        assert abs((found == high).float().mean() - share) < 0.01


def test_numbers_of_bfloat16_and_infinity_stay():
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    wide = torch.cat([exact, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    assert (rounded(wide) == wide).all()


def test_steps_round_otherwise_and_small_updates_add_up():
    generator = torch.Generator().manual_seed(2)
    weights = (1 + torch.rand(4096, generator=generator)).bfloat16()
    start = weights.float().mean()
    for step in range(200):
        wide = weights.float() + 1e-4  # a fortieth of bfloat16's distance at 1
        before = weights.clone()
        round_stochastically_(weights, wide, step)
        nearest = wide.bfloat16()
        assert (nearest == before).all()
    assert abs(weights.float().mean() - start - 200 * 1e-4) < 2e-3
