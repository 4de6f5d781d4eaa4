"""Trackers that send to a service: W&B, Comet, ClearML and SwanLab, offline where nobody is logged in, and OpenTelemetry."""

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
from headway.errors import TrackingError
from headway.log import get_logger
from headway.tracking import otlp
from headway.tracking.base import PackageAdapter, RowAdapter, TrackedRun, Tracker
from headway.tracking.pictures import Picture, encode_png, without_axis
from headway.tracking.runlog import leaves, plain

log = get_logger(__name__)


class WandbAdapter(RowAdapter):
    """Logs to Weights & Biases; offline where nobody has logged in or the server is out of reach.

    Steps are values of the name `global_step`, by which charts are drawn, and not W&B's own, which can never go back: so
    nothing is dropped where a run is resumed from an earlier step.

    Args:
        kwargs: for `wandb.init`; `project`, `dir` and, after a restart, `id` are the run's where they are not given.
    """

    name = "wandb"
    installed_by = "headway[trackers]"
    holds_back = 20.0  # its own process writes every 15 s, and is killed with this one's group

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with the known one."""
        more: dict[str, Any] = {} if run.folder is None else {"dir": str(run.folder)}
        if hasattr(self._package.Settings(), "finish_timeout"):
            # Without a bound, an upload that gets nowhere would keep the machines for ever.
            more["settings"] = self._package.Settings(finish_timeout=600.0)
        chosen = self._choose_arguments(run, **more)
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
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def _is_logged_in(self) -> bool:
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
        """The configuration as the run's config."""
        self._run.config.update(values, allow_val_change=True)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self._run.log(row if step is None else {"global_step": step, **row}, **kwargs)


class CometAdapter(PackageAdapter):
    """Logs to Comet; offline if there is no API key.

    Args:
        kwargs: for `comet_ml.start`: workspace, online, experiment_config, ...; `project_name` and, after a restart,
            `experiment_key` are the run's where they are not given.
    """

    name = "comet_ml"
    ended_by = "end"
    writer = PackageAdapter.tracker

    @property
    def identity(self) -> dict[str, Any] | None:
        """The experiment's key."""
        return None if self._run is None else {"experiment_key": self._run.get_key()}

    def begin(self, run: TrackedRun) -> None:
        """Start an experiment, or continue the known one."""
        chosen: dict[str, Any] = {"project_name": run.project}
        if run.identity is not None:
            chosen |= {"experiment_key": run.identity.get("experiment_key"), "mode": "get_or_create"}
        if "online" not in self._kwargs and self._kwargs.get("api_key") is None and not self._has_key():
            log.info(
                "comet_ml: there is no API key, so the experiment is written offline; upload it with `comet upload`"
            )
            chosen["online"] = False
            if run.folder is not None and "experiment_config" not in self._kwargs:
                chosen["experiment_config"] = self._package.ExperimentConfig(offline_directory=str(run.folder))
        self._run = self._package.start(**chosen | self._kwargs)

    def _has_key(self) -> bool:
        # What COMET_API_KEY or a file of Comet's says.
        return bool(env.get("COMET_API_KEY") or self._package.get_config("comet.api_key"))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters."""
        self._run.log_parameters(values)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.log_other(name, value)
        else:
            self._run.log_metrics({name: value}, **{"step": step} | kwargs)

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        self._run.log_image(io.BytesIO(encode_png(image)), **{"name": name + part, "step": step} | kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or the files of a folder, as assets."""
        if path.is_dir():
            self._run.log_asset_folder(str(path), **{"step": step, "log_file_name": True} | kwargs)
        else:
            self._run.log_asset(str(path), **{"file_name": name, "step": step} | kwargs)

    def flush(self) -> None:
        """Wait until queued values are being sent."""
        self._run.flush()


class ClearMLAdapter(PackageAdapter):
    """Logs to ClearML, offline if it is not configured; a task that the script started itself is used as is and left open.

    Args:
        kwargs: for `clearml.Task.init`; `project_name` and `task_name` are what CLEARML_PROJECT and CLEARML_TASK say, or the
            project's name, and after a restart `continue_last_task` is the known one's id, where they are not given.
    """

    name = "clearml"
    ended_by = "close"
    task = PackageAdapter.tracker

    @property
    def identity(self) -> dict[str, Any] | None:
        """The task's id, if a server knows it: a task that was written offline cannot be continued."""
        is_known = self._run is not None and self._is_own and not self._run.is_offline()
        return {"id": self._run.id} if is_known else None

    def begin(self, run: TrackedRun) -> None:
        """Begin a task, or continue the known one."""
        task = self._package.Task
        self._run = task.current_task()
        self._is_own = self._run is None
        if not self._is_own:
            return
        chosen: dict[str, Any] = {
            "project_name": env.get("CLEARML_PROJECT") or run.project,
            "task_name": env.get("CLEARML_TASK") or run.project,
        }
        if run.identity is not None:
            chosen |= {"continue_last_task": run.identity.get("id")}
        chosen |= self._kwargs
        missing = require("clearml.backend_api.session.defs", "log_with='clearml' needs", "clearml").MissingConfigError
        try:
            self._run = task.init(**chosen)
        except missing:
            log.info(
                "clearml is not configured here, so the task is written offline; upload it with Task.import_offline_session"
            )
            task.set_offline(True)
            self._run = task.init(**chosen)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as a configuration object."""
        self._run.connect_configuration(values)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        """Numbers as scalars ("eval_loss" and "eval/loss" as the series "eval" of the chart "loss"), text as log lines."""
        logger, (title, series) = self._run.get_logger(), title_and_series(name)
        if isinstance(value, str):
            logger.report_text(f"{name}: {value}")
        elif step is None:
            logger.report_single_value(name=name, value=value, **kwargs)
        else:
            logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        """Images as debug samples."""
        title, series = title_and_series(name)
        shown = without_axis(image)
        self._run.get_logger().report_image(title=title, series=series + part, iteration=step, image=shown, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact."""
        self._run.upload_artifact(name, str(path), **kwargs)

    def flush(self) -> None:
        """Write queued values."""
        self._run.flush(wait_for_uploads=False)


class SwanLabAdapter(RowAdapter):
    """Logs to SwanLab; offline if nobody is logged in.

    Args:
        kwargs: for `swanlab.init`; `project`, `log_dir` and, after a restart, `id` are the run's where they are not given.
    """

    name = "swanlab"

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        more: dict[str, Any] = {}
        if run.folder is not None and "logdir" not in self._kwargs:
            more["log_dir"] = str(run.folder / "swanlab")
        if "mode" not in self._kwargs and env.get("SWANLAB_MODE") is None and not self._is_logged_in():
            log.info("swanlab: nobody is logged in, so the run is written offline; upload it with `swanlab sync`")
            more["mode"] = "offline"
        self._run = self._package.init(**self._choose_arguments(run, **more))

    def _is_logged_in(self) -> bool:
        # In the environment, or in a file of this folder or the user's.
        return bool(env.get("SWANLAB_API_KEY") or self._package.Settings().api_key)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        texts = {name: self._package.Text(value) for name, value in row.items() if isinstance(value, str)}
        super()._log_row(row | texts, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or the files of a folder, copied into the run."""
        self._run.save(f"{path}/**" if path.is_dir() else str(path), **{"base_path": str(path.parent)} | kwargs)


class OpenTelemetryAdapter(Tracker):
    """Sends metrics and log records over OTLP (HTTP, protobuf), from a process of its own: see `headway.tracking.otlp`.

    Numbers are gauges of their names, and `headway.step` is the step of the last ones. Events and texts are log records.

    Args:
        resource: attributes of the resource. "service.name" is the project, and "service.instance.id" the same after a restart,
            where neither they nor OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say otherwise.
    """

    name = "opentelemetry"
    installed_by = "headway[otel]"
    takes = "numbers"

    def __init__(self, resource: Mapping[str, Any] | None = None) -> None:
        self._resource, self._identity, self._is_told = resource or {}, dict[str, Any](), False

    @property
    def identity(self) -> dict[str, Any] | None:
        """The instance's id."""
        return self._identity

    def begin(self, run: TrackedRun) -> None:
        """Start the process that sends, in a session of its own: signals to this one's group do not end it, but the pipe does."""
        command, pipe = [sys.executable, "-m", otlp.__name__], subprocess.PIPE
        self._sender: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
        out: Any = self._sender.stdout
        os.set_blocking(out.fileno(), False)
        self._identity = dict(run.identity or {"service.instance.id": str(uuid.uuid4())})
        self._send({"service.name": run.project, **self._identity, **self._resource})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the attributes of an event `headway.config`."""
        self.log_event("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as gauges, texts as the attributes of an event `headway.text`."""
        values = plain(values)  # the SDK drops what is not finite; here it is a text
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = {name: value for name, value in values.items() if name not in texts}
        self._send({"values": numbers | ({} if step is None else {"headway.step": step})})
        if texts:
            self.log_event("text", texts, step)
        self._pass_on()

    def log_event(self, name: str, details: Mapping[str, Any], step: int | None = None) -> None:
        """A log record."""
        flat = dict(leaves({"step": step, **details}, ".")).items()
        told = {k: v if isinstance(v, str | float | int) else json.dumps(v) for k, v in flat if v is not None}
        self._send({"event": f"headway.{name}", "time": time.time(), "attributes": told})

    def finish(self) -> None:
        """Wait until all is sent, for 10 s at most."""
        self._send({})
        try:
            self._sender.wait(otlp.LONGEST)
        except subprocess.TimeoutExpired:
            self._sender.kill()
            self._sender.wait()
        self._pass_on()

    def _send(self, line: Mapping[str, Any]) -> None:
        try:
            self._sender.stdin.write(json.dumps(line).encode() + b"\n")
            self._sender.stdin.flush()
        except BrokenPipeError as error:
            raise TrackingError(f"the process that sends has ended: {self._read()[-500:]}") from error

    def _pass_on(self) -> None:
        """What the process that sends has complained of, the first time."""
        said = self._read()
        if said and not self._is_told:
            self._is_told = True
            raise TrackingError(f"the collector is away, or refuses: {said.splitlines()[0]}")

    def _read(self) -> str:
        return (self._sender.stdout.read() or b"").decode()


def title_and_series(name: str) -> tuple[str, str]:
    """ClearML's chart and its series: "loss", "eval" for "eval_loss" or "eval/loss"; "train" without such a prefix."""
    for series in ("eval", "test", "train"):
        if name.startswith((f"{series}_", f"{series}/")):
            return name[len(series) + 1 :], series
    return name, "train"
