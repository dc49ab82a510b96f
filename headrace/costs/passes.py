"""Say after how many passes over a text a model learns it by heart."""

from headrace.costs.constants import numbers

BY_HEART, BY_HEART_POWER = numbers("passes_by_heart")


def most_passes(parameters: float, fresh: float) -> float:
    """Return the passes over a text after which a model learns it by heart, at least one.

    From there on its held-out loss rises, and more training makes it worse. The larger a model is
    beside the text, the fewer they are: measured by benchmarks/repeated_text.py. That training can
    do harm so is in arXiv 2509.14786; the law of arXiv 2305.16264 knows only of no gain.
    """
    return max(1.0, BY_HEART * (parameters / fresh) ** -BY_HEART_POWER)
