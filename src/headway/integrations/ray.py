"""Ray Train as the engine: checkpoints in its storage, metrics in its reports. Used in the function that a `TorchTrainer` runs.

Nothing of this is needed to train: the Accelerator takes the process group that Ray has made. Ray hears of a report up to some
seconds later, and what was reported in between is lost with a worker that dies. So `resume` looks into the storage itself.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.accelerator import Accelerator
from headway.checkpoint.resume.comparison import Restored
from headway.common.optional import require
from headway.config.run import ProjectConfiguration
from headway.errors import ConfigError

_FOLDER = "headway"
"""In the experiment's folder, beside what Ray keeps there."""


def project(**more: Any) -> ProjectConfiguration:
    """A project in this experiment's storage, whose checkpoints name themselves: `Accelerator(project_config=project())`.

    Where the storage is a folder, as every machine has it mounted, checkpoints are written there at once. Where it is an object
    store, they are written to a folder of the machine, and `report` has Ray upload them.

    Args:
        more: further fields of ProjectConfiguration. Old checkpoints are Ray's to delete: `CheckpointConfig(num_to_keep=2)`.

    Raises:
        ConfigError: not in a worker of Ray Train; or `total_limit`, which would delete what Ray still counts on.
        OptionalDependencyMissing: Ray is not installed.
    """
    if more.get("total_limit") is not None:
        raise ConfigError(
            f"total_limit={more['total_limit']} would delete checkpoints that Ray keeps a list of; leave it out, and give the "
            "trainer RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
        )
    storage = _storage()
    if _is_folder(storage):
        return ProjectConfiguration(Path(storage.experiment_fs_path, _FOLDER), automatic_checkpoint_naming=True, **more)
    here = Path(storage.local_working_directory, _FOLDER)  # what has been uploaded need not stay
    return ProjectConfiguration(here, automatic_checkpoint_naming=True, **{**more, "total_limit": 2})


def resume(accelerator: Accelerator) -> Restored | None:
    """Go on from the newest checkpoint in the storage; every worker calls it after `prepare`.

    One that Ray has not heard of, as the worker died too soon, is reported now.

    Args:
        accelerator: made with `project()`.

    Returns:
        What was restored; None where there is nothing yet.

    Raises:
        CheckpointError: on every rank: it is damaged, or does not fit.
        ConfigError: not in a worker of Ray Train.
    """
    if _is_folder(_storage()):
        found = accelerator.resume("latest")
        if found is not None and not _is_known(accelerator, found.folder):
            report(accelerator, {}, found.folder)
        return found
    reported = _train().get_checkpoint()
    if reported is None:
        return None
    with reported.as_directory() as folder:
        return accelerator.resume(folder)


def report(accelerator: Accelerator, metrics: Mapping[str, Any], checkpoint: str | Path | None = None) -> None:
    """`ray.train.report`, with a checkpoint of `save_state`; every worker calls it, as often as the others.

    Args:
        accelerator: of this worker.
        metrics: by name; tensors of one element become numbers, and `updates` is added. Ray keeps those of rank 0.
        checkpoint: what `save_state` has returned; it is waited for where it is written behind the loop.

    Raises:
        CheckpointError: on every rank, where the checkpoint could not be written.
        ConfigError: not in a worker of Ray Train; or a checkpoint that lies outside of the experiment's storage.
    """
    told = {"updates": accelerator.num_updates, **{name: _number(value) for name, value in metrics.items()}}
    train, storage = _train(), _storage()
    options: dict[str, Any] = {}
    if checkpoint is not None:
        accelerator.wait_for_save()
        path = Path(checkpoint).absolute()
        if _is_folder(storage):
            _check_inside(path, storage)
            options["checkpoint_upload_mode"] = train.CheckpointUploadMode.NO_UPLOAD
        if accelerator.is_main_process:  # all of it is there, on one rank's word
            options["checkpoint"] = (
                train.Checkpoint(str(path), filesystem=storage.storage_filesystem)
                if _is_folder(storage)
                else train.Checkpoint.from_directory(path)
            )
    train.report(told, **options)


def _is_known(accelerator: Accelerator, folder: Path) -> bool:
    """Has Ray heard of the checkpoint? By the word of rank 0, so that all workers report or none."""
    known = False
    if accelerator.is_main_process:
        listed = [Path(each.checkpoint.path).resolve() for each in _train().get_all_reported_checkpoints()]
        known = folder.resolve() in listed
    return bool(accelerator.collectives.broadcast_object(known))


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", None) is not None else value


def _check_inside(path: Path, storage: Any) -> None:
    root = Path(storage.experiment_fs_path)
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"the checkpoint {path} is not in the experiment's storage {root}; make the Accelerator with "
            "project_config=headway.integrations.ray.project(), and report what save_state() returns"
        )


def _train() -> Any:
    return require("ray.train", "headway.integrations.ray needs", "ray[train]")


def _storage() -> Any:
    try:
        return _train().get_context().get_storage()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigError(
            f"headway.integrations.ray works in the function that a ray.train.torch.TorchTrainer runs: {error}"
        ) from error


def _is_folder(storage: Any) -> bool:
    """Is the storage a folder, and no object store or filesystem of the user's?"""
    return bool(storage.storage_filesystem.type_name == "local")
