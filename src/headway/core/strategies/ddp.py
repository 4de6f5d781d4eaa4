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
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.common import scope, tracebacks
from headway.common.optional import LazyModule
from headway.common.text import join_names
from headway.core.config.torch_kwargs import DDPCommunicationHookType as Hook
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.memory import attempt
from headway.core.precision.mixed import Precision
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.transferable import is_transferable, make_transferable
from headway.core.runtime.group import CPU_BACKEND, find_backend
from headway.core.strategies._torch import broadcast_coalesced
from headway.core.strategies.base import Engine, Strategy, Transform
from headway.core.strategies.replica import average_gradients
from headway.core.weights.pieces import iterate_inner_tensors
from headway.errors import HeadwayError, StateError, UnsupportedError

_BUCKET_ORDER_KEY = "rebuilt_per_bucket_param_indices"
_MIN_RANKS = 3
"""Smallest number of ranks for which the order of the terms affects the rounding of a sum."""


def _read_logging_data(engine: DistributedDataParallel) -> dict[str, Any]:
    return engine._get_ddp_logging_data()  # type: ignore[no-untyped-call, no-any-return]


def _does_order_matter(engine: DistributedDataParallel) -> bool:
    """Whether DDP rebuilds its buckets in the order of the gradients, and this order affects the rounding of sums."""
    keeps_initial_buckets = engine.find_unused_parameters or engine.static_graph
    return not keeps_initial_buckets and engine.process_group.size() >= _MIN_RANKS


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


default_hooks = LazyModule("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
powerSGD_hook = LazyModule("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")  # noqa: N816  (torch's name)

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


def explain_error(error: BaseException) -> str:
    """Return advice to append to a DDP error message, or "" if there is none for this message."""
    if "Expected to mark a variable ready only once" not in str(error):
        return ""
    return (
        "headway: if the loop calls backward several times for one forward, all of these losses must reach the same parameters under "
        "ddp. Add the losses, and call accelerator.backward once"
    )


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
        options, device = self._options, next(iter(model.parameters())).device
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch's private list of names
        named = chain(model.named_parameters(), model.named_buffers())
        tensors = [each for name, each in named if name not in ignored]
        # torch's own broadcast cannot handle tensors that consist of other tensors, lazy conjugates, and dtypes such as int16
        # and float8 on gloo.
        needs_own_broadcast = any(
            inner is not each or not is_transferable(each)
            for inner, each in zip(iterate_inner_tensors(tensors), tensors)
        )
        if needs_own_broadcast:
            self.everyone.broadcast_into(list(iterate_inner_tensors(tensors)))
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
        _register_communication_hook(engine, options)
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
                better_error = _make_parameter_error(error, model, trained, self._options.find_unused_parameters)
                if better_error is None:
                    raise
                raise better_error from None

        return run_forward

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
        """Run backward, and record the models whose gradients DDP did not reduce during this backward."""
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
        """Step the optimizer. Raise an error if DDP has not reduced all gradients.

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
            raise StateError(_describe_frozen(type(optimizer).__name__, frozen_names))
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
            better_error = _make_parameter_error(error, module, trained, self._options.find_unused_parameters)
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


def _register_communication_hook(engine: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    if options.comm_hook is Hook.NO:
        # DDP's own reduction, unless an attempt at a batch size is in progress.
        if attempt.is_attempt_in_progress():
            engine.register_comm_hook(engine.process_group, attempt.delay_reductions(default_hooks.allreduce_hook))
        return
    check_communication_hook(options, next(iter(engine.module.parameters())).device, engine.process_group)
    hooks: dict[Hook, Callable[..., Any]] = {
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}
    hook, state = hooks[options.comm_hook], None
    if options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(engine.process_group, **options.comm_state_option)
    if options.comm_wrapper in wrappers:
        hook = wrappers[options.comm_wrapper](hook)
    engine.register_comm_hook(state, attempt.delay_reductions(hook))


def check_communication_hook(
    options: DistributedDataParallelKwargs, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raise an error if the backend for this device does not support the communication hook.

    Raises:
        UnsupportedError: If the bf16 hook is used with gloo.
    """
    is_bf16 = Hook.BF16 in (options.comm_hook, options.comm_wrapper)
    if is_bf16 and find_backend(device, group) == CPU_BACKEND:
        raise UnsupportedError("the bf16 communication hook needs NCCL; on gloo use comm_hook='fp16' or 'power_sgd'")


_UNUSED = (
    "Every rank must give every parameter a gradient: use them, freeze them with requires_grad_(False), or pass "
    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]. If another loss of the update uses them, add "
    "the losses and call backward() once"
)
_NOT_FOUND_IN_OUTPUT = (
    "find_unused_parameters=True does not help here, because the model's output depends on them, but this loss does not, such as a "
    "gradient penalty. Add all losses of the update, and call backward() once"
)


def _describe_frozen(owner: str, names: list[str]) -> str:
    return (
        f"{len(names)} parameters of {owner} ({join_names(names)}) were frozen after prepare(): DDP waits for "
        "their gradients, and did not reduce those of the others. Freeze before prepare(), or pass "
        "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
    )


def _make_parameter_error(
    error: RuntimeError, model: torch.nn.Module, trained: dict[str, torch.nn.Parameter], searches_unused: bool
) -> HeadwayError | None:
    """Return an error that names the parameters, to replace torch's error about an unfinished reduction.

    Return None if torch's error is about anything else, or if the parameters cannot be identified.

    Args:
        error: torch's error.
        model: User's model.
        trained: Parameters that DDP reduces, by name.
        searches_unused: Whether DDP searches each forward's output for parameters on which it does not depend.
    """
    text = str(error)
    if "finished reduction in the prior iteration" not in text:
        return None
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", text)
    all_names = list(trained)
    names = [all_names[int(index)] for index in found[1].split() if int(index) < len(all_names)] if found else []
    frozen = [name for name in names or all_names if not trained[name].requires_grad]
    if frozen:
        return StateError(_describe_frozen(type(model).__name__, frozen))
    if not names:
        return None
    return UnsupportedError(
        f"these parameters of {type(model).__name__} took no part in the last loss: {', '.join(names)}. "
        + (_NOT_FOUND_IN_OUTPUT if searches_unused else _UNUSED)
    )
