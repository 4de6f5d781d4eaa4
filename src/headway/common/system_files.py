"""Reading of small system files, such as those in /proc and /sys, which might be missing."""

from pathlib import Path


def read_system_file(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
