"""A file that is written whole or not at all: under another name beside it first, then renamed into its place."""

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, has_rivals: bool = False) -> Iterator[Path]:
    """The file to write in this block, in the same folder; where the block ends well, it takes the place of `path`.

    A reader of `path` sees the old file or the new one. After a failure there is the old one, and nothing beside it.

    Args:
        path: what is written or replaced.
        has_rivals: other processes may write it at the same moment.
    """
    rival = f".{secrets.token_hex(4)}" if has_rivals else ""
    staged = path.with_name(f".{path.name}{rival}.tmp")
    try:
        yield staged
        staged.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            staged.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, has_rivals: bool = False) -> None:
    """Let the file hold this text, in UTF-8."""
    with replacing(path, has_rivals) as staged:
        staged.write_text(text, encoding="utf-8")
