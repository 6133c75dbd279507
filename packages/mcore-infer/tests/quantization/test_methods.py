"""GPTQ against exact least squares, AWQ and SmoothQuant against what they promise."""

from dataclasses import replace

import pytest
import torch

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, find_layout
from mcore_ckpt.mapping.rules import Link
from mcore_infer.quantization.budget import allocate
from mcore_infer.quantization.gated_mlp import RoundedGatedMLP
from mcore_infer.quantization.loading import round_to_nearest_
from mcore_infer.quantization.matrices import FusedMatrix, Member, select
from mcore_infer.quantization.methods import (
    compensate_and_round,
    fold_,
    input_scale,
    round_to_nearest,
    rounded_columns,
    scale_and_round,
    search_strength,
    smooth_and_round,
)
from mcore_infer.quantization.observing import InputStatistics
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.mlp import MLP
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards

GROUPS_OF_8 = find_layout("W4A16_GPTQ", 8)


def matrix(weight, norm=None, rows=None):
    rows = rows or [weight.shape[0]]
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    members = tuple(
        Member(f"m{i}", end - n, end) for i, (n, end) in enumerate(zip(rows, ends, strict=True))
    )
    return FusedMatrix("m", 0, weight, members, norm)


def seen_of(x, *, has_pairs=True):
    seen = InputStatistics(x.shape[1], x.device, has_pairs=has_pairs)
    seen.add(x)
    return seen


def gptq_by_least_squares(weight, hessian, layout):
    """Round one column; then move all that are left to the best place, anew each time."""
    current, width = weight.clone(), weight.shape[1]
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for column in range(width):
        if column % layout.group[1] == 0:
            ahead = current[:, column : column + layout.group[1]]
            scale = ahead.float().abs().amax(1) / 7
        rounded = (current[:, column] / scale).round().clamp(-8, 7)
        codes[:, column] = rounded.to(torch.int8)
        current[:, column] = rounded * scale
        if column + 1 < width:
            done, left = slice(0, column + 1), slice(column + 1, width)
            error = (current[:, done] - weight[:, done]) @ hessian[done, left]
            move = torch.linalg.solve(hessian[left, left], error.t()).t()
            current[:, left] = weight[:, left] - move
    return codes


def test_gptq_rounds_as_exact_least_squares_column_by_column():
    torch.manual_seed(0)
    x = torch.randn(64, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64)
    weight = torch.randn(6, 24, dtype=torch.float64)
    hessian = x.t() @ x / 64
    codes, scales = rounded_columns(weight, GROUPS_OF_8, hessian, damping=0.0)
    assert torch.equal(codes, gptq_by_least_squares(weight, hessian, GROUPS_OF_8))
    wide = codes * scales.repeat_interleave(8, 1)
    nearest = round_to_nearest(matrix(weight), GROUPS_OF_8).wide.double()
    assert (x @ (wide - weight).t()).norm() < (x @ (nearest - weight).t()).norm()


def test_gptq_rounds_channels_that_no_input_used_to_the_nearest():
    torch.manual_seed(1)
    weight = torch.randn(4, 16)
    nearest = round_to_nearest(matrix(weight, rows=[2, 2]), GROUPS_OF_8)
    unused = compensate_and_round(
        matrix(weight, rows=[2, 2]), GROUPS_OF_8, seen_of(torch.zeros(3, 16))
    )
    for one, other in zip(unused.packed, nearest.packed, strict=True):
        assert torch.equal(one, other)
    x = torch.randn(40, 16)
    x[:, 8:] = 0
    half = compensate_and_round(matrix(weight), GROUPS_OF_8, seen_of(x))
    assert torch.equal(half.wide[:, 8:], nearest.wide[:, 8:])
    assert torch.isfinite(half.wide).all()


@pytest.mark.parametrize("kind", ["rms", "rms_1p", "layer"])
def test_before_rounding_a_folded_norm_and_weight_are_what_they_were(kind):
    torch.manual_seed(2)
    norm = (LayerNorm if kind == "layer" else RMSNorm)(
        16, zero_centered=kind == "rms_1p"
    ).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, weight = torch.randn(5, 16).double(), torch.randn(8, 16).double()
    want = norm(x) @ weight.t()
    strength = torch.rand(16).double() * 10 + 0.1
    fold_(norm, strength)
    torch.testing.assert_close(norm(x) @ (weight * strength).t(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parallel_residual", ["off", "one_norm"])
def test_only_a_norm_that_one_matrix_reads_takes_its_scales(parallel_residual):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=8,
        parallel_residual=parallel_residual,
    )
    model = GPT(config, ParallelContext.single(), vocab_size=257)
    links = [Link((name,), name) for name in sorted(named_shards(model))]
    folds = {
        one.path for one in select(model, links, GROUPS_OF_8).matrices if one.norm is not None
    }
    wanted = {"blocks.0.attention.qkv", "blocks.0.mlp.fc1"}
    assert folds == (wanted if parallel_residual == "off" else set())


def test_awq_finds_a_smaller_error_than_the_nearest_and_folds_it_only_into_a_norm():
    torch.manual_seed(3)
    layout = find_layout("W4A16_AWQ", 16)
    x = torch.randn(200, 32)
    x[:, 3] *= 40  # a channel that matters
    weight, seen = torch.randn(12, 32), seen_of(x)
    want = x @ weight.t()

    def error(wide, divided):
        return (x / divided @ wide.t() - want).norm()

    nearest = error(round_to_nearest(matrix(weight), layout).wide, 1)
    alone = scale_and_round(matrix(weight), layout, seen)
    assert alone.folded is None
    assert error(alone.wide, 1 / alone.pre_quant_scale) < 0.7 * nearest
    norm = RMSNorm(32)
    folded = scale_and_round(matrix(weight, norm), layout, seen)
    assert folded.pre_quant_scale is None
    torch.testing.assert_close(norm.weight.data, 1 / folded.folded)
    assert torch.equal(folded.wide, alone.wide)
    # The error by the products of inputs is that of the outputs.
    relative = seen.output_error(weight, alone.wide * alone.pre_quant_scale - weight)
    exact = error(alone.wide, 1 / alone.pre_quant_scale) / want.norm()
    assert relative == pytest.approx(exact.item(), rel=1e-3)
    assert torch.equal(search_strength(matrix(weight), layout, seen_of(0 * x)), torch.ones(32))


def test_smoothquant_halves_the_range_between_inputs_and_weights():
    torch.manual_seed(4)
    x, weight = torch.randn(100, 16), torch.randn(8, 16)
    x[:, 5] *= 100
    x[:, 6] = 0
    layout = LAYOUTS["W8A8_SQ_PER_CHANNEL"]
    found = smooth_and_round(matrix(weight), layout, seen_of(x, has_pairs=False))
    smooth = x * found.pre_quant_scale
    tops, own = x.abs().amax(0), weight.abs().amax(0)
    kept = tops > 0
    torch.testing.assert_close(smooth.abs().amax(0)[kept], (tops * own).sqrt()[kept])
    assert torch.isfinite(found.pre_quant_scale).all()
    scale = input_scale(layout, found.input_amax)
    rounded = (smooth / scale).round()
    assert rounded.abs().max() == 127
    error = (rounded * scale @ found.wide.t() - x @ weight.t()).norm()
    plain = round_to_nearest(matrix(weight), layout).wide
    coarse = x.abs().amax() / 127
    unsmoothed = ((x / coarse).round() * coarse @ plain.t() - x @ weight.t()).norm()
    assert error < 0.3 * unsmoothed


def test_query_heads_that_read_the_same_values_share_scales_of_their_outputs():
    torch.manual_seed(5)
    x, weight = torch.randn(100, 16) * torch.rand(16), torch.randn(8, 16)
    mixed = replace(matrix(weight), value_heads=(2, 4))
    for found in (
        search_strength(mixed, GROUPS_OF_8, seen_of(x)),
        smooth_and_round(mixed, LAYOUTS["W8A8_SQ_PER_CHANNEL"], seen_of(x)).pre_quant_scale,
    ):
        heads = found.view(2, 2, 4)
        assert torch.equal(heads[:, 0], heads[:, 1])
        assert heads[:, 0].unique().numel() == 8


def test_members_share_the_scale_that_belongs_to_the_whole_tensor():
    weight = torch.cat([torch.randn(4, 32), 100 * torch.randn(4, 32)])
    for algo in ("FP8", "NVFP4"):
        found = round_to_nearest(matrix(weight, rows=[4, 4]), LAYOUTS[algo])
        shared = -1 if algo == "NVFP4" else 0
        one, other = (scales[shared] for scales in found.scales)
        assert torch.equal(one, other)
    apart = round_to_nearest(matrix(weight, rows=[4, 4]), LAYOUTS["W8A16"])
    assert (apart.scales[1].weight_scale > 10 * apart.scales[0].weight_scale.min()).all()


def test_a_budget_goes_where_it_takes_off_most_error():
    errors = [[0.4, 0.02, 0.0], [0.1, 0.01, 0.0], [float("inf"), 0.03, 0.0]]
    bits = [4.0, 8.0, 16.0]
    assert allocate(errors, [100, 100, 10], bits, 6.1) == [1, 0, 1]
    assert allocate(errors, [100, 100, 10], bits, 4.2) == [0, 0, 1]
    assert allocate(errors, [100, 100, 10], bits, 16.0) == [2, 2, 2]
    assert allocate(errors, [400, 100, 10], bits, 5.0) == [0, 1, 1]  # the first is too large
    with pytest.raises(ValueError, match=r"--budget 4 is below 4\.19"):
        allocate(errors, [100, 100, 10], bits, 4.0)


def test_only_plain_gated_mlps_of_codes_round_their_gates_and_keep_their_names():
    for changes, is_rounded in (
        ({}, True),
        ({"swiglu": False}, False),
        ({"add_bias_linear": True}, False),
        ({"activation_func_clamp_value": 7.0}, False),
    ):
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=64, **changes
        )
        model = GPT(config, ParallelContext.single(), vocab_size=64).eval()
        names, x = list(model.state_dict()), torch.randn(40, 1, 32)
        round_to_nearest_(model, LAYOUTS["FP8_PER_CHANNEL_PER_TOKEN"])
        mlp = model.blocks["0"].mlp
        assert isinstance(mlp, RoundedGatedMLP) == is_rounded
        assert list(model.state_dict()) == names
        assert torch.equal(mlp(x), MLP.forward(mlp, x))
