import pytest

from mcore_train.reporting.hardware import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Some new thing A1000", 0.0),
    ],
)
def test_peaks_are_found_by_the_names_that_drivers_give(name, peak):
    assert peak_flops(name) == peak
