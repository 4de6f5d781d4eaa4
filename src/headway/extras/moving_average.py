"""Moving averages of a model's weights (EMA and SWA), on every layout, for evaluation and export.

Each rank averages its own shards in place, so an update needs no communication. An average takes as much memory as this
rank's trainable weights would take in the average's dtype. For an evaluation, weights and averages are exchanged in
place, bucket by bucket.

Four rules decide when an average is updated:

- Prepared optimizers report each update that they have made. They do not report micro-batches inside an accumulation
  window, skipped updates (fp16, `on_non_finite`, `on_spike`) or batches that are run again.
- If several optimizers train one model, the average waits until all of them have stepped in the accumulation window, or
  until the next window begins.
- `update()` does the pending work immediately. A second call for one update changes nothing, so loops that were written
  for the averages of timm, diffusers or torch work unchanged.
- If no prepared optimizer trains the model, each call of `update()` counts as one update.

If a checkpoint is saved while the model contains averages, the trained weights are put back during the save. So a
preemption during an evaluation also saves the trained weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from headway.common import scope
from headway.core.runtime import process
from headway.core.runtime.dry_run import is_dry_run
from headway.core.strategies.base import Strategy
from headway.core.strategies.blocks import get_class_name
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.prepared.registry import AcceleratorRegistry, PreparationListeners
from headway.core.training.run import Run
from headway.core.training.step import TrainingStep
from headway.core.weights.compiled import unwrap_compiled
from headway.errors import ConfigError, StateError, UnsupportedError
from headway.extras._torch import foreach_copy_
from headway.extras.average_exchange import WeightExchange, WeightPair
from headway.extras.average_shards import copy_saved_average
from headway.extras.average_snapshots import write_snapshot
from headway.extras.averaged_tensors import AveragedTensors
from headway.extras.averaging_schedule import AveragingSchedule, Decay
from headway.extras.power_average import PowerDecay


class ModelAverages:
    """Registry of each model's averages. When the model is prepared, its averages are attached to the run.

    Models and averages are weakly referenced.
    """

    def __init__(self) -> None:
        self._by_model: WeakKeyDictionary[torch.nn.Module, WeakSet[ExponentialMovingAverage]] = WeakKeyDictionary()
        scope.get_or_create(PreparationListeners).append(self.attach_averages)

    def add(self, average: "ExponentialMovingAverage") -> None:
        """Register an average."""
        self._by_model.setdefault(average.model, WeakSet()).add(average)

    def has_any(self, model: torch.nn.Module) -> bool:
        """Whether the model has an average."""
        return bool(self._by_model.get(_unwrap_model(model)))

    def list_averages(self, model: torch.nn.Module) -> "list[ExponentialMovingAverage]":
        """Return the averages of a model, in no particular order."""
        return list(self._by_model.get(_unwrap_model(model), ()))

    def attach_averages(self, model: torch.nn.Module, step: TrainingStep) -> None:
        """Attach the averages of a model to the run that has prepared it.

        Args:
            model: Prepared model.
            step: Training step of the Accelerator.
        """
        for average in list(self._by_model.get(_unwrap_model(model), ())):
            average.attach(step)


class SwappedModels:
    """Registry of the models that currently contain averaged weights, each with its average."""

    def __init__(self) -> None:
        self.averages: WeakKeyDictionary[torch.nn.Module, ExponentialMovingAverage] = WeakKeyDictionary()


@dataclass
class _PendingUpdate:
    """State of one update of a model, which is complete when all optimizers of the model have stepped.

    Attributes:
        window: Number of the accumulation window in which the optimizers stepped. -1: none has stepped yet.
        stepped_ids: `id` of each of the model's optimizers that has stepped in this window.
        is_counted: Whether the averages already include this update.
    """

    window: int = -1
    stepped_ids: set[int] = field(default_factory=set)
    is_counted: bool = False


class ExponentialMovingAverage:
    """Average of a model's trainable weights over the updates of a run, on any layout.

    After `prepare`, prepared optimizers update it automatically, once per update. It is part of every checkpoint of
    the run, and can be loaded into any layout. Create it on every rank, before `resume`.

    Args:
        model: Model, prepared or not. An average that is created before `prepare` is sharded with its model.
        decay: Weight of the old average in each averaging step, from 0 to 1. With "mean", all averaged states have
            equal weight (SWA). A callable gets the number of the averaging step, 1 for the first, and returns the
            decay; `headway.PowerDecay` is one. Default: 0.999.
        update_after: Number of updates after which averaging begins. Until then, the average equals the weights.
            Default: 0.
        every: Number of updates from one averaging step to the next. The decay is applied once per step. Default: 1.
        warmup: Whether to begin with a smaller decay: min(decay, (1 + n) / (10 + n)) in averaging step n. Default:
            False.
        dtype: Dtype of the averages. None (the default): dtype of the parameters, but at least float32, because in half
            precision small changes are lost.
        device: Device of the averages, such as "cpu" for host memory. None (the default): device of the parameters.
        buffers: "copy" to evaluate with the model's own buffers, or "average" to average floating-point buffers like
            the weights. Default: "copy".
        name: Name of the average for `save_model(weights=...)`. Several averages of a model need different names.
            Default: "ema".

    Attributes:
        model: Model whose weights are averaged.
        name: Name of the average.
        dtype: Dtype of the averages, or None for that of the parameters, but at least float32.

    Raises:
        ConfigError: If an argument is not allowed, or the model has another average of this name.
        UnsupportedError: If the model is trained by DeepSpeed.

    Example::

        ema = ExponentialMovingAverage(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
        with ema.swap_weights():
            evaluate(model)
        accelerator.save_model(model, "averaged", weights="ema")
    """

    follows_model = True
    """Flag that makes `Accelerator.prepare` accept the object and return it unchanged."""

    def __init__(
        self,
        model: torch.nn.Module,
        decay: Decay = 0.999,
        *,
        update_after: int = 0,
        every: int = 1,
        warmup: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        buffers: str = "copy",
        name: str = "ema",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"ExponentialMovingAverage got a {type(model).__name__}; give the model, not its parameters"
            )
        self._schedule = AveragingSchedule(decay, update_after, every, has_warmup=warmup)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
            raise ConfigError(f"dtype={dtype!r}; give a floating-point dtype, such as torch.float32, or None")
        if buffers not in ("copy", "average"):
            raise ConfigError(
                f"buffers={buffers!r}; allowed: 'copy' for the model's own, 'average' to average them too"
            )
        self.model: torch.nn.Module = _unwrap_model(model)
        self.name = name
        self.dtype = dtype
        self._tensors = AveragedTensors(
            self.model, dtype, None if device is None else torch.device(device), buffers == "average"
        )
        self._exchange: WeightExchange | None = None  # while the model contains the averages
        # The run that trains the model
        self._step: TrainingStep | None = None
        self._hooked_runs: WeakSet[Run] = WeakSet()  # runs whose hooks call this object
        # Results of `_trains_model`: pairs of (number of the optimizer's parameters, whether it trains the model).
        self._trains_model_cache: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        self._pending = _PendingUpdate()
        scope.get_or_create(ModelAverages).add(self)
        step = self._find_step()
        if step is not None:
            self.attach(step)
        elif not any(parameter.is_meta for parameter in self.model.parameters()):
            self._adapt_averages()

    def __repr__(self) -> str:
        return (
            f"ExponentialMovingAverage({get_class_name(self.model)}, decay={self._schedule.decay!r}, "
            f"update_after={self._schedule.update_after}, every={self._schedule.every}, num_updates={self.num_updates})"
        )

    # ---------------------------------------------------------------- the run

    def attach(self, step: TrainingStep) -> None:
        """Follow the updates of the run that has prepared the model, and join its checkpoints. Called by `prepare`.

        Before the first update, the averages get the prepared model's weights. Do nothing if the run is followed already.

        Args:
            step: Training step of the Accelerator.

        Raises:
            ConfigError: If the model has another average of this name.
            UnsupportedError: If the model is trained by DeepSpeed.
            StateError: If the shapes of existing averages do not fit the prepared model.
        """
        if self._step is step:
            return
        run = step.run
        if not run.strategy.capabilities.optimizer_state:
            raise UnsupportedError(
                f"ExponentialMovingAverage does not support the {run.strategy.name} strategy, whose engine keeps the weights itself; "
                "use 'fsdp' or 'ddp'"
            )
        if any(each.name == self.name for each in find_averages(run.custom, self.model) if each is not self):
            raise ConfigError(f"the model has an average called {self.name!r} already; give this one another name=")
        self._step = step
        self._adapt_averages()
        if not self._schedule.num_updates:
            # prepare() gives all ranks the weights of rank 0 or of a checkpoint, and an average begins with the weights.
            self._tensors.move_toward_weights(0.0)
        self._trains_model_cache.clear()
        self._pending = _PendingUpdate()  # the steps were those of another run
        if run not in self._hooked_runs:
            self._hooked_runs.add(run)
            hooks = run.hooks
            hooks.updated.append(partial(self._note_update, step))
            hooks.before_learning.append(partial(self._prepare_micro_batch, step))
            hooks.before_update.append(partial(self._check_before_update, step))
            run.around_save = partial(_restore_trained_weights, run.custom)
        if not any(each is self for each in run.custom):
            run.custom.append(self)

    def _find_step(self) -> TrainingStep | None:
        """Return the newest training step whose Accelerator has prepared the model, or None."""
        if not process.is_started():
            return None
        steps = process.current().scope.get_or_create(AcceleratorRegistry).list_newest_first()
        return next((step for step in steps if any(self.model is _unwrap_model(m) for m in step.prepared.models)), None)

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer trains parameters of the model.

        The result is cached until the optimizer's number of parameters changes.
        """
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        cached_count, trains_model = self._trains_model_cache.get(optimizer, (-1, False))
        if cached_count != count:
            self._adapt_averages()  # adapters and unfrozen layers are usually added as parameter groups
            ids = self._tensors.parameter_ids
            trains_model = any(id(parameter) in ids for parameter in iterate_parameters(optimizer))
            self._trains_model_cache[optimizer] = count, trains_model
        return trains_model

    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the prepared optimizers that train the model."""
        prepared = () if self._step is None else self._step.prepared.optimizers
        return [each.optimizer for each in prepared if self._trains_model(each.optimizer)]

    def _note_update(self, step: TrainingStep, optimizer: torch.optim.Optimizer, window: int) -> None:
        """After an optimizer has stepped, update the averages, or wait until the model's other optimizers step.

        Do nothing if the optimizer trains no parameter of the model, or belongs to another run.

        Args:
            step: Training step of the Accelerator that reports the update.
            optimizer: Optimizer that has stepped.
            window: Number of the accumulation window.
        """
        if step is not self._step or not self._trains_model(optimizer):
            return
        if window != self._pending.window or id(optimizer) in self._pending.stepped_ids:
            self._finish_update()  # the previous one, which not all optimizers have taken part in
            self._pending = _PendingUpdate(window)
        self._pending.stepped_ids.add(id(optimizer))
        if all(id(each) in self._pending.stepped_ids for each in self._list_optimizers()):
            self._finish_update()

    def _prepare_micro_batch(self, step: TrainingStep) -> None:
        """Before a micro-batch begins, update the averages if they do not include the last update of the weights.

        Do nothing if `step` belongs to another run.

        Raises:
            StateError: If the model holds averaged weights.
        """
        if step is self._step:
            self._ensure_trained_weights("train the model")
            self._finish_update()

    def _check_before_update(self, step: TrainingStep) -> None:
        """Before an optimizer makes its step, raise an error if the model contains averaged weights.

        Do nothing if `step` belongs to another run.

        Raises:
            StateError: If the model contains averaged weights.
        """
        if step is self._step:
            self._ensure_trained_weights("step an optimizer")

    def _finish_update(self) -> None:
        """Count the update that optimizers have reported, unless it has been counted already."""
        if self._pending.stepped_ids and not self._pending.is_counted:
            self._pending.is_counted = True
            self._count_update()

    # ---------------------------------------------------------------- averaging

    @property
    def num_updates(self) -> int:
        """Number of updates of the model since the average was created, including those before a resume."""
        self._finish_update()
        return self._schedule.num_updates

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the averages of this rank's shards, without their names."""
        return self._tensors.list_values()

    @property
    def num_averaged(self) -> int:
        """Number of averaging steps so far, one for every `every` updates after `update_after` updates."""
        self._finish_update()
        return self._schedule.num_averaged

    def update(self) -> None:
        """Update the averages if the model has been updated since the last call.

        If no prepared optimizer trains the model, each call counts as one update. Otherwise calls are optional, because
        prepared optimizers update the averages.

        Raises:
            StateError: If the model holds averaged weights.
        """
        self._ensure_trained_weights("call update()")
        self._attach_to_run()
        if self._list_optimizers():
            self._finish_update()
        else:
            self._count_update()

    def _attach_to_run(self) -> None:
        """Attach to the newest run that has prepared the model, if there is one."""
        step = self._find_step()
        if step is not None:
            self.attach(step)

    def _count_update(self) -> None:
        """Count one update, and take an averaging step if one is due.

        Raises:
            ConfigError: If the function for the decay returns something other than a number from 0 to 1.
        """
        decay = self._schedule.count_update()
        if decay is not None:
            self._tensors.move_toward_weights(decay)

    def _adapt_averages(self) -> None:
        """Create missing averages with the current weights as values, and adapt existing ones to the current layout."""
        self._free_gathered()  # gathered parameters are not this rank's shards
        self._tensors.adapt_to_model()

    # ---------------------------------------------------------------- evaluation

    @property
    def run(self) -> Run | None:
        """Run that has prepared the model, or None."""
        return None if self._step is None else self._step.run

    @property
    def is_swapped(self) -> bool:
        """Whether the model currently contains these averages in place of its trained weights."""
        return self._exchange is not None

    @contextmanager
    def swap_weights(self) -> Iterator[torch.nn.Module]:
        """Return a context in which the model contains the averaged weights. Enter it on every rank.

        Averages with the dtype and device of the weights are exchanged in place, with temporary memory for 64 MiB or
        the largest tensor. For other averages, a copy of the weights is kept on the averages' device. The trained
        weights are restored when the block ends, even after an error. Checkpoints that are saved in the block contain
        the trained weights. Before `update_after` updates, the averages equal the weights, so nothing is exchanged.

        Yields:
            The model.

        Raises:
            StateError: If the model already contains averaged weights, or if it is trained inside the block.
        """
        self._swap_weights_in()
        try:
            yield self.model
        finally:
            self._swap_weights_out()

    @contextmanager
    def restore_weights(self) -> Iterator[None]:
        """Return a context in which the model contains the trained weights, even in a `swap_weights` block.

        Only these averages are replaced. If the model contains the averages of another object, they stay in it.
        """
        if not self.is_swapped:
            yield
            return
        self._swap_weights_out()
        try:
            yield
        finally:
            self._swap_weights_in()

    def copy_to_model(self) -> None:
        """Replace the model's weights with the averages permanently, for example at the end of the training.

        Before `update_after` updates, the averages equal the weights, so nothing changes. Call it on every rank.

        Raises:
            StateError: If the model holds averaged weights in a `swap_weights` block.
        """
        self._ensure_trained_weights("call copy_to_model()")
        self._prepare_swap()
        with torch.no_grad():
            for pairs in self._iterate_started_pairs():
                foreach_copy_([pair.weight for pair in pairs], [pair.average for pair in pairs])
        self._finish_swap()

    def _swap_weights_in(self) -> None:
        """Exchange weights and averages, so that the model contains the averages."""
        self._ensure_trained_weights("enter swap_weights() again")
        self._prepare_swap()
        self._exchange = WeightExchange(self._iterate_started_pairs())
        scope.get_or_create(SwappedModels).averages[self.model] = self
        self._finish_swap()

    def _swap_weights_out(self) -> None:
        """Put the trained weights back into the model. Do nothing if it does not contain these averages."""
        if self._exchange is not None:
            self._free_gathered()
            self._exchange.undo()
        self._exchange = None
        scope.get_or_create(SwappedModels).averages.pop(self.model, None)
        self._finish_swap()

    def _iterate_started_pairs(self) -> Iterator[list[WeightPair]]:
        """Yield the pairs of weights and averages, or nothing while the averages still equal the weights."""
        if self._schedule.has_begun:
            yield from self._tensors.iterate_pairs()

    def _prepare_swap(self) -> None:
        """Bring the averages up to date, and wait for background saves that still read the weights."""
        self._attach_to_run()
        self._finish_update()
        self._adapt_averages()
        if self._step is not None:
            for wait_until_saved in self._step.hooks.before_swap:
                wait_until_saved()

    def _finish_swap(self) -> None:
        """Discard everything that was computed from the previous weights: gathered copies, casts and float8 scales."""
        self._free_gathered()
        torch.clear_autocast_cache()
        if self._step is None:
            return
        run = self._step.run
        if run.mixed_precision == "fp8":
            run.strategy.apply_loaded_values()  # recomputes the float8 scales

    def _free_gathered(self) -> None:
        """Free gathered parameters of a sharded model, whose values are outdated after an exchange."""
        if self._step is not None:
            self._step.strategy.free_gathered(self.model)

    def _ensure_trained_weights(self, action: str) -> None:
        """Raise an error if the model contains averaged weights, of this or of another average.

        Args:
            action: Action that the error message describes as impossible.

        Raises:
            StateError: If the model contains averaged weights.
        """
        average = scope.get_or_create(SwappedModels).averages.get(self.model)
        if average is not None:
            raise StateError(
                f"cannot {action}: {get_class_name(self.model)} contains the averaged weights of {average.name!r}. Leave the "
                "swap_weights() block first"
            )

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the average's name, its numbers of updates and averaging steps, and the averages by tensor name.

        Under a sharded layout, the averages are sharded like the weights. With a `PowerDecay`, the state also contains
        what `headway.reconstruct_average` needs: the width, `update_after` and `every`.

        Raises:
            StateError: If the model holds averaged weights.
        """
        self._ensure_trained_weights("read the state of an average")
        self._attach_to_run()
        self._finish_update()
        self._adapt_averages()
        if not self._schedule.has_begun:
            self._tensors.move_toward_weights(0.0)
        return {
            "name": self.name,
            "num_updates": self._schedule.num_updates,
            "num_averaged": self._schedule.num_averaged,
            **self._schedule.describe_profile(),
            "average": dict(self._tensors.export(self._get_strategy())),
        }

    def _get_strategy(self) -> Strategy | None:
        """Return the strategy that has prepared the model, or None."""
        return None if self._step is None else self._step.strategy

    def save_snapshot(self, folder: str | Path) -> None:
        """Write the averages and their description into a folder, for `headway.reconstruct_average`.

        Call it on every rank. Rank 0 writes safetensors files, with the averages in their own dtype. If the model is
        sharded, one full tensor at a time is gathered on rank 0. Weights that are not averaged are not written.

        Args:
            folder: Folder to write to, created if missing. An earlier snapshot in it is replaced.

        Raises:
            ConfigError: If the decay is not a `PowerDecay`, or if the folder is a checkpoint.
            StateError: If the model holds averaged weights.
            CheckpointError: If the files cannot be written.
        """
        if not isinstance(self._schedule.decay, PowerDecay):
            raise ConfigError(
                f"save_snapshot() needs an average with decay=headway.PowerDecay(...), this one has decay={self._schedule.decay!r}; "
                f"write its averages with accelerator.save_model(model, folder, weights={self.name!r})"
            )
        if not is_dry_run():  # averages in a forecast have no values
            write_snapshot(folder, self.state_dict(), self.run)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned under any layout.

        Args:
            state: State dict.

        Raises:
            StateError: If the model contains averaged weights, if the state's name, tensors or shapes do not match, or
                if an average with a `PowerDecay` was saved with other settings. The averages then stay unchanged.
        """
        self._ensure_trained_weights("load the state of an average")
        self._attach_to_run()
        saved = state["average"]
        if state["name"] != self.name:
            raise StateError(
                f"the saved average is called {state['name']!r}, this one {self.name!r}; create several averages in the order in "
                "which they were created for the saved run"
            )
        profile = self._schedule.describe_profile()
        saved_profile = {key: state.get(key) for key in profile}
        if state["num_averaged"] and saved_profile != profile:
            raise StateError(
                f"the average {self.name!r} was saved with {saved_profile}, and now has {profile}: the result would be no "
                "power-function average. Create it with the settings of the saved run"
            )
        self._tensors.check_saved(saved)
        self._tensors.add_parameters(self._tensors.list_frozen(saved))
        targets = dict(self._tensors.export(self._get_strategy()))
        with torch.no_grad():
            for name, values in saved.items():
                if name in targets:
                    copy_saved_average(targets[name], values)
        self._pending = _PendingUpdate()  # the steps were those of the replaced state
        self._schedule.num_updates = int(state["num_updates"])
        self._schedule.num_averaged = int(state["num_averaged"])


def holds_averages(run: Run) -> bool:
    """Whether a model of the run currently contains averaged weights in place of its trained weights."""
    swapped = scope.get_or_create(SwappedModels).averages.values() if scope.has(SwappedModels) else ()
    return any(each.run is run for each in swapped)


def find_averages(objects: Iterable[Any], model: torch.nn.Module) -> list[ExponentialMovingAverage]:
    """Return the moving averages of a model's weights that are among the objects registered for checkpoints."""
    return [each for each in objects if isinstance(each, ExponentialMovingAverage) and each.model is model]


def get_swap_function(
    objects: Iterable[Any], model: torch.nn.Module, name: str
) -> Callable[[], AbstractContextManager[torch.nn.Module]]:
    """Return a function that returns a context in which a model contains the averages with the given name.

    Args:
        objects: Objects that are registered for checkpoints.
        model: Model without wrappers.
        name: Name of the average.

    Raises:
        ConfigError: If the model has no average of this name.
    """
    averages = find_averages(objects, model)
    for average in averages:
        if average.name == name:
            return average.swap_weights
    names = ", ".join(repr(average.name) for average in averages)
    raise ConfigError(
        f"weights={name!r}: {get_class_name(model)} has {f'the averages {names}' if names else 'no average'}; create "
        f"headway.ExponentialMovingAverage(model, name={name!r}) before the training"
    )


@contextmanager
def _restore_trained_weights(objects: Iterable[Any]) -> Iterator[None]:
    """Return a context in which all models contain their trained weights, so that a checkpoint can be saved.

    Args:
        objects: Objects that are registered for checkpoints, including the averages.
    """
    with ExitStack() as blocks:
        for each in objects:
            if isinstance(each, ExponentialMovingAverage):
                blocks.enter_context(each.restore_weights())
        yield


def _unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers of DDP and `torch.compile`."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return unwrap_compiled(model)
