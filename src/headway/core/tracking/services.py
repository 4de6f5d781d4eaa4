"""Trackers that send values to a service: W&B, Comet, ClearML, SwanLab and OpenTelemetry.

The first four work offline if no user is logged in.
"""

import io
import json
import netrc
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from headway.common import env
from headway.common.optional import require
from headway.core.tracking import otlp
from headway.core.tracking.adapters import PackageAdapter, RowAdapter
from headway.core.tracking.base import TrackedRun, Tracker
from headway.core.tracking.pictures import Picture, drop_gray_axis, encode_png
from headway.core.tracking.runlog import convert_to_json, list_leaves
from headway.errors import TrackingError
from headway.log import get_logger

log = get_logger(__name__)


class WandbAdapter(RowAdapter):
    """Tracker for Weights & Biases. It works offline if no user is logged in or the server cannot be reached.

    Steps are logged as values named `global_step`, which charts use as their horizontal axis. W&B's own steps are not
    used, because they cannot decrease: values would be dropped if a run is resumed from an earlier step.

    Args:
        kwargs: Arguments for `wandb.init`. Default of `project`: the run's name. Default of `dir`: the run's folder.
            Default of `id` after a restart: the ID of the run that continues.
    """

    name = "wandb"
    requirement = "headway[trackers]"
    holds_back = 20.0  # W&B's own process writes every 15 s, and is killed with this process's group

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies."""
        defaults: dict[str, Any] = {} if run.folder is None else {"dir": str(run.folder)}
        if hasattr(self._package.Settings(), "finish_timeout"):
            # Without a limit, an upload that makes no progress would occupy the machines forever.
            defaults["settings"] = self._package.Settings(finish_timeout=600.0)
        arguments = self._choose_arguments(run, **defaults)
        if "mode" not in arguments and env.get("WANDB_MODE") is None and not self._is_logged_in():
            log.info("wandb: no user is logged in, so the run is written offline; `wandb sync` uploads it")
            arguments["mode"] = "offline"
        try:
            self._run = self._package.init(**arguments)
        except self._package.errors.CommError as error:
            if "mode" in self._kwargs:
                raise
            reason = str(error).partition("\n")[0]
            log.warning(
                "wandb: the server cannot be reached (%s): the run is written offline; `wandb sync` uploads it", reason
            )
            self._run = self._package.init(**arguments | {"mode": "offline"})
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def _is_logged_in(self) -> bool:
        """Whether W&B would find credentials: in the environment, or for its host in a netrc file."""
        if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
            return True
        host = urlparse(env.get("WANDB_BASE_URL") or self._package.Settings().base_url).hostname or ""
        for path in (env.get("NETRC"), "~/.netrc", "~/_netrc"):
            file = None if path is None else Path(path).expanduser()
            if file is not None and file.is_file():
                try:
                    return netrc.netrc(str(file)).authenticators(host) is not None
                except (netrc.NetrcParseError, OSError) as error:
                    log.warning("wandb: %s cannot be read (%s)", file, error)
        return False

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as the run's config."""
        self._run.config.update(values, allow_val_change=True)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self._run.log(row if step is None else {"global_step": step, **row}, **kwargs)


class CometAdapter(PackageAdapter):
    """Tracker for Comet. It works offline if there is no API key.

    Args:
        kwargs: Arguments for `comet_ml.start`: workspace, online, experiment_config, ... Default of `project_name`: the
            run's name. Default of `experiment_key` after a restart: the key of the experiment that continues.
    """

    name = "comet_ml"
    end_method = "end"
    writer = PackageAdapter.tracker

    @property
    def identity(self) -> dict[str, Any] | None:
        """Key of the experiment, as {"experiment_key": key}; None before `begin`."""
        return None if self._run is None else {"experiment_key": self._run.get_key()}

    def begin(self, run: TrackedRun) -> None:
        """Start an experiment, or continue the one that `run.identity` identifies."""
        arguments: dict[str, Any] = {"project_name": run.project}
        if run.identity is not None:
            arguments |= {"experiment_key": run.identity.get("experiment_key"), "mode": "get_or_create"}
        if "online" not in self._kwargs and self._kwargs.get("api_key") is None and not self._has_key():
            log.info(
                "comet_ml: there is no API key, so the experiment is written offline; upload it with `comet upload`"
            )
            arguments["online"] = False
            if run.folder is not None and "experiment_config" not in self._kwargs:
                arguments["experiment_config"] = self._package.ExperimentConfig(offline_directory=str(run.folder))
        self._run = self._package.start(**arguments | self._kwargs)

    def _has_key(self) -> bool:
        """Whether there is an API key in the environment or in one of Comet's files."""
        return bool(env.get("COMET_API_KEY") or self._package.get_config("comet.api_key"))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters."""
        self._run.log_parameters(values)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.log_other(name, value)
        else:
            self._run.log_metrics({name: value}, **{"step": step} | kwargs)

    def _log_image(self, name: str, suffix: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        self._run.log_image(io.BytesIO(encode_png(image)), **{"name": name + suffix, "step": step} | kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file, or the files of a folder, as assets.

        Args:
            path: Path of the file or folder.
            name: Name of the asset, if `path` is a file. Unused for a folder.
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to Comet.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        if path.is_dir():
            self._run.log_asset_folder(str(path), **{"step": step, "log_file_name": True} | kwargs)
        else:
            self._run.log_asset(str(path), **{"file_name": name, "step": step} | kwargs)

    def flush(self) -> None:
        """Start sending queued values. It does not wait until they have been sent."""
        self._run.flush()


class ClearMLAdapter(PackageAdapter):
    """Tracker for ClearML. It works offline if ClearML is not configured.

    If the script has already started a task, that task is used, and it is not closed at the end.

    Args:
        kwargs: Arguments for `clearml.Task.init`. Defaults of `project_name` and `task_name`: CLEARML_PROJECT and
            CLEARML_TASK, or the project's name. Default of `continue_last_task` after a restart: the ID of the task
            that continues.
    """

    name = "clearml"
    end_method = "close"
    task = PackageAdapter.tracker

    @property
    def identity(self) -> dict[str, Any] | None:
        """ID of the task, as {"id": ID}. None for a task that cannot be continued, and before `begin`.

        A task cannot be continued if it was written offline, or if the script started it itself.
        """
        can_continue = self._run is not None and self._is_own and not self._run.is_offline()
        return {"id": self._run.id} if can_continue else None

    def begin(self, run: TrackedRun) -> None:
        """Start a task, or continue the one that `run.identity` identifies."""
        task = self._package.Task
        self._run = task.current_task()
        self._is_own = self._run is None
        if not self._is_own:
            return
        arguments: dict[str, Any] = {
            "project_name": env.get("CLEARML_PROJECT") or run.project,
            "task_name": env.get("CLEARML_TASK") or run.project,
        }
        if run.identity is not None:
            arguments |= {"continue_last_task": run.identity.get("id")}
        arguments |= self._kwargs
        defs = require("clearml.backend_api.session.defs", "log_with='clearml' needs", "clearml")
        try:
            self._run = task.init(**arguments)
        except defs.MissingConfigError:
            log.info(
                "clearml is not configured here, so the task is written offline; upload it with Task.import_offline_session"
            )
            task.set_offline(True)
            self._run = task.init(**arguments)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Connect the run's configuration to the ClearML task, which shows it among its configuration objects."""
        self._run.connect_configuration(values)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        """Log a number as a point of a chart, or a string as a line of the console log.

        Both "eval_loss" and "eval/loss" are shown as the series "eval" of the chart "loss".

        Args:
            name: Name of the value.
            value: Number or string.
            step: Step of the run. None: a number is logged as a single value, without a chart.
            **kwargs: Passed to ClearML's method that logs the number. Ignored for a string.
        """
        logger = self._run.get_logger()
        if isinstance(value, str):
            logger.report_text(f"{name}: {value}")
        elif step is None:
            logger.report_single_value(name=name, value=value, **kwargs)
        else:
            title, series = split_title_and_series(name)
            logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def _log_image(self, name: str, suffix: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        """Log an image as a debug sample of the ClearML task.

        Args:
            name: Name under which the script logs the image. It determines ClearML's title and series.
            suffix: Text that distinguishes several images of one name, such as "/0". "" for a single image.
            image: Array of shape [H, W, C] and dtype uint8.
            step: Step of the run, or None.
            **kwargs: Passed to ClearML's `report_image`.
        """
        title, series = split_title_and_series(name)
        self._run.get_logger().report_image(
            title=title, series=series + suffix, iteration=step, image=drop_gray_axis(image), **kwargs
        )

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file or a folder as an artifact.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        self._run.upload_artifact(name, str(path), **kwargs)

    def flush(self) -> None:
        """Write queued values without waiting for uploads."""
        self._run.flush(wait_for_uploads=False)


class SwanLabAdapter(RowAdapter):
    """Tracker for SwanLab. It works offline if no user is logged in.

    Args:
        kwargs: Arguments for `swanlab.init`. Default of `project`: the run's name. Default of `log_dir`: `swanlab` in
            the run's folder. Default of `id` after a restart: the ID of the run that continues.
    """

    name = "swanlab"

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies."""
        defaults: dict[str, Any] = {}
        if run.folder is not None and "logdir" not in self._kwargs:  # SwanLab accepts both names
            defaults["log_dir"] = str(run.folder / "swanlab")
        if "mode" not in self._kwargs and env.get("SWANLAB_MODE") is None and not self._is_logged_in():
            log.info("swanlab: no user is logged in, so the run is written offline; upload it with `swanlab sync`")
            defaults["mode"] = "offline"
        self._run = self._package.init(**self._choose_arguments(run, **defaults))

    def _is_logged_in(self) -> bool:
        """Whether there is an API key in the environment, or in a file in this folder or the home folder."""
        return bool(env.get("SWANLAB_API_KEY") or self._package.Settings().api_key)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        texts = {name: self._package.Text(value) for name, value in row.items() if isinstance(value, str)}
        super()._log_row(row | texts, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file, or the files of a folder. The files are copied into the run.

        Args:
            path: Path of the file or folder.
            name: Unused.
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        self._run.save(f"{path}/**" if path.is_dir() else str(path), **{"base_path": str(path.parent)} | kwargs)


class OpenTelemetryAdapter(Tracker):
    """Tracker that sends metrics and log records over OTLP (HTTP, protobuf) from a separate process.

    Each number is sent as a gauge under its name. The gauge `headway.step` is the step of the latest numbers. Events
    and strings are sent as log records. The separate process runs `headway.core.tracking.otlp`. Methods that send raise
    `TrackingError` if it has ended.

    Args:
        resource: Attributes of the resource. Default of "service.name": the project's name. Default of
            "service.instance.id": an ID that does not change after a restart. OTEL_SERVICE_NAME and
            OTEL_RESOURCE_ATTRIBUTES override both. Default: None, for no other attributes.
    """

    name = "opentelemetry"
    requirement = "headway[otel]"
    takes = "numbers"

    def __init__(self, resource: Mapping[str, Any] | None = None) -> None:
        self._resource = resource or {}
        self._identity: dict[str, Any] = {}
        self._sender: Any = None  # subprocess that sends the values; None before `begin`
        self._has_reported_error = False

    @property
    def identity(self) -> dict[str, Any]:
        """Attribute "service.instance.id" of the resource, which a restart does not change; empty before `begin`."""
        return self._identity

    def begin(self, run: TrackedRun) -> None:
        """Start the subprocess that sends values to the collector.

        The subprocess runs in its own session, so that signals to this process's group do not end it. It ends when
        its input ends.
        """
        self._sender = subprocess.Popen(
            [sys.executable, "-m", otlp.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.set_blocking(self._sender.stdout.fileno(), False)  # `log` reads its errors without waiting for them
        self._identity = dict(run.identity or {"service.instance.id": str(uuid.uuid4())})
        self._send_line({"service.name": run.project, **self._identity, **self._resource})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Send the configuration as the attributes of an event named `headway.config`."""
        self.log_event("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Send numbers as gauges, and strings as the attributes of an event named `headway.text`.

        Args:
            values: Values by name, not nested.
            step: Number of optimizer updates, or the step that the script passed to `accelerator.log`. Default: None,
                which leaves `headway.step` unchanged.
            kwargs: Unused.

        Raises:
            TrackingError: If the separate process has ended. Also at the first error that it reports, such as a
                collector that cannot be reached.
        """
        json_values = convert_to_json(values)  # the SDK drops non-finite numbers, so send them as text
        texts = {name: value for name, value in json_values.items() if isinstance(value, str)}
        numbers = {name: value for name, value in json_values.items() if name not in texts}
        self._send_line({"values": numbers | ({} if step is None else {"headway.step": step})})
        if texts:
            self.log_event("text", texts, step)
        self._raise_first_error()

    def log_event(self, name: str, details: Mapping[str, Any], step: int | None = None) -> None:
        """Send a run event as a log record.

        Args:
            name: Kind of event.
            details: Details of the event, as JSON values.
            step: Number of optimizer updates at which the event occurred. Default: None, for an event without a step.
        """
        attributes = {
            key: value if isinstance(value, str | float | int) else json.dumps(value)
            for key, value in list_leaves({"step": step, **details}, ".")
            if value is not None
        }
        self._send_line({"event": f"headway.{name}", "time": time.time(), "attributes": attributes})

    def finish(self) -> None:
        """Wait until all values have been sent, for at most 10 s. After that the subprocess is killed.

        Raises:
            TrackingError: If the subprocess has ended early or reports its first error.
        """
        self._send_line({})
        try:
            self._sender.wait(otlp.EXPORT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._sender.kill()
            self._sender.wait()
        self._raise_first_error()

    def _send_line(self, line: Mapping[str, Any]) -> None:
        """Write one JSON line to the subprocess.

        Raises:
            TrackingError: If the subprocess has ended.
        """
        try:
            self._sender.stdin.write(json.dumps(line).encode() + b"\n")
            self._sender.stdin.flush()
        except BrokenPipeError as error:
            raise TrackingError(f"the process that sends the data has ended: {self._read_errors()[-500:]}") from error

    def _raise_first_error(self) -> None:
        """Raise `TrackingError` with the first error message of the sending subprocess. Later errors are ignored."""
        output = self._read_errors()
        if output and not self._has_reported_error:
            self._has_reported_error = True
            raise TrackingError(f"the collector cannot be reached, or refuses the data: {output.splitlines()[0]}")

    def _read_errors(self) -> str:
        """Return what the process that sends data has printed."""
        return (self._sender.stdout.read() or b"").decode()


def split_title_and_series(name: str) -> tuple[str, str]:
    """Split the name of a logged value into a chart title and a series name for ClearML.

    "eval_loss" and "eval/loss" become ("loss", "eval"). A name without such a prefix gets the series "train".
    """
    for series in ("eval", "test", "train"):
        if name.startswith((f"{series}_", f"{series}/")):
            return name[len(series) + 1 :], series
    return name, "train"
