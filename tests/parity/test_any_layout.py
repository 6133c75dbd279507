"""Layouts drawn at random compute what one rank computes, in float64 to 1e-10."""

import pytest
from parity.any_layout import BASE, OPTIONS, check, command_line, draws, is_valid, shrink

SEED = 2026


@pytest.mark.parity_long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("seed", range(12))
def test_many_drawn_layouts_compute_what_one_rank_computes(world_size, seed):
    check(draws(seed, world_size, 10), world_size, check_shapes=True)


@pytest.mark.parity_long
def test_draws_are_the_same_for_a_seed_and_reach_most_choices():
    chosen = draws(SEED, 4, 8)
    assert chosen[:1] == draws(SEED, 4, 1)
    reached = {(name, str(value)) for draw in chosen for name, value in draw.items()}
    known = [c for row in OPTIONS for c in row if any(is_valid(c | d, 4) for d in chosen)]
    missed = [c for c in known if not {(n, str(v)) for n, v in c.items()} <= reached]
    assert len(missed) <= len(known) // 4, missed


def test_a_failing_draw_shrinks_to_the_flags_that_make_it_fail():
    draw = draws(SEED, 4, 1)[0] | {"normalization": "LayerNorm", "add_qkv_bias": True}
    least = shrink(draw, lambda d: d.get("add_qkv_bias", False), 4)
    assert least["add_qkv_bias"]
    assert "normalization" not in least
    assert "--add-qkv-bias" in command_line(least, 4)
    assert "--nproc 4" in command_line(least, 4)
    assert not set(least) & set(BASE)
