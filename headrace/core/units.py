"""Numbers as people read them, and divisors."""

from math import isqrt


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: float) -> str:
    """1234567 -> '1.23M'."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def format_seconds(seconds: float) -> str:
    """3725 -> '1 h 02 min'; 0.0123 -> '12.3 ms'."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, both at least 1."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max(d for n in small for d in (n, number // n) if d <= most)
