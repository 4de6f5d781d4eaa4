"""Accelerate's checkpoint folders: its files next to Headway's own in each checkpoint, and loading folders that Accelerate wrote.

Under Accelerate's name, a checkpoint holds both: Headway's tensors and manifest, which `load_state` uses, and the files that
scripts and Accelerate itself look for. They are written into the same staging folder, hashed in the manifest, and committed
by the same rename. Accelerate's pickled files are only ever read with `weights_only=True`.
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

from headway.checkpoint.format.foreign import MANIFEST, number_of, program_of
from headway.checkpoint.format.tensors import is_unmade
from headway.checkpoint.loading.restoring import LoadRollback, misfit, preserved, put_back, put_in
from headway.checkpoint.resume.comparison import Restored
from headway.checkpoint.state import undo_optimizer
from headway.compat.accelerate.modules.models import load
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.weights.export import save_object

log = get_logger(__name__)

_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")


def numbered(name: str, index: int) -> str:
    """`optimizer.bin`, `optimizer_1.bin`, ...: Accelerate's file of the index-th object."""
    stem, _, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}.{ending}"


def is_accelerates(folder: Path) -> bool:
    """Is it a checkpoint that Accelerate wrote, and not one of Headway's, nor what a kill has left of one (a dot, and its files)?"""
    if (folder / MANIFEST).is_file() or not folder.is_dir() or folder.name.startswith("."):
        return False
    has_weights = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
    return program_of(folder)[0] == "Accelerate" or has_weights


def newest_in(parent: Path) -> Path | None:
    """The folder with the highest number, if Accelerate wrote it; else None."""
    names = parent.iterdir() if parent.is_dir() else ()
    found = [path for path in names if number_of(path) is not None and not path.name.startswith(".")]
    newest = max(found, key=lambda path: number_of(path) or 0, default=None)
    return newest if newest is not None and is_accelerates(newest) else None


class Writer:
    """Writes Accelerate's files into a checkpoint that is being saved.

    Args:
        accelerator: whose state it is.

    Attributes:
        safe_serialization: weights as safetensors; False: by torch.save.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.safe_serialization = True

    def __call__(self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        """A save hook: what is left of `weights`, and all else that Accelerate keeps."""
        accelerator, place = self._accelerator, Path(folder)
        if accelerator.is_main_process:
            self._write_weights(models, weights, place)
            self._write_states(place)
        torch.save(self._random_states(), place / f"random_states_{accelerator.process_index}.pkl")

    def _write_weights(
        self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], place: Path
    ) -> None:
        name = "model.safetensors" if self.safe_serialization else "pytorch_model.bin"
        for index, state in enumerate(_whole(models, weights)):
            save_object(dict(state), place / numbered(name, index), self.safe_serialization)

    def _write_states(self, place: Path) -> None:
        accelerator = self._accelerator
        groups = {"optimizer.bin": accelerator._optimizers, "scheduler.bin": accelerator._schedulers}
        for name, objects in groups.items():
            for index, each in enumerate(objects):
                torch.save(each.state_dict(), place / numbered(name, index))
        if accelerator.scaler is not None:
            torch.save(accelerator.scaler.state_dict(), place / "scaler.pt")
        for index, each in enumerate(accelerator._custom_objects):
            torch.save(each.state_dict(), place / f"custom_checkpoint_{index}.pkl")

    def _random_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {
            "step": self._accelerator._num_micro_batches_in_hand,
            "random_state": random.getstate(),
            "numpy_random_seed": numpy.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        return states


def _whole(
    models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Each entry including tied names, which Headway's state has only once."""
    left = list(models)
    for entry in weights:
        own = next((model for model in left if entry.keys() <= model.state_dict().keys()), None)
        left = [model for model in left if model is not own]
        yield entry if own is None else own.state_dict()


class Reader:
    """Loads a checkpoint folder that Accelerate wrote.

    Args:
        accelerator: the Accelerator to load it into.
        folder: the folder.

    Raises:
        CheckpointError: a file is missing, does not fit, or holds objects that are not read.
    """

    def __init__(self, accelerator: Any, folder: Path) -> None:
        self._accelerator = accelerator
        self._folder = folder

    def restore(self, models: list[torch.nn.Module], strict: bool = True) -> Restored:
        """Read all files, then apply their values; returns what was restored.

        Args:
            models: those that no hook has loaded.
            strict: every name must be there, and no other.
        """
        undo, failure, cause, weights = LoadRollback(), None, None, []
        try:
            weights = [self._weights(index, model) for index, model in enumerate(models)]
            self._restore_objects(undo, [line for pair in zip(models, weights) for line in _misfits(*pair, strict)])
        except Exception as error:
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            failure, cause = text, error
        failures = {text for text in self._accelerator.collectives.gather_objects(failure) if text is not None}
        if failures:
            left = undo.run()
            told = f"this could not be put back, so end the run: {'; '.join(left)}" if left else "nothing was changed"
            raise CheckpointError(f"{'; '.join(sorted(failures))}; {told}") from cause
        for model, state in zip(models, weights):
            _put(model, state)
        self._set_rng_states()
        return Restored(self._folder, {"num_updates": self._accelerator.num_updates, "epoch": 0})

    def _restore_objects(self, undo: LoadRollback, problems: list[str]) -> None:
        """All but the weights, with its way back; `problems`: of the weights, which come last."""
        if problems:
            raise CheckpointError(
                f"the weights in {self._folder} do not fit; build the model that was saved:\n  "
                + "\n  ".join(problems[:5])
            )
        accelerator = self._accelerator
        optimizers, schedulers = accelerator._optimizers, accelerator._schedulers
        states = [self._pickled(numbered("optimizer.bin", index)) for index in range(len(optimizers))]
        ticks = [self._pickled(numbered("scheduler.bin", index)) for index in range(len(schedulers))]
        others = [*zip(schedulers, ticks), *zip(accelerator._custom_objects, self._custom_states())]
        if accelerator.scaler is not None:
            others.append((accelerator.scaler, self._pickled("scaler.pt")))
        for index, (optimizer, state) in enumerate(zip(optimizers, states)):
            undo.add(f"optimizer {index}", undo_optimizer(optimizer.optimizer))
            optimizer.load_state_dict(state)
        for each, state in others:
            undo.add(type(each).__name__, partial(put_back, each, preserved(each.state_dict())))
            each.load_state_dict(state)

    def _weights(self, index: int, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        path = self._folder / numbered("model.safetensors", index)
        found = load_file(path) if path.is_file() else self._pickled(numbered("pytorch_model.bin", index))
        return _unprefixed(found, model)

    def _pickled(self, name: str) -> Any:
        path = self._folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{self._folder} has no {name}, which this run's prepared objects need; prepare the same objects as when it was saved"
            )
        try:
            return load(path, "cpu")
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged, or holds objects that only unpickling could create, which might run code from the file; torch "
                f"says: {str(error).splitlines()[0]}"
            ) from error

    def _custom_states(self) -> list[Any]:
        found = [path.name for path in self._folder.iterdir() if _CUSTOM.fullmatch(path.name)]
        wanted = len(self._accelerator._custom_objects)
        if len(found) != wanted:
            raise CheckpointError(
                f"{self._folder} holds the states of {len(found)} registered objects, but {wanted} are registered; register the same "
                "objects as when it was saved"
            )
        return [self._pickled(f"custom_checkpoint_{index}.pkl") for index in range(wanted)]

    def _set_rng_states(self) -> None:
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if not (self._folder / name).is_file():
            log.warning("%s has no %s: this rank's random streams are left unchanged", self._folder, name)
            return
        states = self._pickled(name)
        random.setstate(_tuples(states["random_state"]))
        numpy.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        on_devices = states.get("torch_cuda_manual_seed")
        if on_devices is not None and torch.cuda.is_available() and len(on_devices) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(on_devices)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _unprefixed(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Without DistributedDataParallel's `module.` before every name, where the model has no such names."""
    if not all(name.startswith("module.") for name in state) or any(
        name.startswith("module.") for name in model.state_dict()
    ):
        return state
    return {name.removeprefix("module."): value for name, value in state.items()}


def _misfits(model: torch.nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> list[str]:
    """Why weights do not fit a model, a line each: torch would find out when it has changed half of it."""
    own = model.state_dict()
    present = {own[name].data_ptr() for name in state if name in own}
    missing = [name for name, value in own.items() if name not in state and value.data_ptr() not in present]
    unknown = [name for name in state if name not in own]
    lines = []
    if strict and (missing or unknown):
        lines.append(f"{type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}")
    pairs = {name: (own[name], state[name]) for name in state if name in own and not is_unmade(own[name])}
    return lines + [f"{name} {problem}" for name, pair in pairs.items() if (problem := misfit(*pair)) is not None]


def _put(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    own = model.state_dict()
    # What expand() made is not written by torch.
    expanded = {name for name in state if name in own and 0 in own[name].stride()}
    model.load_state_dict({name: value for name, value in state.items() if name not in expanded}, strict=False)
    with torch.no_grad():
        for name in expanded:
            put_in(own[name].detach(), state[name])
