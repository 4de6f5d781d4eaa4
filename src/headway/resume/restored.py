"""What `load_state` and `resume` return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Restored:
    """What a load took up, and what is not as it was saved.

    Attributes:
        folder: the checkpoint.
        about: its counters, world and versions.
        differences: one line each.
    """

    folder: Path
    about: Mapping[str, Any]
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"resumed from {self.folder} after {self.about['num_updates']} updates, epoch {self.about['epoch']}"
        return "\n  ".join([head, *self.differences])
