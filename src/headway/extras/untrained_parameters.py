"""Warn once about parameters that get gradients although no optimizer updates them.

Such parameters do not learn. An optimizer's `zero_grad()` does not clear their gradients, which therefore add up from
update to update and distort the norm of all gradients. The usual cause is an optimizer that was built before a layer
was added, or a selection of parameters that misses some.

The core looks for such parameters at the first step of each optimizer. The warning waits for the second update, because
the script might prepare another optimizer by then, or update the parameters without an optimizer.
"""

import gc

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training._torch import is_fake
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.prepared.registry import AcceleratorRegistry, find_replaced_ids
from headway.core.training.step import TrainingStep
from headway.log import get_logger

log = get_logger(__name__)

_NUM_SHOWN = 3


def watch_second_update(step: TrainingStep, accelerators: AcceleratorRegistry) -> None:
    """At the second update, warn about parameters that get gradients but do not change and are in no optimizer.

    Do nothing in a memory forecast, in which no weights change.

    Args:
        step: Training step that makes its first update. Its prepared optimizers do not hold all trainable parameters.
        accelerators: Registry of the Accelerators of this process.
    """
    if any(map(is_fake, step.prepared.list_parameters())):  # a forecast changes no weights
        return
    checksums = {key: _sum_values(parameter) for key, parameter in _find_untrained(step).items()}
    first_window = step.windows.current.number
    is_done = False

    def check_parameters() -> None:
        """Warn once, at the first update of a later window, about parameters whose values have not changed since then."""
        nonlocal is_done
        if is_done or step.windows.current.number == first_window:
            return
        is_done = True  # removing the check would disturb the loop over the hooks
        unchanged = {key for key, p in _find_untrained(step).items() if checksums.get(key) == _sum_values(p)}
        if not unchanged:
            return
        # An optimizer that was not prepared can hold them. The search for such optimizers is slow, so it comes last.
        untrained = unchanged - _list_optimized_ids(accelerators)
        names = [name for name, p in step.prepared.iterate_named("named_parameters") if id(p) in untrained]
        if names:
            num_hidden = len(names) - _NUM_SHOWN
            log.warning_once(
                "%d trainable parameters get gradients, but no optimizer updates them (%s%s). They do not change, and their "
                "gradients add up from update to update. Add them to an optimizer, or freeze them with requires_grad_(False) "
                "before prepare()",
                len(names),
                ", ".join(names[:_NUM_SHOWN]),
                f" and {num_hidden} more" if num_hidden > 0 else "",
                # Under pipeline parallelism, parameters of other stages are meta tensors without gradients.
                main_process_only=not any(p.is_meta for p in step.prepared.list_parameters()),
            )

    step.hooks.before_update.append(check_parameters)


def _find_untrained(step: TrainingStep) -> dict[int, torch.nn.Parameter]:
    """Return the trainable parameters that have a gradient but belong to no prepared optimizer, by `id`.

    Modules in evaluation mode are left out. For example, a frozen network that only computes a loss can get gradients
    that nothing needs.
    """
    prepared = step.prepared
    optimized_ids = {id(p) for each in prepared.optimizers for p in iterate_parameters(each.optimizer)}
    modules = (module for model in prepared.reshard_models() for module in model.modules() if module.training)
    return {
        id(p): p
        for module in modules
        for p in module.parameters(recurse=False)
        if p.requires_grad and p.grad is not None and id(p) not in optimized_ids
    }


def _sum_values(parameter: torch.Tensor) -> float:
    """Return the sum of this rank's values of a parameter.

    If the sum has changed between two calls, the script has updated the parameter without a prepared optimizer.
    """
    values = get_local_shard(parameter.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    dtype = torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
    return float(values.sum(dtype=dtype))


def _list_optimized_ids(accelerators: AcceleratorRegistry) -> set[int]:
    """Return the `id` of each parameter that any optimizer in this process holds.

    If `prepare` has replaced a parameter that an optimizer holds, the `id` of the new one is included, too.

    All Python objects are searched for optimizers. This is called at most once per Accelerator, before a warning.
    """
    optimizers = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.optim.Optimizer)]
    parameters = [p for optimizer in optimizers for p in iterate_parameters(optimizer)]
    replaced_ids = [find_replaced_ids(step, parameters) for step in accelerators.list_newest_first()]
    return {id(p) for p in parameters}.union(*replaced_ids)
