"""Format numbers as people read them, and find divisors."""

from math import isqrt


def format_bytes(count: float) -> str:
    """Format bytes for a reader: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: float) -> str:
    """Format a count for a reader: 1234567 -> '1.23M'."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def format_seconds(seconds: float) -> str:
    """Format seconds for a reader: 3725 -> '62 min'; 0.0123 -> '12.3 ms'."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def part_of_text(share: float) -> str:
    """Format a share of the validation text: 0.125 -> 'over 12.5% of the validation text'."""
    return f"over {f'{share:.1%}' if share < 1 else 'all'} of the validation text"


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, both at least 1."""
    return max(d for d in divisors(number) if d <= most)


def divisors(number: int) -> list[int]:
    """Return every divisor of `number`, which is at least 1, in rising order.

    It is made from prime factors, so that a number of 2^36 is answered in a millisecond, and one
    that is a prime in a few.
    """
    factors, rest, prime = [1], number, 2
    while prime <= isqrt(rest):
        powers = 0
        while rest % prime == 0:
            rest, powers = rest // prime, powers + 1
        factors += [d * prime**k for d in factors for k in range(1, powers + 1)]
        prime += 1 if prime == 2 else 2
    if rest > 1:
        factors += [d * rest for d in factors]
    return sorted(factors)
