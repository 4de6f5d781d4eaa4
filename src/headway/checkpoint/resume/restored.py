"""What `load_state` and `resume` return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.format.typed_reader import TypedReader
from headway.common.untrusted import printable
from headway.config.mesh import Layout


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


def layout_of(strategy: object) -> dict[str, int]:
    """The sizes of the axes along which a strategy cuts models; none where each rank holds whole ones."""
    layout = getattr(strategy, "layout", None)
    return dict(layout.sizes) if isinstance(layout, Layout) and not layout.is_replicas_only else {}


def layout_lines(about: Mapping[str, Any], strategy: object) -> list[str]:
    """What differs between the layout that a checkpoint was saved under and this run's.

    Raises:
        CheckpointError: the manifest has something else there.
    """
    told = [each.table() for each in TypedReader(about, "about").given("layout")]
    before = {axis: size.whole(1) for table in told for axis, size in table.items()}
    now = layout_of(strategy)
    return [] if before == now else [f"layout {_words(before)} -> {_words(now)}; every rank has read its part"]


def _words(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{printable(axis)} {size}" for axis, size in sizes.items()) or "whole models"
