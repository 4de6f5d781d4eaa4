"""Weights & Biases: a run of the project; offline where nobody has logged in or the server is out of reach."""

import netrc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from headway import env
from headway.log import get_logger
from headway.tracking.base import TrackedRun
from headway.tracking.held import HeldRun
from headway.tracking.pictures import Picture, pictures

log = get_logger(__name__)

AXIS = "global_step"
_PATIENCE = 600.0


class WandbTracker(HeldRun):
    """Logs to Weights & Biases.

    Steps are values of the name `global_step`, by which charts are drawn, and not W&B's own, which can never go back: so
    nothing is dropped where a run is resumed from an earlier step.

    Args:
        kwargs: for `wandb.init`; `project`, `dir` and, after a restart, `id` are the run's where they are not given.
    """

    name = "wandb"
    package = "wandb"
    installed_by = "headway[trackers]"
    known_by = ("id", "id")
    holds_back = 20.0  # its own process writes every 15 s, and is killed with this one's group

    @property
    def run(self) -> Any:
        """The tracker's object, by the name that scripts know."""
        return self._run

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with the known one."""
        chosen: dict[str, Any] = {"project": run.project.replace("/", "-")}
        if run.folder is not None:
            chosen["dir"] = str(run.folder)
        if run.identity is not None:
            chosen |= {"id": run.identity.get("id"), "resume": "allow"}
        if "settings" not in self._kwargs and hasattr(self._package.Settings(), "finish_timeout"):
            # Without a bound, an upload that gets nowhere would keep the machines for ever.
            chosen["settings"] = self._package.Settings(finish_timeout=_PATIENCE)
        chosen |= self._kwargs
        if "mode" not in chosen and env.get("WANDB_MODE") is None and not self._is_logged_in():
            log.info("wandb: nobody is logged in, so the run is written offline; `wandb sync` uploads it")
            chosen["mode"] = "offline"
        try:
            self._run = self._package.init(**chosen)
        except self._package.errors.CommError as error:
            if "mode" in self._kwargs:
                raise
            reason = str(error).partition("\n")[0]
            log.warning(
                "wandb: the server cannot be reached (%s): the run is written offline; `wandb sync` uploads it", reason
            )
            self._run = self._package.init(**chosen | {"mode": "offline"})
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def _is_logged_in(self) -> bool:
        if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
            return True
        settings = self._package.Settings()
        host = urlparse(env.get("WANDB_BASE_URL") or settings.base_url).hostname or ""
        for path in (env.get("NETRC"), "~/.netrc", "~/_netrc"):
            file = None if path is None else Path(path).expanduser()
            if file is not None and file.is_file():
                try:
                    return netrc.netrc(str(file)).authenticators(host) is not None
                except (netrc.NetrcParseError, OSError) as error:
                    log.warning("wandb: %s cannot be read (%s)", file, error)
        return False

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config."""
        self._run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row of values."""
        self._run.log(self._row(values, step), **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images."""
        row = {
            name: [
                self._package.Image(image.squeeze(2) if image.shape[2] == 1 else image)
                for image in pictures(images, name)
            ]
            for name, images in values.items()
        }
        self._run.log(self._row(row, step), **kwargs)

    @staticmethod
    def _row(values: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        return dict(values) if step is None else {AXIS: step, **values}

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact of type "file", or of `type=`."""
        plain = re.sub(r"[^\w\-.]", "_", name)
        self._run.log_artifact(str(path), **{"name": plain, "type": "file"} | kwargs)

    def finish(self) -> None:
        """End the run; waits for uploads, ten minutes at most unless `settings` say otherwise."""
        self._run.finish()
