"""Say where Headrace runs."""

import sys

from headrace.core.errors import UnsupportedError


def check_system() -> None:
    """Refuse a system on which a run could not be kept whole.

    Runs are renamed, linked and pushed to the disk by calls of POSIX, and end by its signals. Linux
    and macOS have them. Windows has not, and neither links without a right that few users have.

    Raises:
        UnsupportedError: this is Windows.
    """
    if sys.platform != "win32":
        return
    raise UnsupportedError(
        "Headrace runs on Linux and macOS: it keeps runs whole by links, folders that are synced "
        "and signals, which Windows does not have. In WSL 2, which is Linux on Windows, all of it "
        "works, a GPU too",
        "wsl --install, and in its shell: pip install headrace",
    )
