"""Test the progress display of commands."""

import io
import logging
import sys

import pytest

from headway.cli.progress import show_progress


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "expected"), [(True, "\r\x1b[K1 of 2\r\x1b[K2 of 2\r\x1b[K"), (False, "1 of 2\n2 of 2\n")]
)
def test_results_do_not_follow_a_message_on_its_line(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, expected: str
) -> None:
    stream = _Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("headway.anything")
    level, handlers = logging.getLogger("headway").level, list(logging.getLogger("headway").handlers)

    def work() -> None:
        with show_progress():
            logger.info("1 of 2")
            logger.info("2 of 2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert stream.getvalue() == expected
    logger.info("not shown")
    assert stream.getvalue() == expected
    assert (logging.getLogger("headway").level, logging.getLogger("headway").handlers) == (level, handlers)
