"""Progress display of a command: Headway's info messages on one line of the terminal, the latest one at a time."""

import contextlib
import logging
import sys
from collections.abc import Iterator


class _Status(logging.StreamHandler):  # type: ignore[type-arg]  # it cannot be subscripted in Python 3.10
    """Log handler that writes each message over the previous one on the terminal."""

    terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, prefixed with the escape sequence that clears the terminal line."""
        return f"\r\x1b[K{super().format(record)}"

    def close(self) -> None:
        """Clear the terminal line and close the handler."""
        self.stream.write("\r\x1b[K")
        self.flush()
        super().close()


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """Show the info messages of Headway's modules on standard error during a `with` block.

    Print results after the block. On a terminal, they would otherwise follow the last message on its line.
    """
    logger = logging.getLogger("headway")
    handler = _Status() if sys.stderr.isatty() else logging.StreamHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
