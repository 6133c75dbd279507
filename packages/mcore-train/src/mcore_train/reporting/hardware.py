"""Peak FLOP/s of GPUs, the denominator of MFU."""

_PEAKS = {
    "B300": 2250e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 FLOP/s with float32 accumulation, from the makers' data sheets."""


def peak_flops(device_name: str) -> float:
    """Return the dense bf16 peak of a device in FLOP/s; 0.0 if it is not known."""
    words = device_name.upper().replace("-", " ")
    for name in sorted(_PEAKS, key=len, reverse=True):
        if f" {name.upper()} " in f" {words} ":
            return _PEAKS[name]
    return 0.0
