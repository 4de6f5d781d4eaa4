"""Rank-aware logging: the standard logging module, one line per run instead of one per rank."""

import logging
from collections.abc import MutableMapping
from functools import cache
from typing import Any, TextIO

from headway import env


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on rank 0 only, unless a call says otherwise.

    Every logging method takes more keywords: `main_process_only=True` (False: every rank speaks, prefixed with its rank)
    and `once=False` (True: the same text is logged once per process). `in_order` is accepted for the name's sake: a line
    says its rank, and no rank waits for another to speak.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._seen: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log where the rank and `once` allow it."""
        main_process_only = kwargs.pop("main_process_only", True)
        once = kwargs.pop("once", False)
        kwargs.pop("in_order", None)
        if not self.isEnabledFor(level) or (main_process_only and env.rank() != 0):
            return
        if once:
            text = str(msg) % args if args else str(msg)
            if text in self._seen:
                return
            self._seen.add(text)
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
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.warning(msg, *args, once=True, **kwargs)

    def info_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Inform once per process about the same thing."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.info(msg, *args, once=True, **kwargs)


@cache
def _adapter(name: str) -> RankLogger:
    return RankLogger(logging.getLogger(name))


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """A rank-aware logger by the usual dotted name.

    Args:
        name: as for `logging.getLogger`; the same name gives the same logger.
        log_level: the level of THIS logger ("INFO", logging.DEBUG, ...); None leaves it. The environment variable
            HEADWAY_LOG_LEVEL is used where it is None. The root logger is never touched.
    """
    logger = _adapter(name)
    asked = env.get("HEADWAY_LOG_LEVEL")
    level = log_level if log_level is not None else asked
    if level is not None:
        logger.logger.setLevel(level.upper() if isinstance(level, str) else level)
    if asked is not None:
        _speak(logger.logger)
    return logger


def _speak(logger: logging.Logger) -> None:
    """Write to stderr where nobody has set logging up: Python's last resort drops what is below WARNING."""
    if not logger.hasHandlers():
        output = _LastResort()
        output.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(output)


class _LastResort(logging.StreamHandler[TextIO]):
    """Output to stderr that is silent once the program has set logging up itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, unless the root logger's handlers do."""
        if not logging.getLogger().handlers and not getattr(record, "is_told", False):
            record.is_told = True  # loggers above this one may have such an output too
            super().emit(record)
