"""Ray Train integration: checkpoints in Ray's storage and metrics in its reports.

It is used inside the function that a `TorchTrainer` runs. Training itself does not need this module, because the
Accelerator adopts the process group that Ray created. Ray receives a report up to a few seconds after `report` was
called. If the worker dies before that, the report is lost. In a shared folder, `resume` finds the checkpoint anyway,
because it searches the folder. In an object store, it resumes from the newest checkpoint that was reported to Ray.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.accelerator import Accelerator
from headway.common.optional import require
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.config.run import ProjectConfiguration
from headway.errors import ConfigError

_FOLDER = "headway"
"""Subfolder of the experiment's folder for Headway's checkpoints, next to Ray's own files."""


def project(**more: Any) -> ProjectConfiguration:
    """Return a project configuration in this experiment's storage, for `Accelerator(project_config=project())`.

    If the storage is a shared folder, checkpoints are written there directly. If it is an object store, they are
    written to a local folder, which keeps the newest two, and `report` makes Ray upload them.

    Args:
        more: Other fields of ProjectConfiguration. To delete old checkpoints, use Ray's
            `CheckpointConfig(num_to_keep=2)` instead of `total_limit`.

    Raises:
        ConfigError: If called outside a worker of Ray Train, or with `total_limit`, which would delete checkpoints that
            Ray tracks.
        OptionalDependencyMissing: If Ray is not installed.
    """
    if more.get("total_limit") is not None:
        raise ConfigError(
            f"total_limit={more['total_limit']} would delete checkpoints that Ray still lists; leave it out, and give the "
            "trainer RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
        )
    storage = _get_ray_storage()
    if _is_folder(storage):
        return ProjectConfiguration(Path(storage.experiment_fs_path, _FOLDER), automatic_checkpoint_naming=True, **more)
    local_folder = Path(storage.local_working_directory, _FOLDER)  # Ray uploads the checkpoints, so two are enough here
    return ProjectConfiguration(local_folder, automatic_checkpoint_naming=True, **{**more, "total_limit": 2})


def resume(accelerator: Accelerator) -> RestoreResult | None:
    """Resume from the newest checkpoint in the storage. Every worker must call this after `prepare`.

    If Ray does not know the checkpoint, because a worker died before its report arrived, the checkpoint is reported
    now.

    Args:
        accelerator: Accelerator created with `project()`.

    Returns:
        Description of what was restored, or None if there is no checkpoint yet.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or does not fit the run.
        ConfigError: If called outside a worker of Ray Train.
        OptionalDependencyMissing: If Ray is not installed.
    """
    if _is_folder(_get_ray_storage()):
        result = accelerator.resume("latest")
        if result is not None and not _is_reported(accelerator, result.folder):
            report(accelerator, {}, result.folder)
        return result
    checkpoint = _import_ray_train().get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return accelerator.resume(folder)


def report(accelerator: Accelerator, metrics: Mapping[str, Any], checkpoint: str | Path | None = None) -> None:
    """Call `ray.train.report`, optionally with a checkpoint from `save_state`.

    Every worker must make the same number of calls.

    Args:
        accelerator: This worker's Accelerator.
        metrics: Values by name. One-element tensors become numbers, and the number of updates is added as `updates`.
            Ray keeps the values of rank 0.
        checkpoint: Return value of `save_state`. If its background save is still running, this call waits for it. None
            (the default): report only metrics.

    Raises:
        CheckpointError: On every rank, if the checkpoint could not be written.
        ConfigError: If called outside a worker of Ray Train, or if the checkpoint is outside the experiment's storage.
    """
    numbers = {"updates": accelerator.num_updates, **{name: _to_number(value) for name, value in metrics.items()}}
    train, storage = _import_ray_train(), _get_ray_storage()
    options: dict[str, Any] = {}
    if checkpoint is not None:
        accelerator.wait_for_save()
        path = Path(checkpoint).absolute()
        if _is_folder(storage):
            _check_inside(path, storage)
            options["checkpoint_upload_mode"] = train.CheckpointUploadMode.NO_UPLOAD
        if accelerator.is_main_process:  # the folder contains the files of all ranks, so one rank reports it
            if _is_folder(storage):
                options["checkpoint"] = train.Checkpoint(str(path), filesystem=storage.storage_filesystem)
            else:
                options["checkpoint"] = train.Checkpoint.from_directory(path)
    train.report(numbers, **options)


def _is_reported(accelerator: Accelerator, folder: Path) -> bool:
    """Whether a checkpoint was already reported to Ray.

    Rank 0's answer is used on all ranks, so that either all workers report the checkpoint or none does.
    """
    is_reported = False
    if accelerator.is_main_process:
        reports = _import_ray_train().get_all_reported_checkpoints()
        is_reported = folder.resolve() in [Path(each.checkpoint.path).resolve() for each in reports]
    return bool(accelerator.collectives.broadcast_object(is_reported))


def _to_number(value: Any) -> Any:
    """Return a one-element tensor or a NumPy scalar as a Python number, and other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", None) is not None else value


def _check_inside(path: Path, storage: Any) -> None:
    """Raise `ConfigError` if a path is not in the folder of Ray's experiment."""
    root = Path(storage.experiment_fs_path)
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"the checkpoint {path} is not in the experiment's storage {root}; make the Accelerator with "
            "project_config=headway.integrations.ray.project(), and report what save_state() returns"
        )


def _import_ray_train() -> Any:
    return require("ray.train", "headway.integrations.ray needs", "ray[train]")


def _get_ray_storage() -> Any:
    """Return Ray's description of the experiment's storage.

    Raises:
        ConfigError: If called outside a worker of Ray Train.
    """
    try:
        return _import_ray_train().get_context().get_storage()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigError(
            f"headway.integrations.ray works in the function that a ray.train.torch.TorchTrainer runs: {error}"
        ) from error


def _is_folder(storage: Any) -> bool:
    """Whether Ray's storage is a local or mounted folder, not an object store."""
    return bool(storage.storage_filesystem.type_name == "local")
