"""TensorBoard: a run's values as event files in its folder, through torch's SummaryWriter."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from headway.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, pictures
from headway.tracking.values import flatten, is_loggable, leaves

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(Tracker):
    """Writes event files beside the run's log.

    Args:
        kwargs: for `torch.utils.tensorboard.SummaryWriter`; `log_dir` is the run's folder where it is not given.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, **kwargs: Any) -> None:
        require("tensorboard", "log_with='tensorboard' needs", "headway[trackers]")
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None

    @property
    def tracker(self) -> "SummaryWriter":
        """The SummaryWriter."""
        assert self._writer is not None
        return self._writer

    @property
    def writer(self) -> "SummaryWriter":
        """The same, by the name that scripts know."""
        return self.tracker

    def begin(self, run: TrackedRun) -> None:
        """Open an event file; what the folder has from an earlier process stays."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._kwargs.get("log_dir", run.folder)
        self._writer = SummaryWriter(**self._kwargs | {"log_dir": str(folder)})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as hyper-parameters, and readable as a text."""
        flat = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in leaves(values).items()
        }
        self.tracker.add_hparams(flat, {}, run_name=".")
        self.tracker.add_text("config", f"```\n{json.dumps(values, indent=2, ensure_ascii=False)}\n```")
        self.tracker.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as texts; nested mappings of one name as a group of scalars."""
        for name, value in flatten(values).items():
            if isinstance(value, str):
                self.tracker.add_text(name, value, step, **kwargs)
            elif is_loggable(value):
                self.tracker.add_scalar(name, value, step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One image or several under each name."""
        for name, images in values.items():
            for index, image in enumerate(several := pictures(images, name)):
                tag = name if len(several) == 1 else f"{name}/{index}"
                shown = numpy.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
                self.tracker.add_image(tag, shown, step, dataformats="HWC", **kwargs)

    def rewind(self, step: int) -> None:
        """The next event file says from which step on the former ones do not count."""
        self.tracker.close()
        self.tracker.purge_step = step + 1

    def flush(self) -> None:
        """Write what is queued."""
        self.tracker.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.tracker.close()
