"""Progress display of a command: Headway's info messages on one line of the terminal, the latest one at a time."""

import logging
import sys

import click


class _Status(logging.StreamHandler):  # type: ignore[type-arg]  # it cannot be subscripted in Python 3.10
    """Log handler that writes each message over the previous one on the terminal."""

    terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, prefixed with the escape sequence that clears the terminal line."""
        return f"\r\x1b[K{super().format(record)}"

    def close(self) -> None:
        """Clear the terminal line and close the handler."""
        self.stream.write("\r\x1b[K")
        super().close()


def show_progress() -> None:
    """Show the info messages of Headway's modules on standard error until the current click command ends."""
    logger = logging.getLogger("headway")
    handler = _Status() if sys.stderr.isatty() else logging.StreamHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def stop_showing() -> None:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

    click.get_current_context().call_on_close(stop_showing)
