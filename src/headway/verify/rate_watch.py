"""`RateWatch`: records which lines of the script set a learning rate, so that a failed proof can name them."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from headway.common.callsite import walk_stack
from headway.verify.script_frames import find_line

_REFERENCES = 3
"""Reference count of a parameter group to which only its optimizer refers: the list, a variable and an argument."""


class _WatchedGroup(dict[str, Any]):
    """Optimizer parameter group that records which lines of the script set its learning rate."""

    lines: list[str]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and self.get("lr") != value:
            line = find_line()
            scheduler = _find_scheduler()
            line = f"{line} by {scheduler}" if line and scheduler else line
            if line and line not in self.lines:
                self.lines.append(line)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _find_scheduler() -> str:
    """Return the class name of the torch scheduler that is running, or "" if there is none."""
    for frame in walk_stack():
        owner = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("torch/optim/lr_scheduler.py") else None
        if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
            return type(owner).__name__
    return ""


class RateWatch:
    """Record of the script's lines that set a learning rate, directly or through a scheduler."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def watch_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Watch the parameter groups of prepared optimizers.

        Call it before each update, because loading a checkpoint creates new groups.

        Args:
            optimizers: Prepared optimizers of the run.
        """
        for each in optimizers:
            groups = each.optimizer.param_groups
            for index in range(len(groups)):
                group = groups[index]
                # A script with its own reference to the group would continue to write to the group, not to its copy.
                if type(group) is dict and sys.getrefcount(group) <= _REFERENCES:
                    groups[index] = _WatchedGroup(group)
                    groups[index].lines = self._lines

    def take_lines(self) -> list[str]:
        """Return the script lines that have set a learning rate since the last call of this method."""
        lines = list(self._lines)
        self._lines.clear()  # not replaced, because watched groups refer to the list
        return lines
