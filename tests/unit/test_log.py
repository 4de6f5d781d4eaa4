"""Test logging: one line per run instead of one per rank, levels, and lines of the user's code."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.log import get_logger


@pytest.fixture
def set_rank(monkeypatch):
    def move(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return move


def test_only_rank_0_logs_unless_all_ranks_must(set_rank, caplog):
    log = get_logger("hw.test.ranks", log_level="info")
    set_rank(0, 1)
    log.info("alone %d", 1)
    set_rank(0, 2)
    log.info("first")
    set_rank(1, 2)
    log.info("not heard")
    log.info("all", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["alone 1", "[rank 0] first", "[rank 1] all"]


def test_once_is_counted_by_text(caplog):
    log = get_logger("hw.test.once")
    for value in (1, 1, 2):
        log.warning_once("value %d", value)
    assert [record.getMessage() for record in caplog.records] == ["value 1", "value 2"]


def test_suppressed_message_is_not_counted(caplog):
    log = get_logger("hw.test.level", log_level="WARNING")
    log.info_once("later")
    log.logger.setLevel("INFO")
    log.info_once("later")
    assert len(caplog.records) == 1


def test_logged_line_is_the_callers(caplog):
    get_logger("hw.test.line").warning("here")
    get_logger("hw.test.line").warning_once("there")
    assert {record.filename for record in caplog.records} == {"test_log.py"}


def test_level_is_set_for_this_logger_only(monkeypatch):
    before = logging.getLogger().level
    assert get_logger("hw.test.own", log_level="debug").logger.level == logging.DEBUG
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "error")
    assert get_logger("hw.test.env").logger.level == logging.ERROR
    assert get_logger("hw.test.env", log_level=logging.INFO).logger.level == logging.INFO
    assert logging.getLogger().level == before
    assert get_logger("hw.test.own") is get_logger("hw.test.own")


def test_level_from_the_environment_applies_unless_logging_is_configured():
    said = "from headway import get_logger\nget_logger('own.part').info('told')\nget_logger('own').info('told too')\n"
    set_up = "import logging\nlogging.basicConfig(format='mine: %(message)s')\n"
    cases = {"": ["INFO own.part: told", "INFO own: told too"], set_up: ["mine: told", "mine: told too"]}
    for first, expected in cases.items():
        code = first + said + "get_logger('own.part').info('again')\n"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                             env={**os.environ, "HEADWAY_LOG_LEVEL": "info"})  # fmt: skip
        assert result.stderr.splitlines()[:2] == expected
        assert result.stderr.count("again") == 1
    silent = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60,
                            env={name: value for name, value in os.environ.items() if name != "HEADWAY_LOG_LEVEL"})  # fmt: skip
    assert silent.stderr == ""


@pytest.mark.parametrize("text", ["debug", "INFO", " warning ", "10"])
def test_level_is_a_word_or_a_number(monkeypatch, text):
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", text)
    expected = int(text) if text.isdecimal() else getattr(logging, text.strip().upper())
    assert get_logger("hw.test.word").logger.level == expected


def test_unknown_level_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"'loud' .get_logger.* must be debug, info"):
        get_logger("hw.test.loud", log_level="loud")
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"'loud' .environment: HEADWAY_LOG_LEVEL. must be debug, info"):
        get_logger("hw.test.loud")


def test_command_line_reports_an_unknown_level_in_one_line():
    result = subprocess.run([sys.executable, "-m", "headway", "launch", "-n", "2", "--cpu", __file__], capture_output=True,
                         text=True, env={**os.environ, "HEADWAY_LOG_LEVEL": "loud"}, timeout=60)  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("headway: error: the log level 'loud'")
    assert result.stderr.count("\n") == 1


def test_warning_of_headway_ends_with_the_users_line(caplog):
    own = get_logger("headway.core.example")
    own.warning("%d%% are left", 3)
    own.warning_once("100% are left")
    line = f"{Path(__file__).name}:{sys._getframe().f_lineno - 1} in test_warning_of_headway_ends_with_the_users_line"
    assert caplog.messages[0].startswith("3% are left (")
    assert caplog.messages[1].startswith("100% are left (")
    assert caplog.messages[1].endswith(f"{line})")


def test_same_text_is_warned_of_once(caplog):
    own = get_logger("headway.core.example")
    own.warning_once("told once")
    own.warning_once("told once")
    assert len(caplog.messages) == 1


def test_other_messages_have_no_line(caplog):
    get_logger("headway.core.example", "INFO").info("for information")
    get_logger("my.script").warning("the script's own")
    own = get_logger("headway.core.example")
    own.warning("at %s:%d already", __file__, sys._getframe().f_lineno)
    thread = threading.Thread(target=logging.Logger.warning, args=(own.logger, "from a library's thread"))
    thread.start()
    thread.join()
    assert caplog.messages[:2] == ["for information", "the script's own"]
    assert caplog.messages[2].endswith("already")
    assert caplog.messages[3] == "from a library's thread"
