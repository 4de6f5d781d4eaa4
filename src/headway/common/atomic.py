"""Atomic file writes: write to a temporary file in the same directory, then rename it over the target."""

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_replacement(path: Path, has_other_writers: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to. If the block succeeds, rename the file to `path`.

    A reader of `path` sees either the old file or the complete new one. If the block raises, the old file stays and the
    temporary file is removed.

    Args:
        path: File to create or replace.
        has_other_writers: Whether other processes might write this file at the same time. Each process then uses a different
            temporary name. Default: False.
    """
    unique_suffix = f".{secrets.token_hex(4)}" if has_other_writers else ""
    staged = path.with_name(f".{path.name}{unique_suffix}.tmp")
    try:
        yield staged
        staged.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # raise the error of the block, not one of the cleanup
            staged.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, has_other_writers: bool = False) -> None:
    """Write `text` to `path` in UTF-8. A reader sees either the old file or the complete new one.

    Args:
        path: File to create or replace.
        text: New content of the file.
        has_other_writers: Whether other processes might write this file at the same time. Each process then uses a different
            temporary name. Default: False.
    """
    with open_replacement(path, has_other_writers) as staged:
        staged.write_text(text, encoding="utf-8")
