"""accelerator.log, trackers and loggers."""

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, on_main_process


class _Keeping(GeneralTracker):
    name = "keeping"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        """Return the list of logged rows."""
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        """Store the configuration."""
        self.rows.append(["config", values])

    @on_main_process
    def log(self, values, step=None, **kwargs):
        """Store the types of the values, and the step."""
        self.rows.append([{name: type(value).__name__ for name, value in values.items()}, step])


def _logged(*values, **options):
    PartialState(cpu=True)
    tracker = _Keeping()
    made = Accelerator(cpu=True, log_with=tracker)
    made.init_trackers("run", config={"lr": 0.1})
    for each in values:
        made.log(each, **options)
    made.end_training()
    return getattr(tracker, "rows", None) if made.is_main_process else None


def numbers():
    """Log a float and an int with a step."""
    return _logged({"loss": 1.5, "n": 2}, step=3)


def objects():
    """Log objects that only a tracker can interpret."""
    return _logged({"image": object(), "list": [1, 2], "array": np.ones(3), "vector": torch.ones(2)}, step=1)


def texts_and_none():
    """Log a string, None and a nested dict."""
    return _logged({"text": "a", "none": None, "inner": {"a": 1}}, step=1)


def without_trackers():
    """Log arbitrary values without trackers."""
    made = Accelerator(cpu=True)
    return [made.log({"a": object()}), made.log({"a": [1]}, step=2), made.log(3), made.log([1, 2]), made.log(None)]


def before_the_trackers_begin():
    """Call log() before init_trackers()."""
    return Accelerator(cpu=True).log({"a": 1.0})


def without_any():
    """Call init_trackers without log_with."""
    made = Accelerator(cpu=True)
    made.init_trackers("run")
    return made.trackers


def a_blank_tracker():
    """Get trackers by name, also one that does not exist."""
    made = Accelerator(cpu=True, log_with=_Keeping())
    made.init_trackers("run")
    tracker = made.get_tracker("keeping")
    found = [
        tracker.name if made.is_main_process else None,
        made.get_tracker("keeping", unwrap=True) if made.is_main_process else None,
    ]
    try:
        made.get_tracker("nothing")
    except ValueError:
        found.append("ValueError")
    return found


def a_logger():
    """Use get_logger with all of its keywords."""
    PartialState(cpu=True)
    logger = get_logger("habits", log_level="INFO")
    logger.info("one", main_process_only=True)
    logger.info("two", main_process_only=False)
    logger.warning("three", in_order=True, main_process_only=False)
    logger.info("four", stacklevel=2)
    logger.warning_once("five")
    return logger.logger.name, logger.isEnabledFor(20), logger.logger.level


def a_logger_before_the_state():
    """Log before a state exists, which raises RuntimeError."""
    try:
        get_logger("habits").info("too early")
    except RuntimeError:
        return "RuntimeError"
    return "logged"


def a_progress_bar():
    """Use accelerate.utils.tqdm."""
    Accelerator(cpu=True)
    from accelerate.utils import tqdm

    return list(tqdm(range(3))), list(tqdm(range(2), main_process_only=False))
