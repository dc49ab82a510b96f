"""Load the compiled loops, which need a package that is not always there."""

from importlib.util import find_spec
from types import ModuleType

from headrace.core.errors import UnsupportedError

INSTALL = "pip install 'headrace[data]'"
MISSING = (
    "near-duplicates and repeated n-grams are found by loops that Numba compiles, which is not "
    "installed"
)
METHODS = frozenset({"minhash", "bloom"})
"""Methods of `data.deduplication` that need these loops."""


def is_installed() -> bool:
    """Return whether Numba is there."""
    return find_spec("numba") is not None


def compiled() -> ModuleType:
    """Return `headrace.data.quality.native`; its loops are compiled when they are first called.

    Raises:
        UnsupportedError: Numba is not installed.
    """
    try:
        import numba  # noqa: F401
    except ImportError:
        raise UnsupportedError(MISSING, INSTALL) from None
    from headrace.data.quality import native

    return native
