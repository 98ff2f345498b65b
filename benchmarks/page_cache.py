"""Reads from the disk itself: the system forgets what it keeps of files."""

import os
from pathlib import Path


def drop_page_cache(folder: Path) -> None:
    """Let the system forget the contents of all files below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
