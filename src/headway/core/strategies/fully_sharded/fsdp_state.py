"""Access to the private state of torch's fully_shard, which only this file and `fsdp_collectives.py` read.

After a backward without reduction, a gradient is unsharded and stored in FSDP's own records, and `parameter.grad` is
None. Autograd sees the unsharded parameters, not the shards that the module tree shows otherwise. This file gives
access to both.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from headway.common.optional import LazyModule
from headway.core.config.parallelism import ShardingOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies._torch import list_param_groups
from headway.core.strategies.output_tensors import list_hidden_tensors, list_output_tensors
from headway.errors import PrepareError, UnsupportedError

fsdp = LazyModule("torch.distributed.fsdp")


def iterate_sharded_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield all modules of a model, including the model itself, on which `fully_shard` was called."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            yield module


def iterate_groups(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of (module, parameter group) for FSDP's parameter groups, each group once.

    The parameters of a group are gathered by one collective.
    """
    seen: set[int] = set()
    for module in iterate_sharded_modules(model):
        for group in _list_module_groups(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield module, group


def list_groups(model: torch.nn.Module) -> list[Any]:
    """Return all of FSDP's parameter groups in a model."""
    return [group for _, group in iterate_groups(model)]


def _list_module_groups(module: torch.nn.Module) -> list[Any]:
    """Return FSDP's parameter groups of one module on which `fully_shard` was called."""
    return list_param_groups(module._get_fsdp_state())  # type: ignore[operator]


def prepare_to_gather(model: torch.nn.Module) -> None:
    """Make FSDP find its root module and create its streams, as the first forward does.

    This is required before parameters can be gathered. Do nothing if the model is not sharded.
    """
    if isinstance(model, fsdp.FSDPModule):
        model._get_fsdp_state()._lazy_init()


def iterate_records(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP's record (`FSDPParam`) of each sharded parameter."""
    for group in list_groups(model):
        yield from group.fsdp_params


def get_gathered_parameter(record: Any) -> torch.Tensor | None:
    """Return the unsharded parameter that autograd sees, or None before the first all-gather.

    Args:
        record: FSDP2's `FSDPParam` object.
    """
    return getattr(record, "_unsharded_param", None)


def reduce_unused_parameters(model: torch.nn.Module) -> None:
    """Make ranks reduce zeros for parameters that their loss did not use, so that all messages have equal sizes.

    Do nothing in older versions of torch, which have no option for this.
    """
    for module in iterate_sharded_modules(model):
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]


def set_missing_gradient_dtypes(groups: Iterable[Any]) -> list[Any]:
    """Set the gradient dtypes of parameter groups in which all parameters were frozen before.

    FSDP sets the dtypes at the first forward, from the parameters that are trainable then. A group with only frozen
    parameters gets none. If its parameters were unfrozen later, their gradients would be reduced and assigned in the
    compute dtype.

    Args:
        groups: All groups, or those that had no gradient dtypes at the last call.

    Returns:
        Groups that still have no gradient dtypes.
    """
    without_dtypes = []
    for group in groups:
        if not hasattr(group, "_orig_dtype"):  # the module's first forward, which sets the dtypes, has not run yet
            without_dtypes.append(group)
            continue
        if group._orig_dtype is None and any(record.sharded_param.requires_grad for record in group.fsdp_params):
            group._init_mp_dtypes()
        if group._orig_dtype is None:
            without_dtypes.append(group)
    return without_dtypes


def reshard_units(model: torch.nn.Module) -> None:
    """Free all gathered parameters, so that the module tree shows shards again."""
    for module in iterate_sharded_modules(model):
        module.reshard()  # type: ignore[operator]


def set_prefetching(units: list[Any], options: ShardingOptions) -> None:
    """Set how many units FSDP gathers in advance in forward and backward, as the options request.

    Args:
        units: FSDP units in the order of the module tree.
        options: Options of sharding, with the numbers of units.
    """
    for index, unit in enumerate(units):
        if options.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.forward_prefetch])
        if options.backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[max(0, index - options.backward_prefetch) : index][::-1])


@contextmanager
def defer_reduction(model: Any) -> Iterator[None]:
    """Return a context in which a backward leaves gradients unsharded and unreduced."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def list_generation_methods(model: Any) -> list[str]:
    """Return ["generate"] if the model's `generate` may use parameters of the root's unit outside of its forward, else [].

    FSDP gathers these parameters only in the root's forward. Decoder-only models of transformers generate with their
    forward. Encoder-decoder models call their encoder first, whose embedding is often shared with the decoder. Other
    models, such as PeftModels, call `generate` of a model in them, and so never the root's forward.
    """
    if not callable(getattr(model, "generate", None)):
        return []
    generation = sys.modules.get("transformers.generation")
    is_transformers_model = generation is not None and isinstance(model, generation.GenerationMixin)
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", None) is True
    return [] if is_transformers_model and not is_encoder_decoder else ["generate"]


def add_forward_methods(model: Any, names: Iterable[str], other_models: Iterable[torch.nn.Module] = ()) -> None:
    """Make the named methods gather parameters, as forward does.

    Args:
        model: Sharded model.
        names: Names of the methods.
        other_models: Other models of the Accelerator, which may have methods that `model` lacks.

    Raises:
        PrepareError: If no model has such a method.
    """
    other_models = tuple(other_models)
    for name in names:
        if callable(getattr(model, name, None)):
            fsdp.register_fsdp_forward_method(model, name)
        elif not any(callable(getattr(other, name, None)) for other in other_models):
            raise PrepareError(
                f"ShardingOptions(forward_methods=...) names {name!r}, but {type(model).__name__} has no such method. If another "
                "model has it, pass both models to one prepare() call"
            )


def defer_gradients(model: Any, is_deferred: bool = True) -> None:
    """Make the backwards of a pipeline stage leave parameters gathered and gradients unsharded.

    Pipeline stages alternate between micro-batches, so parameters are needed again soon.

    Args:
        model: Sharded model.
        is_deferred: Whether to leave parameters gathered and gradients unsharded. False: restore FSDP's normal behavior.
            Default: True.
    """
    model.set_requires_gradient_sync(not is_deferred)
    model.set_reshard_after_backward(not is_deferred)
    model.set_is_last_backward(not is_deferred)


def reduce_accumulated_gradients(model: torch.nn.Module, everyone: Collectives) -> None:
    """Reduce the gradients that an accumulation window has left unsharded.

    A parameter that no rank has used gets no gradient.

    Args:
        model: Sharded model on which `defer_gradients` was called.
        everyone: Collectives over all ranks that hold the model.
    """
    trainable = [record for record in iterate_records(model) if record.sharded_param.requires_grad]
    for group in list_groups(model):
        group.post_backward()  # adds gradients that zero-bubble schedules left out of the sums
    flags = torch.tensor([float(bool(list_unreduced_gradients([record]))) for record in trainable])
    everyone.sum_in_place([flags])
    for record, count in zip(trainable, flags.tolist()):
        # All ranks must reduce the same parameters, so a rank that has not used one contributes zeros.
        if count and not list_unreduced_gradients([record]):
            gathered: Any = get_gathered_parameter(record)
            gathered.grad = torch.zeros_like(gathered)
            record.to_accumulated_grad_if_needed()
    defer_gradients(model, False)
    _reduce_gradients(model)
    defer_gradients(model)


def list_unreduced_gradients(records: Iterable[Any]) -> list[torch.Tensor]:
    """Return the unsharded gradients that FSDP has not reduced yet.

    Args:
        records: FSDP2's `FSDPParam` objects.
    """
    unreduced = []
    for record in records:
        for grad in (record.unsharded_accumulated_grad, getattr(get_gathered_parameter(record), "grad", None)):
            if grad is not None:
                unreduced.append(grad)
    return unreduced


def _reduce_gradients(model: torch.nn.Module) -> None:
    """Run FSDP's own steps after a backward for all groups of parameters, which reduce the gradients."""
    for group in list_groups(model):
        group.post_backward()
    for unit in list(iterate_sharded_modules(model))[:1]:  # the root's callback covers all units
        unit._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def watch_outputs(model: torch.nn.Module) -> None:
    """Make FSDP's backward hooks run for all outputs of its units, also for those that torch does not support.

    These are output tensors in objects that are no containers, such as distributions, and views that are changed in place
    after the forward. Without the hooks, FSDP would neither gather parameters for backward nor reduce their gradients.
    """
    # torch warns of each view that a unit returns, whether or not it is changed. With the hooks of `_ViewHooks`, a change
    # does no harm.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for module in iterate_sharded_modules(model):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        state._register_pre_backward_hook = partial(_register_hooks, state)


def _register_hooks(state: Any, output: Any) -> Any:
    """Put FSDP's backward hooks on all tensors of an output that require grad, and return the output.

    Args:
        state: FSDP's state of the module that has returned the output.
        output: Output of the module's forward.
    """
    register = type(state)._register_pre_backward_hook
    if torch.is_grad_enabled():
        hidden = list_hidden_tensors(output)
        if hidden:
            register(state, hidden)
        for view in list_output_tensors(output):
            if view.requires_grad and view._base is not None:
                _ViewHooks(state, view)
    return register(state, output)


class _ViewHooks:
    """Hooks that run FSDP's pre-backward for an output that is a view, also if the view is changed in place.

    An in-place operation, as in `logits /= temperature`, gives a view a new node in the graph. The hook that FSDP puts on
    the view belongs to the old node, which is no longer part of the graph. The nodes that computed the view's base remain.

    Args:
        state: FSDP's state of the module that has returned the view.
        view: Output tensor that is a view and requires grad.
    """

    def __init__(self, state: Any, view: torch.Tensor) -> None:
        self._state = state
        self._has_run = False
        view.register_hook(self._note_run)  # type: ignore[no-untyped-call]
        if view._base is not None and view._base.requires_grad:
            view._base.register_hook(self._run_pre_backward)  # type: ignore[no-untyped-call]

    def _note_run(self, grad: torch.Tensor) -> None:
        """Record that FSDP's own hook, which is on the same node, runs in this backward."""
        self._has_run = True

    def _run_pre_backward(self, grad: torch.Tensor) -> None:
        """Run FSDP's pre-backward unless its own hook has run. A backward reaches the base after the view.

        The base can be the unit's input. A second run would then gather the unit again after its backward.
        """
        if not self._has_run:
            self._state._pre_backward(grad)
        self._has_run = False


def run_post_forward(model: torch.nn.Module, output: Any) -> Any:
    """Run the post-forward hooks of FSDP's root after a forward that was ended early, and return the output."""
    return model._get_fsdp_state()._post_forward(model, (), output)  # type: ignore[operator]


def find_autograd_parameters(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gathered parameters that autograd uses in place of the given shards.

    A parameter that has not been gathered yet, or that is no shard of the model, is returned unchanged.
    """
    gathered_by_shard = {id(record.sharded_param): get_gathered_parameter(record) for record in iterate_records(model)}
    result = []
    for parameter in parameters:
        gathered = gathered_by_shard.get(id(parameter))
        result.append(parameter if gathered is None else gathered)
    return result


@contextmanager
def keep_gathered(model: torch.nn.Module) -> Iterator[None]:
    """Return a context for a backward in which all units stay gathered. Gradients are reduced when the context ends.

    Gradients stay unreduced if they would also be unreduced without this context.
    """
    units: list[Any] = list(iterate_sharded_modules(model))
    reductions = [(group, group.reduce_grads, group.all_reduce_grads) for group in list_groups(model)]
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
        for group, reduce_grads, all_reduce_grads in reductions:
            group.reduce_grads, group.all_reduce_grads = reduce_grads, all_reduce_grads
        _reduce_gradients(model)
    finally:
        for group, reduce_grads, all_reduce_grads in reductions:
            group.reduce_grads, group.all_reduce_grads = reduce_grads, all_reduce_grads
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


class UnreducedGradients(NamedTuple):
    """Unreduced gradients of one parameter.

    Attributes:
        record: FSDP2's `FSDPParam` object of the parameter.
        accumulated: Sum of the gradients of earlier backwards, in the reduction dtype; None if there is none.
        grad: Gradient of the unsharded parameter as autograd left it; None if there is none.
    """

    record: Any
    accumulated: torch.Tensor | None
    grad: torch.Tensor | None


def remove_unreduced_gradients(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[UnreducedGradients]:
    """Remove and return the unreduced gradients of those given parameters that belong to this model."""
    parameter_ids = set(map(id, parameters))
    removed = []
    for record in iterate_records(model):
        if id(record.sharded_param) in parameter_ids:
            gathered = get_gathered_parameter(record)
            grad = None if gathered is None else gathered.grad
            removed.append(UnreducedGradients(record, record.unsharded_accumulated_grad, grad))
    restore_unreduced_gradients(UnreducedGradients(each.record, None, None) for each in removed)
    return removed


def restore_unreduced_gradients(removed: Iterable[UnreducedGradients]) -> None:
    """Restore the unreduced gradients that `remove_unreduced_gradients` returned. Gradients computed since are replaced."""
    for record, accumulated, grad in removed:
        record.unsharded_accumulated_grad = accumulated
        gathered = get_gathered_parameter(record)
        if gathered is not None:
            gathered.grad = grad


def discard_gradients(model: torch.nn.Module) -> None:
    """Discard unreduced gradients, and the gathered parameters and pending collectives of an interrupted pass.

    Raises:
        UnsupportedError: If this version of torch cannot free the gathered parameters of an interrupted pass.
    """
    if isinstance(model, fsdp.FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            raise UnsupportedError(
                f"continuing after a failed window with a sharded model needs torch 2.13, but this is torch {torch.__version__}: the "
                "parameters that the interrupted forward gathered cannot be freed; end the run, and resume from a checkpoint"
            )
        if model._get_fsdp_state()._is_root is not None:  # before its first forward, nothing is in flight
            model.reset_iter_state()
    for record in iterate_records(model):
        record.unsharded_accumulated_grad = None
        gathered = get_gathered_parameter(record)
        if gathered is not None:
            gathered.grad = None
