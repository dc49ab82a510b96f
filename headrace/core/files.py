"""Files that survive a power cut."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
