"""Sizes of files as people write them; units are powers of 1000."""


def size_text(num_bytes: int) -> str:
    """Write a size with three digits and its unit."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def parse_size(text: str) -> int:
    """Read a size such as ``500MB`` or ``5GB`` in bytes."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    digits = text.rstrip("KMGTBkmgtb")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"--max-shard-size {text} is no size: use a number with MB or GB.")
    return size
