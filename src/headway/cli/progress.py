"""What a command of minutes is at: one line that changes on a terminal, a line per step elsewhere, on standard error."""

import logging
import sys

import click


class _Status(logging.StreamHandler):  # type: ignore[type-arg]  # it cannot be subscripted in Python 3.10
    """Shows a record in the place of the one before."""

    terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        """The text, behind what clears the line."""
        return f"\r\x1b[K{super().format(record)}"

    def close(self) -> None:
        """Clear the line."""
        self.stream.write("\r\x1b[K")
        super().close()


def show_progress() -> None:
    """Show what Headway's modules say of long work, until the command ends."""
    logger = logging.getLogger("headway")
    handler = _Status() if sys.stderr.isatty() else logging.StreamHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

    click.get_current_context().call_on_close(end)
