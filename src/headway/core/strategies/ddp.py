"""Data parallelism with torch's DistributedDataParallel: a full model replica on each rank, with averaged gradients.

`DDPStrategy` stores the DDP instances outside the user's module tree. Three things differ from bare DDP. First,
buffers are broadcast from rank 0 right after a backward that reduces gradients, instead of before the next forward.
So no forward contains a collective, and a model may be called on one rank alone. Second, the loss is multiplied by the
number of ranks, which turns DDP's average into a sum. Third, gradients are reduced no matter how the loss was computed.
DDP itself reduces only gradients that come from its own forward. A loss can also come from `model.forward(x)`, from a
submodule, or from a forward whose gradients DDP has already reduced. In these cases gradients are averaged after
backward has returned.

A resumed run restores the order of gradients in DDP's buckets. After the first backward, DDP rebuilds its buckets in
the order in which gradients arrived. The rounding of a sum over three or more ranks depends on a number's position in
its bucket. With DDP's initial buckets, a resumed run would therefore differ in the last bits of its results.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from headway.common import scope, tracebacks
from headway.core.config.torch_kwargs import DDPCommunicationHookType as Hook
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.precision.mixed import Precision
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.transferable import is_transferable, make_transferable
from headway.core.strategies._torch import broadcast_coalesced
from headway.core.strategies.base import Engine, Strategy, Transform
from headway.core.strategies.ddp_errors import describe_frozen, explain_error, make_parameter_error
from headway.core.strategies.ddp_hooks import register_communication_hook
from headway.core.strategies.output_tensors import list_hidden_tensors
from headway.core.strategies.replica import average_gradients
from headway.core.weights.pieces import iterate_inner_tensors
from headway.errors import StateError, UnsupportedError

_BUCKET_ORDER_KEY = "rebuilt_per_bucket_param_indices"
_MIN_RANKS = 3
"""Smallest number of ranks for which the order of the terms affects the rounding of a sum."""
# torch 2.13 renamed the option.
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_FORWARD_SYNC: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}
_SPARSE = (
    "{0} has sparse gradients, and its loss was not computed by calling {0} itself once: only DDP's own reduction knows sparse "
    "gradients. Compute one loss from model(inputs), or build the layer with sparse=False"
)
_BUFFER_BUCKET_BYTES = 250 * 1024 * 1024  # DDP's own bound for a broadcast of buffers


@dataclass
class Replica:
    """A model wrapped in DDP, with the state of its gradient reduction.

    Attributes:
        engine: DDP instance.
        has_learned_graph: Whether DDP with a static graph has started the micro-batch whose backward shows it the graph.
        trains_locally: Whether a block of `keep_local` is active for the model.
        is_reducer_waiting: Whether DDP's reducer waits for gradients of its own forward.
        is_forward_local: Whether the last forward ran under no_sync, and its backward has not run yet.
        must_average: Whether a backward has changed the gradients on this rank without a reduction.
    """

    engine: DistributedDataParallel
    has_learned_graph: bool = False
    trains_locally: bool = False
    is_reducer_waiting: bool = False
    is_forward_local: bool = False
    must_average: bool = False


@dataclass
class HiddenTensors:
    """Tensors inside objects in a model's output that are not containers, such as a `Distribution`.

    DDP's search for unused parameters looks into dataclasses, so it finds the tensors here. As in any dataclass, DDP does
    not replace these tensors.

    Attributes:
        tensors: The tensors.
    """

    tensors: list[torch.Tensor]


class ObjectSearchEngine:
    """Engine for `find_unused_parameters=True` that shows DDP all tensors of the model's output.

    DDP's search looks only into containers. When DDP calls the model, the model returns `expose_output(output)`: the output,
    paired with tensors inside other objects, such as a distribution. The engine removes this pair again.

    Args:
        run_forward: Function that calls the model's DDP instance.
    """

    def __init__(self, run_forward: Engine) -> None:
        self._run_forward = run_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward by DDP, and return the model's own output."""
        output = self._run_forward(*args, **kwargs)
        is_exposed = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], HiddenTensors)
        return output[0] if is_exposed else output

    @staticmethod
    def expose_output(output: Any) -> Any:
        """Return the model's output as DDP gets it: unchanged, or in a pair with the tensors that DDP does not find itself."""
        hidden = list_hidden_tensors(output)
        return (output, HiddenTensors(hidden)) if hidden else output


class DDPStrategy(Strategy):
    """Strategy with a full replica of the model on each rank. torch's DDP averages the gradients."""

    name = "ddp"

    def __init__(self, collectives: Collectives, options: DistributedDataParallelKwargs) -> None:
        super().__init__(collectives)
        self.gradient_divisor = collectives.world_size
        self._options = options
        self._replicas: dict[int, Replica] = {}
        self._reduced_names: dict[int, str] = {}  # names of the parameters that DDP reduces, by ID
        scope.get_or_create(tracebacks.ExceptionHook).add_note(explain_error)

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Apply the transforms, and wrap the model in DDP. All ranks get rank 0's values.

        A model without trainable parameters is neither wrapped nor synchronized, and None is returned.

        Raises:
            UnsupportedError: If the backend does not support the requested communication hook.
        """
        super().setup_model(model, transforms)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        engine = self._wrap_model(model)
        self._replicas[id(model)] = Replica(engine)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._reduced_names.update((id(p), name) for name, p in trained.items())
        if len(self._replicas) == 1:
            # Release DDP at the end: a prepared model may outlive its Accelerator and would keep the process group alive.
            process.release_at_end(self.release_model, ends_with_group=True)

        def run_forward(*args: object, **kwargs: object) -> Any:
            replica = self._replicas[id(model)]
            reduces_gradients = replica.engine.require_backward_grad_sync
            replica.is_forward_local = not reduces_gradients
            if reduces_gradients:
                replica.is_reducer_waiting = True
            try:
                return replica.engine(*args, **kwargs)
            except RuntimeError as error:
                better_error = make_parameter_error(error, model, trained, self._options.find_unused_parameters)
                if better_error is None:
                    raise
                raise better_error from None

        return ObjectSearchEngine(run_forward) if self._options.find_unused_parameters else run_forward

    def _wrap_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Create a model's DDP instance, which broadcasts rank 0's values, and register the communication hook.

        Raises:
            UnsupportedError: If the backend does not support the requested communication hook.
        """
        options, device = self._options, next(iter(model.parameters())).device
        needs_own_broadcast = self._broadcast_unusual_tensors(model)
        engine = DistributedDataParallel(
            model,
            init_sync=not needs_own_broadcast,
            device_ids=None if device.type == "cpu" else [device],
            dim=options.dim,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            process_group=self.everyone.group,
            **_NO_FORWARD_SYNC,
        )
        register_communication_hook(engine, options)
        return engine

    def _broadcast_unusual_tensors(self, model: torch.nn.Module) -> bool:
        """Broadcast rank 0's values if DDP's own broadcast does not support a tensor of the model.

        It does not support tensors that consist of other tensors, lazy conjugates, and dtypes such as int16 and float8
        on gloo.

        Returns:
            Whether all values were broadcast. If False, DDP broadcasts them.
        """
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch's private list of names
        named = chain(model.named_parameters(), model.named_buffers())
        tensors = [each for name, each in named if name not in ignored]
        # Without wrappers, both lists are equal. The first wrapper ends the comparison.
        inner_tensors = list(iterate_inner_tensors(tensors))
        is_unusual = any(inner is not each or not is_transferable(each) for inner, each in zip(inner_tensors, tensors))
        if is_unusual:
            self.everyone.broadcast_into(inner_tensors)
        return is_unusual

    def micro_batch_context(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[object]:
        """Return DDP's no_sync context if `sync` is False, else a context without effect.

        A model without DDP always gets a context without effect. With a static graph, so does the first micro-batch.
        """
        replica = self._replicas.get(id(model))
        if replica is None:
            return nullcontext()
        if sync:
            replica.is_forward_local = False
            return nullcontext()
        if self._options.static_graph and not replica.has_learned_graph:
            # DDP learns a static graph from the first backward, which must not be a local one.
            replica.has_learned_graph = True
            return nullcontext()
        return replica.engine.no_sync()

    def trains_locally(self) -> bool:
        """Whether a model is inside `keep_local`, so that the gradients of ranks may differ."""
        return any(each.trains_locally for each in self._replicas.values())

    @contextmanager
    def keep_local(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context in which DDP neither reduces gradients nor broadcasts buffers.

        Raises:
            UnsupportedError: If the graph is static, because DDP learns it from a backward with reductions.
        """
        if self._options.static_graph:
            raise UnsupportedError(
                "static_graph=True needs gradients that are reduced at each backward, which local SGD does not do; leave it out"
            )
        replica = self._replicas.get(id(model))
        if replica is None:  # the model has no trainable parameters, so DDP does not wrap it
            yield
            return
        replica.trains_locally = True
        try:
            with replica.engine.no_sync():
                yield
        finally:
            replica.trains_locally = False

    def get_peers(self) -> Collectives | None:
        """Return the collectives over all ranks, or None while ranks train separately.

        Ranks train separately in local SGD and in `no_sync`.
        """
        for each in self._replicas.values():
            if each.trains_locally or not each.engine.require_backward_grad_sync:
                return None
        return self.everyone

    def list_replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield pairs of (name, parameter) for all parameters that DDP keeps equal on all ranks."""
        for each in self._replicas.values():
            ignored = each.engine.parameters_to_ignore
            yield from ((name, p) for name, p in each.engine.module.named_parameters() if name not in ignored)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Enable gradient reduction in the next backward of these models, even if the forward ran in no_sync."""
        for model in models:
            replica = self._replicas.get(id(model))
            if replica is not None:
                replica.is_forward_local = False

    def must_join_backward(self) -> bool:
        """Whether the next backward reduces a model's gradients, so that other ranks wait for this rank's gradients."""
        return any(
            each.is_reducer_waiting or (each.engine.require_backward_grad_sync and not each.is_forward_local)
            for each in self._replicas.values()
        )

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward, and record the models whose gradients DDP did not reduce during this backward.

        Args:
            loss: Loss of the micro-batch.
            factor: Factor for the gradient.
            precision: Precision of the run, which scales the loss if it has a gradient scaler.
            **kwargs: Further arguments of `torch.autograd.backward`.

        Raises:
            LossError: If the loss is a constant while other ranks wait for this rank's gradients.
        """
        super().backward(loss, factor, precision, **kwargs)
        for each in self._replicas.values():
            if each.is_reducer_waiting:
                each.is_reducer_waiting = _find_unfinished_reduction(each.engine) is not None
            elif each.engine.require_backward_grad_sync and not each.is_forward_local:
                each.must_average = True
            each.is_forward_local = False

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Average the gradients that backward did not reduce, and broadcast rank 0's module buffers.

        Buffers are not broadcast if the options disable it, in evaluation mode, or inside `keep_local`.

        Raises:
            UnsupportedError: If a gradient that backward did not reduce is sparse.
        """
        for each in self._replicas.values():
            if each.must_average:
                self._average_gradients(each.engine)
                each.must_average = False
        if not self._options.broadcast_buffers:
            return
        for each in self._replicas.values():
            module = each.engine.module
            if not module.training or each.trains_locally or next(module.buffers(), None) is None:
                continue
            buffers = make_transferable(buffer for buffer in module.buffers() if buffer.numel())
            if buffers:
                # DDP's own coalesced broadcast: one message for all buffers.
                broadcast_coalesced(each.engine.process_group, buffers, _BUFFER_BUCKET_BYTES, 0)

    def _average_gradients(self, engine: DistributedDataParallel) -> None:
        """Average a model's gradients over all ranks.

        Gradients that were already reduced are equal on all ranks, so the average does not change them.

        Raises:
            UnsupportedError: If a gradient is sparse.
        """
        parameters = [p for p in engine.module.parameters() if id(p) in self._reduced_names and p.requires_grad]
        if all(p.grad is None for p in parameters):
            return  # the model took no part in the loss
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
            raise UnsupportedError(_SPARSE.format(type(engine.module).__name__))
        average_gradients(parameters, self.everyone)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer, after checking that DDP has reduced all gradients. Return False if fp16's scaler skipped the update.

        Args:
            optimizer: torch's own optimizer.
            precision: Precision of the run. Its gradient scaler can skip the step.
            closure: Closure as for a torch optimizer, or None.

        Raises:
            StateError: If parameters were unfrozen after prepare(), or frozen although DDP waits for their gradients.
            UnsupportedError: If parameters took no part in the loss although DDP waits for their gradients.
        """
        self._check_reductions()
        added, frozen_names = [], []
        for group in optimizer.param_groups:
            for p in group["params"]:
                is_reduced = id(p) in self._reduced_names
                if is_reduced and not p.requires_grad:
                    frozen_names.append(self._reduced_names[id(p)])
                if not is_reduced and p.requires_grad and p.grad is not None:
                    added.append(p)
        if frozen_names and not self._options.find_unused_parameters:
            raise StateError(describe_frozen(type(optimizer).__name__, frozen_names))
        if added:
            shapes = ", ".join(str(tuple(p.shape)) for p in added[:3])
            raise StateError(
                f"{len(added)} parameters of {type(optimizer).__name__} (shapes {shapes}) were added or unfrozen after "
                "prepare(): DDP does not reduce their gradients, so the replicas would become different. Add or unfreeze "
                "parameters before prepare(), or call free_memory() and prepare the model again, or use microbatching='auto', "
                "which reduces the gradients of all trainable parameters"
            )
        return super().step_optimizer(optimizer, precision, closure)

    def _check_reductions(self) -> None:
        """Raise an error that names the parameters if a reducer still waits for gradients after the last backward.

        Raises:
            StateError: If such parameters were frozen after prepare().
            UnsupportedError: If they took no part in the loss.
        """
        for replica in self._replicas.values():
            error = _find_unfinished_reduction(replica.engine) if replica.is_reducer_waiting else None
            if error is None:
                continue
            module = replica.engine.module
            trained = {name: p for name, p in module.named_parameters() if id(p) in self._reduced_names}
            better_error = make_parameter_error(error, module, trained, self._options.find_unused_parameters)
            if better_error is not None:
                raise better_error

    def get_reduction_order(self, model: torch.nn.Module) -> list[int]:
        """Return the indices of parameters in the order of DDP's buckets.

        The list is empty if the order is unknown or does not affect results. With PowerSGD it is always empty, because
        PowerSGD keeps state between reductions.
        """
        replica = self._replicas.get(id(model))
        uses_power_sgd = self._options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD)
        if replica is None or uses_power_sgd or not _does_order_matter(replica.engine):
            return []
        engine = replica.engine
        engine.reducer._rebuild_buckets()  # after the first backward, as the next forward would do
        if _BUCKET_ORDER_KEY not in _read_logging_data(engine) and engine.logger is not None:
            engine.logger.set_runtime_stats_and_log()
        return [
            int(number) for number in re.findall(r"\d+", str(_read_logging_data(engine).get(_BUCKET_ORDER_KEY, "")))
        ]

    def set_reduction_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Restore the order of DDP's buckets, by running zero gradients through the reducer in that order.

        Do nothing if the order is empty, does not fit the model's trainable parameters, or does not affect results.
        """
        replica = self._replicas.get(id(model))
        if not order or replica is None or not _does_order_matter(replica.engine):
            return
        trained = [parameter for parameter in replica.engine.module.parameters() if parameter.requires_grad]
        if sorted(order) != list(range(len(trained))):
            return
        grads = [parameter.grad for parameter in trained]
        with _remove_hooks(trained):
            replica.engine.reducer.prepare_for_backward([])
            for number in order:
                trained[number].grad = None
                trained[number].backward(torch.zeros_like(trained[number]))
        for parameter, grad in zip(trained, grads):
            parameter.grad = grad

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release the DDP instance of one model. If `model` is None, release those of all models."""
        super().release_model()
        if model is None:
            self._replicas.clear()
        else:
            self._replicas.pop(id(model), None)
        remaining = {id(parameter) for each in self._replicas.values() for parameter in each.engine.module.parameters()}
        self._reduced_names = {key: name for key, name in self._reduced_names.items() if key in remaining}


def _find_unfinished_reduction(engine: DistributedDataParallel) -> RuntimeError | None:
    """Return torch's error about gradients for which DDP's reducer still waits, or None if it waits for none.

    torch has no public query for this.
    """
    try:
        engine.reducer._check_reducer_finalized()
    except RuntimeError as error:
        return error
    return None


def _does_order_matter(engine: DistributedDataParallel) -> bool:
    """Whether DDP rebuilds its buckets in the order of the gradients, and this order affects the rounding of sums."""
    keeps_initial_buckets = engine.find_unused_parameters or engine.static_graph
    return not keeps_initial_buckets and engine.process_group.size() >= _MIN_RANKS


def _read_logging_data(engine: DistributedDataParallel) -> dict[str, Any]:
    return engine._get_ddp_logging_data()  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def _remove_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Return a context in which the gradient hooks that the script registered on the parameters are removed."""
    hook_dicts = []
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            if hooks:
                hook_dicts.append(hooks)
    copies = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy in zip(hook_dicts, copies):
            hooks.update(copy)
