"""Registry of the objects that an Accelerator has prepared, in order of preparation."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from headway.core.data.loader import PreparedLoader
from headway.core.training.windows import AccumulationWindow


class OptimizerEntry(Protocol):
    """Interface of a prepared optimizer, as far as the registry of prepared objects needs it.

    Attributes:
        optimizer: torch's own optimizer.
        num_updates: Number of updates that it has made. Skipped steps do not count.
        step_was_skipped: Whether its last step at the end of an accumulation window made no update.
        last_window_length: Number of micro-batches in the accumulation window of its last update.
    """

    optimizer: torch.optim.Optimizer
    num_updates: int
    step_was_skipped: bool
    last_window_length: int

    def resume(self, num_updates: int) -> None:
        """Continue the count of updates from `num_updates`."""

    def snapshot(self) -> Any:
        """Return the values of `num_updates`, `step_was_skipped` and `last_window_length`, to undo a batch."""

    def restore(self, snapshot: Any) -> None:
        """Restore the counts of updates from a snapshot, which can be restored several times.

        These are `num_updates`, `step_was_skipped` and `last_window_length`.
        """

    def has_stepped_in(self, window_number: int) -> bool:
        """Whether the optimizer has stepped at the end of this accumulation window, even if the update was skipped."""


class SchedulerEntry(Protocol):
    """Interface of a prepared scheduler, as far as the registry of prepared objects needs it.

    Attributes:
        scheduler: User's scheduler.
        optimizers: Prepared optimizers whose updates advance it.
        rule: Rule for the number of scheduler steps per update. It has a `name`.
        follows_optimizer: Whether it advances only with updates. If False, every call to step() advances it once.
        num_calls: Number of calls to `step` that do not depend on updates, including repeated calls that are skipped.
    """

    scheduler: Any
    optimizers: Sequence[OptimizerEntry]
    rule: Any
    follows_optimizer: bool
    num_calls: int

    def set_rule(self, rule: Any) -> None:
        """Set the rule for the number of scheduler steps per update."""

    def seek(self, tick: int) -> None:
        """Continue the schedule from the scheduler step `tick`."""

    def ignore_repeated(self, num_calls: int) -> None:
        """Ignore the next `num_calls` calls to step(), which a resumed loop repeats."""

    def catch_up(self) -> None:
        """Treat all updates so far as already counted, because the loaded state of the schedule includes them."""


class PreparedObjects:
    """Registry of the prepared objects of one Accelerator.

    Args:
        reshard: Function that frees a model's gathered parameters. Its sharded parameters and their names can then be
            read until its next forward pass. Default: None, for models without gathered parameters.

    Attributes:
        models: Models in order of preparation.
        optimizers: Optimizers in order of preparation.
        loaders: Loaders in order of preparation.
        schedulers: Schedulers in order of preparation.
        parameters: Parameters that each model had when it was prepared, or when objects were last removed from the
            registry, by the model's ID.
        num_resets: Number of calls to `remove_objects`.
        num_absent_loaders: Number of loaders that were prepared in earlier epochs, and are no longer in `loaders`. They were
            released, or a resumed run does not prepare them again. Loaders that are prepared later are numbered as if
            these were still there.
        has_had_loader: Whether a loader has ever been prepared, even if it was removed since.
    """

    def __init__(self, reshard: Callable[[torch.nn.Module], None] | None = None) -> None:
        self._reshard = reshard
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[OptimizerEntry] = []
        self.loaders: list[PreparedLoader] = []
        self.schedulers: list[SchedulerEntry] = []
        self.parameters: dict[int, list[torch.nn.Parameter]] = {}
        self.num_resets = 0
        self.num_absent_loaders = 0
        self.has_had_loader = False

    def add_model(self, model: torch.nn.Module) -> None:
        """Add a model to the registry, whether it is trained or only evaluated."""
        self.models.append(model)
        self.parameters[id(model)] = list(model.parameters())

    def reshard_models(self) -> list[torch.nn.Module]:
        """Free the gathered parameters of all models, and return the models in order of preparation.

        Until its next forward, a model's names and parameters are then those of its shards, and can be read. Models
        that are not sharded do not change.
        """
        if self._reshard is not None:
            for model in self.models:
                self._reshard(model)
        return self.models

    def add_loader(self, loader: PreparedLoader) -> None:
        """Add a prepared loader to the registry."""
        self.loaders.append(loader)
        self.has_had_loader = True

    def release_loader(self, index: int) -> None:
        """Remove a loader that the script no longer uses. Later loaders are numbered as if it were still there."""
        del self.loaders[index]
        self.num_absent_loaders += 1

    # ---------------------------------------------------------------- parameters

    def list_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all models, each parameter once."""
        return list({id(p): p for parameters in self.parameters.values() for p in parameters}.values())

    def list_parameters_of(self, window: AccumulationWindow) -> Iterable[torch.nn.Parameter]:
        """Return the parameters that train in an accumulation window, each parameter once.

        They are the parameters of the window's models. A window without models, as of a backward outside `accumulate`,
        trains all models.
        """
        model_ids = [id(model) for model in window.models] or list(self.parameters)
        unique = {id(p): p for model_id in model_ids for p in self.parameters.get(model_id, ())}
        return unique.values()

    def list_ids(self) -> set[int]:
        """Return the `id()` of each parameter of all models."""
        return {id(p) for parameters in self.parameters.values() for p in parameters}

    def has_untrained_gradients(self) -> bool:
        """Whether a trainable parameter that no prepared optimizer holds has a gradient."""
        trained_ids = {id(p) for each in self.optimizers for p in iterate_parameters(each.optimizer)}
        return any(p.requires_grad and p.grad is not None and id(p) not in trained_ids for p in self.list_parameters())

    def iterate_named(self, attribute: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs of (name for messages, tensor) for the tensors of all models, after resharding the models.

        With several models, the name begins with the class and the number of the model, from 0.

        Args:
            attribute: Method of the models that lists the tensors: "named_parameters" or "named_buffers".
        """
        has_several_models = len(self.models) > 1
        for number, model in enumerate(self.reshard_models()):
            for name, tensor in getattr(model, attribute)():
                yield f"{type(model).__name__} {number}: {name}" if has_several_models else name, tensor

    # ---------------------------------------------------------------- the end

    def remove_objects(self, kept_ids: Container[int] = ()) -> None:
        """Remove objects from the registry. The parameters of models that stay are listed again.

        Args:
            kept_ids: IDs of objects that stay. By default, all objects are removed.
        """
        # The lists are changed in place, because other components hold them.
        all_lists: tuple[list[Any], ...] = (self.models, self.optimizers, self.loaders, self.schedulers)
        for objects in all_lists:
            objects[:] = [each for each in objects if id(each) in kept_ids]
        self.parameters.clear()
        self.parameters.update({id(model): list(model.parameters()) for model in self.reshard_models()})
        self.num_resets += 1
        self.num_absent_loaders = 0


def iterate_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Return an iterator over the parameters in all groups of a torch optimizer."""
    return (p for group in optimizer.param_groups for p in group["params"])


def find_parameter_reference(optimizer: torch.optim.Optimizer, keys: Collection[int]) -> str | None:
    """Return the place in which an optimizer keeps parameters, or their IDs, outside of its parameter lists and state.

    The result is a phrase for messages that names an attribute, or an option of a parameter group. It is None if there
    is no such place. An attribute that is the parameter list of a group itself does not count, because its contents are
    exchanged in place. LBFGS has such an attribute.

    Args:
        optimizer: Optimizer to search.
        keys: IDs of the parameters, or other integers that identify them.
    """
    lists = {id(group["params"]) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and id(value) not in lists and contains_any(value, keys):
            return f"its attribute {name!r}"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and contains_any(value, keys):
                return f"the option {name!r} of its parameter groups"
    return None


def contains_any(value: Any, keys: Collection[int], depth: int = 0) -> bool:
    """Whether a value is or contains one of certain tensors, or the ID of one.

    Args:
        value: Value to search, with nested dicts (keys and values), lists, tuples and sets. Other objects, such as
            optimizers, are not searched.
        keys: IDs of the tensors, or other integers that identify them.
        depth: Number of collections around the value. Collections at a depth of 5 are not searched. Default: 0.
    """
    if isinstance(value, torch.Tensor):
        return id(value) in keys
    if isinstance(value, int) and not isinstance(value, bool):
        return value in keys
    if depth > 4 or isinstance(value, torch.optim.Optimizer):
        return False
    if isinstance(value, dict):
        return any(
            contains_any(key, keys, depth + 1) or contains_any(item, keys, depth + 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple | set | frozenset):
        return any(contains_any(item, keys, depth + 1) for item in value)
    return False
