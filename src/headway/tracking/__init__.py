"""A run's log, and the trackers that are fed from it."""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    # `from accelerate.tracking import GeneralTracker`, the import changed: it is in `headway` itself.
    return getattr(sys.modules["headway"], name)
