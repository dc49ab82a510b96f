"""Define what a card shows of measurements: ratios, and the receipts that hold them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A ratio is one measured number of a receipt: with the technique over without it.

    Args:
        ratio: the number; above 1 where there is more with the technique.
        of: "speed", "memory" or "reserved memory".
        shape: name of the model's size.
        knobs: keys that differ from the technique's defaults.
    """

    ratio: float
    of: str
    shape: str
    knobs: str = ""


@dataclass(frozen=True)
class Receipt:
    """A receipt holds what a technique was measured to change, as its card shows it.

    `benchmarks/card_receipts.py` writes receipts from the rows of results/.

    Args:
        field: field of the card that shows it.
        hardware: hardware that was measured on.
        where: the plan that the technique was added to or removed from.
        ratios: what was measured.
        note: words that follow.
    """

    field: str
    hardware: str
    where: str
    ratios: tuple[Ratio, ...]
    note: str = ""

    @property
    def text(self) -> str:
        """Return the receipt as text for the card."""
        words, before = "", ""
        for one in self.ratios:
            join = "" if not words else ", " if one.of == before else " and "
            of = "" if one.of == before else f" the {one.of}"
            knobs = f", {one.knobs}" if one.knobs else ""
            words += f"{join}{one.ratio:.2f}x{of} ({one.shape}{knobs})"
            before = one.of
        return f"{self.where}: {words}{self.note}"
