"""Rotary positions against complex numbers, and stretched wavelengths against the rule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_models.config import TransformerConfig
from mcore_models.kernels.rope import rotate
from mcore_models.layers.rope import rotary_frequencies, rotary_tables


def config(**changes):
    base = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    return TransformerConfig(**(base | changes))


def turn_by_complex_numbers(x, positions, frequencies, interleaved):
    """The reference: pair channels into complex numbers and multiply by e^(i angle)."""
    size = 2 * len(frequencies)
    out = x.clone()
    for i, frequency in enumerate(frequencies.tolist()):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + size // 2)
        z = torch.complex(x[..., first], x[..., second])
        z = z * torch.exp(1j * positions.double() * frequency).view(-1, 1, 1)
        out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_is_multiplication_of_complex_numbers(interleaved, percent):
    made = config(rotary_percent=percent, rotary_interleaved=interleaved)
    x = torch.randn(5, 2, 3, 32, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 99_999])
    frequencies = rotary_frequencies(made)
    tables = rotary_tables(positions, frequencies, torch.float64)
    want = turn_by_complex_numbers(x, positions, frequencies, interleaved)
    torch.testing.assert_close(rotate(x, tables, interleaved), want, rtol=0, atol=1e-12)


def test_each_sequence_may_have_positions_of_its_own():
    frequencies = rotary_frequencies(config())
    x = torch.randn(4, 2, 3, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    got = rotate(x, rotary_tables(positions, frequencies, x.dtype))
    for b in range(2):
        alone = rotate(x[:, b : b + 1], rotary_tables(positions[b], frequencies, x.dtype))
        torch.testing.assert_close(got[:, b : b + 1], alone, rtol=0, atol=0)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_scores_depend_on_distance_alone(a, b):
    frequencies = rotary_frequencies(config())
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)

    def score(i, j):
        one, other = (
            rotate(x, rotary_tables(torch.tensor([p]), frequencies, x.dtype))
            for x, p in ((q, i), (k, j))
        )
        return (one * other).sum()

    torch.testing.assert_close(score(a, b), score(a + 11, b + 11), rtol=0, atol=1e-9)


def test_low_precision_is_rotated_in_float32_and_rounded_once():
    frequencies = rotary_frequencies(config())
    x = torch.randn(6, 1, 2, 32).bfloat16()
    positions = torch.arange(1000, 1006)
    got = rotate(x, rotary_tables(positions, frequencies, x.dtype))
    want = rotate(x.double(), rotary_tables(positions, frequencies, torch.float64))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def test_wavelengths_are_stretched_by_the_published_rule():
    made = config(rotary_base=500_000.0, use_rope_scaling=True, rope_scaling_factor=32.0)
    plain = rotary_frequencies(config(rotary_base=500_000.0)).tolist()
    for before, after in zip(plain, rotary_frequencies(made).tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength > 8192:
            want = before / 32
        elif wavelength < 8192 / 4:
            want = before
        else:
            s = (8192 / wavelength - 1) / 3
            want = before * ((1 - s) / 32 + s)
        assert math.isclose(after, want, rel_tol=1e-12)


def test_interpolation_divides_positions():
    half = rotary_frequencies(config(rotary_seq_len_interpolation_factor=2.0))
    torch.testing.assert_close(half * 2, rotary_frequencies(config()))
