"""Rank-aware logging on top of the standard logging module: one line per run instead of one per rank."""

import logging
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from headway.common import callsite, env, scope
from headway.common.untrusted import parse_whole_number, shorten_repr
from headway.errors import ConfigError

LEVEL = "HEADWAY_LOG_LEVEL"
"""Name of the environment variable that sets the level of all of Headway's loggers."""

_OWN_PREFIX = "headway."
"""Prefix of the names of Headway's own loggers. Loggers that a script creates with `get_logger` have other names."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
    _Handler = logging.StreamHandler[TextIO]
else:
    # Neither can be subscripted in Python 3.10.
    _Adapter, _Handler = logging.LoggerAdapter, logging.StreamHandler


class OnceFilter(set[tuple[str, str]]):
    """Registry of the (logger name, text) pairs that were already logged with `once=True` in this process."""


class RankLogger(_Adapter):
    """Logger that logs only on rank 0 by default.

    Headway's own warnings end with the line of user code that caused them, such as "(train.py:12 in main)".

    All logging methods accept two more keywords. With `main_process_only=False` (default: True), every rank logs the
    message, prefixed with its rank. With `once=True` (default: False), a text is logged only once per process. The
    keyword `in_order` is accepted for compatibility with Accelerate, but no rank waits for another.

    Args:
        logger: Underlying logger.
        extra: Contextual values, as for `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message if the level, the rank and `once` allow it.

        Args:
            level: Level of the message.
            msg: Message with optional %-placeholders.
            args: Values for the placeholders.
            kwargs: Keywords of `logging.Logger.log`, plus `main_process_only`, `once` and `in_order`.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        once = kwargs.pop("once", False)
        kwargs.pop("in_order", None)
        if not self.isEnabledFor(level) or (main_process_only and env.get_rank() != 0):
            return
        if once:
            text = str(msg) % args if args else str(msg)
            logged = scope.get_or_create(OnceFilter)
            if (self.logger.name, text) in logged:
                return
            logged.add((self.logger.name, text))
        if level >= logging.WARNING and self.logger.name.startswith(_OWN_PREFIX):
            msg, args = _add_user_line(str(msg) % args if args else str(msg)), ()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller of this method
        message, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        self.logger.log(level, message, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return a tuple of (message, unchanged keywords). With several ranks, the message begins with the rank."""
        if env.get_world_size() > 1:
            msg = f"[rank {env.get_rank()}] {msg}"
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning only once per process for each text."""
        self._log_once(logging.WARNING, msg, *args, **kwargs)

    def info_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log an info message only once per process for each text."""
        self._log_once(logging.INFO, msg, *args, **kwargs)

    def _log_once(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message once. The record's location is that of the caller of `warning_once` or `info_once`."""
        self.log(level, msg, *args, once=True, **kwargs | {"stacklevel": kwargs.get("stacklevel", 1) + 2})


def _add_user_line(text: str) -> str:
    """Append the location in user code that led to a warning, such as "(train.py:12 in main)".

    The warning is returned unchanged if it already names this location, or if no user code is on the stack.
    """
    frame = callsite.find_user_frame()
    if frame is None:
        return text
    location = callsite.Frame.from_frame(frame)
    is_named = f"{location.file}:{location.line}" in text or str(location) in text
    return text if is_named else f"{text} ({location})"


@cache
def _make_adapter(name: str) -> RankLogger:
    return RankLogger(logging.getLogger(name))


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return the rank-aware logger with the given name.

    By default, only rank 0 logs. `main_process_only=False` in a logging call makes every rank log. With several ranks,
    messages begin with the rank. It works before the first Accelerator, too, because the rank is read from the launcher's
    environment. If HEADWAY_LOG_LEVEL is set, and the program has not set up logging, the logger also writes to stderr.

    Args:
        name: Dotted name, as for `logging.getLogger`. Equal names return the same logger.
        log_level: Level of this logger, such as "INFO" or logging.DEBUG. None (the default): the level in the environment
            variable HEADWAY_LOG_LEVEL; if the variable is not set, the level does not change. The root logger is never
            changed.

    Raises:
        ConfigError: If `log_level` or the variable is not a level.

    Example::

        logger = get_logger(__name__, log_level="INFO")
        logger.info("shown once per run, by rank 0")
        logger.info("shown by every rank", main_process_only=False)
    """
    logger = _make_adapter(name)
    env_level = read_level()
    level = env_level if log_level is None else _parse_level(log_level, "get_logger(log_level=...)")
    if level is not None:
        logger.logger.setLevel(level)
    if env_level is not None:
        _add_output(logger.logger)
    return logger


def read_level() -> int | None:
    """Return the level in HEADWAY_LOG_LEVEL as a number, or None if the variable is not set or empty.

    Raises:
        ConfigError: If the variable's value is not a level.
    """
    text = env.get(LEVEL)
    return _parse_level(text.strip(), f"environment: {LEVEL}") if text is not None and text.strip() else None


def is_debugging() -> bool:
    """Whether HEADWAY_LOG_LEVEL is "debug" or a lower level. False if it is not set or not a level."""
    try:
        level = read_level()
    except ConfigError:
        return False
    return level is not None and level <= logging.DEBUG


def silence_elastic() -> None:
    """Suppress the warnings of torch's elastic launcher, such as those about agents, rendezvous and signals.

    Headway's launch report contains what a user needs to know. With HEADWAY_LOG_LEVEL=debug the warnings are kept.
    """
    if is_debugging():
        return
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # torch sets the level of each of these loggers, so a parent's level has no effect.
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL if name.endswith("multiprocessing.api") else logging.ERROR)


def _parse_level(level: str | int, origin: str) -> int:
    """Return a level as a number.

    Args:
        level: Level as a number, or as text: a name in upper or lower case, or a number.
        origin: Setting that contains the level, for the message.

    Raises:
        ConfigError: If it is not a level.
    """
    number = level if isinstance(level, int) else parse_whole_number(level)
    if number is None:
        number = logging.getLevelName(str(level).upper())  # returns a string if there is no such level
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(
            f"the log level {shorten_repr(level)} ({origin}) must be debug, info, warning, error or critical, or a number such as 10"
        )
    return number


def _add_output(logger: logging.Logger) -> None:
    """Make a logger write to stderr if the program has not set up logging.

    Without a handler, Python would show only messages of level WARNING and above.
    """
    if not logger.hasHandlers():
        handler = _DefaultHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


class _DefaultHandler(_Handler):
    """Handler that writes to stderr until the program sets up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record unless the root logger has handlers, or another handler of this class has written it."""
        if not logging.getLogger().handlers and not getattr(record, "was_written_by_headway", False):
            record.was_written_by_headway = True  # a handler of this class on a parent logger must not write it again
            super().emit(record)
