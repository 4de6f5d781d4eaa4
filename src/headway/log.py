"""Rank-aware logging: the standard logging module, one line per run instead of one per rank."""

import logging
from collections.abc import MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from headway.common import env, scope
from headway.common.untrusted import shown, whole_number
from headway.errors import ConfigError

LEVEL = "HEADWAY_LOG_LEVEL"
"""The environment variable that sets the level of all of Headway's loggers."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
    _Handler = logging.StreamHandler[TextIO]
else:
    # Neither can be subscripted in Python 3.10.
    _Adapter, _Handler = logging.LoggerAdapter, logging.StreamHandler


class OnceFilter(set[tuple[str, str]]):
    """What was logged once in this process: the logger and the text."""


class RankLogger(_Adapter):
    """A logger that speaks on rank 0 only, unless a call says otherwise.

    Every logging method takes more keywords: `main_process_only=True` (False: every rank speaks, prefixed with its rank)
    and `once=False` (True: the same text is logged once per process). `in_order` is accepted for the name's sake: a line
    says its rank, and no rank waits for another to speak.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log where the rank and `once` allow it."""
        main_process_only = kwargs.pop("main_process_only", True)
        once = kwargs.pop("once", False)
        kwargs.pop("in_order", None)
        if not self.isEnabledFor(level) or (main_process_only and env.rank() != 0):
            return
        if once:
            text = str(msg) % args if args else str(msg)
            said = scope.own(OnceFilter)
            if (self.logger.name, text) in said:
                return
            said.add((self.logger.name, text))
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        message, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        self.logger.log(level, message, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the rank where there is more than one."""
        if env.world_size() > 1:
            msg = f"[rank {env.rank()}] {msg}"
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Warn once per process about the same thing."""
        self._log_once(logging.WARNING, msg, *args, **kwargs)

    def info_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Inform once per process about the same thing."""
        self._log_once(logging.INFO, msg, *args, **kwargs)

    def _log_once(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        self.log(level, msg, *args, once=True, **kwargs | {"stacklevel": kwargs.get("stacklevel", 1) + 2})


@cache
def _adapter(name: str) -> RankLogger:
    return RankLogger(logging.getLogger(name))


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """A rank-aware logger by the usual dotted name.

    Args:
        name: as for `logging.getLogger`; the same name gives the same logger.
        log_level: the level of THIS logger ("INFO", logging.DEBUG, ...); None leaves it. The environment variable
            HEADWAY_LOG_LEVEL is used where it is None. The root logger is never touched.

    Raises:
        ConfigError: there is no such level.
    """
    logger = _adapter(name)
    asked = asked_level()
    level = asked if log_level is None else _level(log_level, "get_logger(log_level=...)")
    if level is not None:
        logger.logger.setLevel(level)
    if asked is not None:
        _add_output(logger.logger)
    return logger


def asked_level() -> int | None:
    """The level that HEADWAY_LOG_LEVEL asks for; None where it is not set or empty.

    Raises:
        ConfigError: there is no such level.
    """
    text = env.get(LEVEL)
    return _level(text.strip(), f"environment: {LEVEL}") if text is not None and text.strip() else None


def is_debugging() -> bool:
    """Does HEADWAY_LOG_LEVEL ask for everything? A level that does not exist does not."""
    try:
        level = asked_level()
    except ConfigError:
        return False
    return level is not None and level <= logging.DEBUG


def silence_elastic() -> None:
    """No warnings of torch's launcher about agents, rendezvous and closing signals: what a user needs is in the report."""
    if is_debugging():
        return
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # Each has a level of its own there.
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL if name.endswith("multiprocessing.api") else logging.ERROR)


def _level(asked: str | int, origin: str) -> int:
    number = asked if isinstance(asked, int) else whole_number(asked)
    if number is None:
        number = logging.getLevelName(str(asked).upper())  # text for a level that does not exist
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(
            f"the log level {shown(asked)} ({origin}) must be debug, info, warning, error or critical, or a number such as 10"
        )
    return number


def _add_output(logger: logging.Logger) -> None:
    """Write to stderr where nobody has set logging up: Python's last resort drops what is below WARNING."""
    if not logger.hasHandlers():
        output = _LastResort()
        output.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(output)


class _LastResort(_Handler):
    """Output to stderr that is silent once the program has set logging up itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, unless the root logger's handlers do."""
        if not logging.getLogger().handlers and not getattr(record, "is_told", False):
            record.is_told = True  # loggers above this one may have such an output too
            super().emit(record)
