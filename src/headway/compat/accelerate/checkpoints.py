"""Accelerate's checkpoint files: written in addition to Headway's own, and read from Accelerate's checkpoints.

In scripts that import Headway as `accelerate`, a checkpoint has both formats. `load_state` uses Headway's tensors and
manifest; scripts and Accelerate itself use the files in Accelerate's format. All files are written into one staging
directory and committed by one rename. The manifest contains their hashes. Accelerate's pickle files are only read with
`weights_only=True`.
"""

import random
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from headway.compat.accelerate.modules.models import load
from headway.core.checkpoint.format.dense import is_uninitialized
from headway.core.checkpoint.format.foreign import MANIFEST, identify_program, parse_number
from headway.core.checkpoint.loading.misfits import find_misfit
from headway.core.checkpoint.loading.restoring import copy_saved_values
from headway.core.checkpoint.loading.rollback import LoadRollback, copy_state, restore_object
from headway.core.checkpoint.optimizer_state import make_optimizer_undo
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.core.weights.export import save_object
from headway.core.weights.pieces import get_memory_key
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_CUSTOM_STATE_FILE = re.compile(r"custom_checkpoint_\d+\.pkl")


def get_file_name(name: str, index: int) -> str:
    """Return the name of a file in Accelerate's checkpoints, such as `optimizer.bin` or `optimizer_1.bin`.

    Args:
        name: File name of the first object, such as "optimizer.bin".
        index: Index of the object, from 0.
    """
    stem, _, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}.{ending}"


def is_accelerate_checkpoint(folder: Path) -> bool:
    """Whether a directory is a checkpoint that Accelerate wrote.

    Any directory with `model.safetensors` or `pytorch_model.bin` counts as one. False for Headway's checkpoints, and
    for the staging directories of its saves, whose names start with a dot.
    """
    if (folder / MANIFEST).is_file() or not folder.is_dir() or folder.name.startswith("."):
        return False
    has_weights = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
    return identify_program(folder)[0] == "Accelerate" or has_weights


def find_newest(parent: Path) -> Path | None:
    """Return the directory with the highest number in `parent` if it is a checkpoint of Accelerate, else None."""
    names = parent.iterdir() if parent.is_dir() else ()
    numbered = [path for path in names if parse_number(path) is not None and not path.name.startswith(".")]
    newest = max(numbered, key=lambda path: parse_number(path) or 0, default=None)
    return newest if newest is not None and is_accelerate_checkpoint(newest) else None


class AccelerateWriter:
    """Save hook that writes Accelerate's files into a checkpoint.

    Args:
        accelerator: Accelerator whose state is saved.

    Attributes:
        safe_serialization: Whether weights are written as safetensors. Otherwise they are written by torch.save.
            Default: True.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.safe_serialization = True

    def __call__(self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        """Write this rank's files of Accelerate's checkpoint format. All ranks must call it.

        Rank 0 writes the weights and the states of all objects. Every rank writes its own RNG states.

        Args:
            models: Models of the checkpoint.
            weights: State dicts of the models. An earlier save hook may have removed those that it wrote itself.
            folder: Staging directory of the checkpoint.
        """
        accelerator, directory = self._accelerator, Path(folder)
        if accelerator.is_main_process:
            self._write_weights(models, weights, directory)
            self._write_states(directory)
        torch.save(self._collect_rng_states(), directory / f"random_states_{accelerator.process_index}.pkl")

    def _write_weights(
        self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], directory: Path
    ) -> None:
        name = "model.safetensors" if self.safe_serialization else "pytorch_model.bin"
        for index, state in enumerate(_restore_tied_names(models, weights)):
            save_object(dict(state), directory / get_file_name(name, index), self.safe_serialization)

    def _write_states(self, directory: Path) -> None:
        """Write the states of optimizers, schedulers, the gradient scaler and custom objects, one file per object."""
        accelerator = self._accelerator
        groups = {"optimizer.bin": accelerator._optimizers, "scheduler.bin": accelerator._schedulers}
        for name, objects in groups.items():
            for index, each in enumerate(objects):
                torch.save(each.state_dict(), directory / get_file_name(name, index))
        if accelerator.scaler is not None:
            torch.save(accelerator.scaler.state_dict(), directory / "scaler.pt")
        for index, each in enumerate(accelerator._custom_objects):
            torch.save(each.state_dict(), directory / f"custom_checkpoint_{index}.pkl")

    def _collect_rng_states(self) -> dict[str, Any]:
        """Return this rank's RNG states by Accelerate's names, and the micro-batches since the last update as "step"."""
        states: dict[str, Any] = {
            "step": self._accelerator._num_micro_batches_in_window,
            "random_state": random.getstate(),
            "numpy_random_seed": numpy.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        return states


def _restore_tied_names(
    models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield each state dict in Accelerate's format, in which a tied tensor occurs under each of its names.

    A state dict whose names fit none of the models is yielded unchanged.

    Args:
        models: Models of the checkpoint.
        weights: State dicts in Headway's format, which contains a tied tensor only once. Save hooks may have removed
            some of them, or changed their values.
    """
    # Because save hooks may remove entries, the model of a state dict is found by its names, not by its index.
    model_states = [model.state_dict() for model in models]
    for entry in weights:
        for model_state in model_states:
            if entry.keys() <= dict(rename_bare_items(model_state.items())).keys():
                yield _add_tied_names(entry, model_state)
                break
        else:
            yield entry


def _add_tied_names(
    entry: Mapping[str, torch.Tensor], model_state: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the values of `entry` under all names of a model's state dict, including each name of a tied tensor.

    A tensor that `entry` does not contain, for example because a save hook removed it, keeps the model's current value.

    Args:
        entry: State dict in Headway's format, which contains a tied tensor only once.
        model_state: The model's state dict. It has all names of `entry`.
    """
    # Headway's names lack the components that torch.compile adds. The order is that of the model's state dict.
    entry_names = dict(zip(model_state, dict(rename_bare_items(model_state.items()))))
    value_by_memory = {
        get_memory_key(current): entry[entry_names[name]]
        for name, current in model_state.items()
        if entry_names[name] in entry
    }
    completed = {}
    for name, current in model_state.items():
        if entry_names[name] in entry:
            completed[name] = entry[entry_names[name]]
        else:
            completed[name] = value_by_memory.get(get_memory_key(current), current)
    return completed


class AccelerateReader:
    """Reader that restores the Accelerator's objects from a checkpoint directory that Accelerate wrote.

    Args:
        accelerator: Accelerator to load the checkpoint into.
        folder: Directory of the checkpoint.
    """

    def __init__(self, accelerator: Any, folder: Path) -> None:
        self._accelerator = accelerator
        self._folder = folder

    def restore(self, models: list[torch.nn.Module], strict: bool = True) -> RestoreResult:
        """Read all files, restore the objects, and return a summary of what was restored. All ranks must call it.

        All ranks exchange their errors before any weights change. If any rank fails, all ranks undo their changes to
        other objects. RNG states are restored last. If this rank's file of them is missing, its RNG states stay
        unchanged, with a warning.

        Args:
            models: Models to load, without those that the user's load hooks have already loaded.
            strict: Whether all weight names must match. Default: True.

        Raises:
            CheckpointError: On every rank, if on any rank a file is missing, does not fit this run, or contains objects
                that Headway refuses to unpickle.
        """
        rollback = LoadRollback()
        weights: list[Mapping[str, torch.Tensor]] = []
        rng_states: _SavedRNGStates | None = None
        failure: str | None = None
        cause: Exception | None = None
        try:
            rng_states = self._read_rng_states()
            weights = [self._read_weights(index, model) for index, model in enumerate(models)]
            self._check_weights(models, weights, strict)
            self._restore_objects(rollback)
        except Exception as error:  # report any error to the other ranks, which would otherwise wait for this one
            failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            cause = error
        failures = {message for message in self._accelerator.collectives.gather_objects(failure) if message is not None}
        if failures:
            unrestored = rollback.run()
            warning = f"this state could not be restored, so end the run: {'; '.join(unrestored)}"
            outcome = warning if unrestored else "nothing was changed"
            raise CheckpointError(f"{'; '.join(sorted(failures))}; {outcome}") from cause
        for model, state in zip(models, weights):
            _copy_into_model(model, state)
        if rng_states is not None:
            rng_states.set()
        return RestoreResult(self._folder, {"num_updates": self._accelerator.num_updates, "epoch": 0})

    def _check_weights(
        self, models: list[torch.nn.Module], weights: list[Mapping[str, torch.Tensor]], strict: bool
    ) -> None:
        """Check that the weights fit the models, without changing the models.

        Args:
            models: Models to load.
            weights: State dict of each model.
            strict: Whether missing and unknown names are errors.

        Raises:
            CheckpointError: If a shape does not fit, or if `strict` is set and the names differ.
        """
        problems = []
        for model, state in zip(models, weights):
            problems += _find_misfits(model, state, strict)
        if problems:
            raise CheckpointError(
                f"the weights in {self._folder} do not fit; build the model that was saved:\n  "
                + "\n  ".join(problems[:5])
            )

    def _restore_objects(self, rollback: LoadRollback) -> None:
        """Restore optimizers, schedulers, custom objects and the gradient scaler, and record how to undo each change.

        All files are read before the first object is changed.

        Args:
            rollback: Rollback to which an undo step per object is added.

        Raises:
            CheckpointError: If a file is missing or damaged, or if the number of custom objects differs.
        """
        accelerator = self._accelerator
        optimizers, schedulers = accelerator._optimizers, accelerator._schedulers
        optimizer_states = [
            self._read_pickle(get_file_name("optimizer.bin", index)) for index in range(len(optimizers))
        ]
        scheduler_states = [
            self._read_pickle(get_file_name("scheduler.bin", index)) for index in range(len(schedulers))
        ]
        other_states = [
            *zip(schedulers, scheduler_states),
            *zip(accelerator._custom_objects, self._read_custom_states()),
        ]
        if accelerator.scaler is not None:
            other_states.append((accelerator.scaler, self._read_pickle("scaler.pt")))
        for index, (optimizer, state) in enumerate(zip(optimizers, optimizer_states)):
            rollback.add(f"optimizer {index}", make_optimizer_undo(optimizer.optimizer))
            optimizer.load_state_dict(state)
        for each, state in other_states:
            rollback.add(type(each).__name__, partial(restore_object, each, copy_state(each.state_dict())))
            each.load_state_dict(state)

    def _read_weights(self, index: int, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the weights for the model with this index, under the model's own names.

        Raises:
            CheckpointError: If the file is missing or damaged.
        """
        path = self._folder / get_file_name("model.safetensors", index)
        saved = load_file(path) if path.is_file() else self._read_pickle(get_file_name("pytorch_model.bin", index))
        return _match_names(saved, model)

    def _read_pickle(self, name: str) -> Any:
        """Return the contents of a pickle file of the checkpoint on the CPU, without executing code.

        Raises:
            CheckpointError: If the file is missing or damaged, or contains objects that Headway refuses to unpickle.
        """
        path = self._folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{self._folder} has no {name}, which this run's prepared objects need; prepare the same objects as when it was saved"
            )
        try:
            return load(path, "cpu")
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged, or contains objects that only unpickling could create, which might run code from the file. "
                f"The error of torch: {str(error).splitlines()[0]}"
            ) from error

    def _read_custom_states(self) -> list[Any]:
        """Return the states of the registered objects, in the order of registration.

        Raises:
            CheckpointError: If the checkpoint has states of more or fewer objects than are registered.
        """
        saved = [path.name for path in self._folder.iterdir() if _CUSTOM_STATE_FILE.fullmatch(path.name)]
        num_registered = len(self._accelerator._custom_objects)
        if len(saved) != num_registered:
            raise CheckpointError(
                f"{self._folder} contains the states of {len(saved)} registered objects, but {num_registered} are registered; "
                "register the same objects as when it was saved"
            )
        return [self._read_pickle(f"custom_checkpoint_{index}.pkl") for index in range(num_registered)]

    def _read_rng_states(self) -> "_SavedRNGStates | None":
        """Return this rank's saved RNG states, or None with a warning if the checkpoint has none for this rank.

        Raises:
            CheckpointError: If the file is damaged, or holds no RNG states.
        """
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if not (self._folder / name).is_file():
            log.warning("%s has no %s: this rank's random streams are left unchanged", self._folder, name)
            return None
        try:
            return _SavedRNGStates(self._read_pickle(name))
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._folder / name} contains no RNG states: {error!r}") from error


class _SavedRNGStates:
    """RNG states of one rank, as Accelerate saves them. The constructor tries them on separate generators.

    Args:
        states: Content of the rank's file.

    Raises:
        KeyError, TypeError, ValueError or RuntimeError: If a state is missing, or a generator does not accept it.
    """

    def __init__(self, states: Any) -> None:
        self._python = _convert_to_tuples(states["random_state"])
        self._numpy = states["numpy_random_seed"]
        self._torch = states["torch_manual_seed"]
        self._devices = states.get("torch_cuda_manual_seed")
        random.Random().setstate(self._python)
        numpy.random.RandomState().set_state(self._numpy)
        torch.Generator().set_state(self._torch)

    def set(self) -> None:
        """Set the states of the global generators, and of the GPUs' generators if there are as many GPUs."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._devices is not None and torch.cuda.is_available() and len(self._devices) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self._devices)


def _convert_to_tuples(value: Any) -> Any:
    return tuple(map(_convert_to_tuples, value)) if isinstance(value, list | tuple) else value


def _match_names(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a state dict with its keys renamed to the model's own names.

    The prefixes that DDP and `torch.compile` add are removed, unless the model's own names contain them.
    """
    own_state_names = {name: name for name in model.state_dict()}
    has_ddp_prefix = all(name.startswith("module.") for name in state)
    has_own_prefix = any(name.startswith("module.") for name in own_state_names)
    prefix = "module." if has_ddp_prefix and not has_own_prefix else ""
    # The model itself may be compiled: find its name by the name without torch.compile's components, too.
    own_names = own_state_names | dict(rename_bare_items(own_state_names.items()))
    renamed = {}
    for saved_name, value in state.items():
        name = saved_name.removeprefix(prefix)
        own_name = own_names.get(name) or own_names.get(remove_compiled_levels(name))
        renamed[own_name or name] = value
    return renamed


def _find_misfits(model: torch.nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> list[str]:
    """Return the reasons why a state dict cannot be loaded into a model, one line per reason.

    torch itself would raise an error only after changing some of the model's tensors.

    Args:
        model: Model to load.
        state: Weights by name.
        strict: Whether missing and unknown names count as reasons.
    """
    model_state = model.state_dict()
    # A tied tensor is not missing if the state dict contains it under another name.
    present = {model_state[name].data_ptr() for name in state if name in model_state}
    missing = [name for name, value in model_state.items() if name not in state and value.data_ptr() not in present]
    unknown = [name for name in state if name not in model_state]
    lines = []
    if strict and (missing or unknown):
        lines.append(f"{type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}")
    for name in state:
        if name not in model_state or is_uninitialized(model_state[name]):
            continue  # an uninitialized tensor of a lazy module takes the shape of its value
        problem = find_misfit(model_state[name], state[name])
        if problem is not None:
            lines.append(f"{name} {problem}")
    return lines


def _copy_into_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into a model, whose names and shapes have been checked."""
    model_state = model.state_dict()
    # torch refuses to copy into a tensor that expand() created, because several of its elements share memory.
    expanded = {name for name in state if name in model_state and 0 in model_state[name].stride()}
    model.load_state_dict({name: value for name, value in state.items() if name not in expanded}, strict=False)
    with torch.no_grad():
        for name in expanded:
            copy_saved_values(model_state[name].detach(), state[name])
