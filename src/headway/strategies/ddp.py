"""Data parallelism by torch's DistributedDataParallel: a whole model on each process, gradients averaged.

DDP instances are held here, outside the user's module tree. Three things differ from bare DDP: buffers are copied from
rank 0 right after a reducing backward instead of before the next forward, so that no forward holds a collective
and a model may be called on one rank alone; the average over ranks is undone by the loss's factor; and gradients are
reduced however the loss was computed. DDP reduces, while backward runs, what its own forward has led to. Where the loss
came from `model.forward(x)`, from a submodule, or is another one over a forward that has been reduced, gradients are
averaged when backward has returned.

The order in which DDP's buckets hold gradients, which a resumed run takes up.

After the first backward DDP lays its buckets out anew, in the order in which gradients came. How a sum over three ranks or more is
rounded depends on where in a bucket a number lies, so a run that begins with DDP's first layout again differs in its last bits.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DistributedDataParallel

from headway.common.optional import Later
from headway.common.text import listed
from headway.config.engines import DDPCommunicationHookType as Hook
from headway.config.engines import DistributedDataParallelKwargs
from headway.errors import HeadwayError, StateError, UnsupportedError
from headway.memory import attempt
from headway.precision.mixed import Precision
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.group import CPU_ENGINE, engine_of
from headway.strategies.base import Engine, Strategy, Transform
from headway.strategies.replica import average_gradients
from headway.weights.pieces import inner_tensors

_KEY = "rebuilt_per_bucket_param_indices"
_FEWEST = 3
"""Ranks of a sum that its order decides about."""


def _told(engine: DistributedDataParallel) -> dict[str, Any]:
    return engine._get_ddp_logging_data()  # type: ignore[no-untyped-call, no-any-return]


def _is_rebuilt(engine: DistributedDataParallel) -> bool:
    is_fixed = engine.find_unused_parameters or engine.static_graph
    return not is_fixed and engine.process_group.size() >= _FEWEST


@contextmanager
def _without_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """A block in which no hook of a script's own sees gradients come."""
    held = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if hooks
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


default_hooks = Later("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
powerSGD_hook = Later("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")  # noqa: N816  (torch's name)

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
    """A model in DDP, and where its gradients are on their way.

    Attributes:
        engine: DDP.
        has_learned: a static graph has seen its first backward.
        is_apart: in a block of `keep_local`.
        is_armed: its reducer waits for gradients of its own forward.
        is_kept_local: its last forward was in no_sync, and has not been run backward.
        must_average: a backward has changed its gradients on this rank alone.
    """

    engine: DistributedDataParallel
    has_learned: bool = False
    is_apart: bool = False
    is_armed: bool = False
    is_kept_local: bool = False
    must_average: bool = False


class DDPStrategy(Strategy):
    """A replica per process."""

    name = "ddp"

    def __init__(self, collectives: Collectives, options: DistributedDataParallelKwargs) -> None:
        super().__init__(collectives)
        self.gradient_divisor = collectives.world_size
        self._options = options
        self._replicas: dict[int, Replica] = {}
        self._reduced: dict[int, str] = {}

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Wrap in DDP, which gives all ranks rank 0's values."""
        super().setup(model, transforms)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        chosen, device = self._options, next(iter(model.parameters())).device
        tensors = [*model.parameters(), *model.buffers()]
        is_wrapped = any(inner is not each for inner, each in zip(inner_tensors(tensors), tensors))
        if is_wrapped:  # torch's own exchange cannot read them
            self.everyone.broadcast_into(list(inner_tensors(tensors)))
        engine = DistributedDataParallel(
            model,
            init_sync=not is_wrapped,
            device_ids=None if device.type == "cpu" else [device],
            dim=chosen.dim,
            bucket_cap_mb=chosen.bucket_cap_mb,
            find_unused_parameters=chosen.find_unused_parameters,
            gradient_as_bucket_view=chosen.gradient_as_bucket_view,
            static_graph=chosen.static_graph,
            process_group=self.everyone.group,
            **_NO_FORWARD_SYNC,
        )
        _register_hook(engine, chosen)
        self._replicas[id(model)] = Replica(engine)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._reduced.update((id(p), name) for name, p in trained.items())
        if len(self._replicas) == 1:
            # A prepared model may outlive its Accelerator, and would keep the engine and so the group beyond its end.
            process.at_end(self.release, is_engine=True)

        def run(*args: object, **kwargs: object) -> Any:
            replica = self._replicas[id(model)]
            travels = replica.engine.require_backward_grad_sync
            replica.is_armed, replica.is_kept_local = replica.is_armed or travels, not travels
            try:
                return replica.engine(*args, **kwargs)
            except RuntimeError as error:
                named = _named(error, model, trained)
                if named is None:
                    raise
                raise named from None

        return run

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[object]:
        """DDP's no_sync where gradients stay local."""
        replica = self._replicas.get(id(model))
        if replica is None:
            return nullcontext()
        if sync:
            replica.is_kept_local = False
            return nullcontext()
        if self._options.static_graph and not replica.has_learned:
            # DDP learns a static graph from the first backward, which must not be a local one.
            replica.has_learned = True
            return nullcontext()
        return replica.engine.no_sync()

    @contextmanager
    def keep_local(self, model: torch.nn.Module) -> Iterator[None]:
        """DDP's no_sync for the whole block; reducers are not armed and buffers stay.

        Raises:
            UnsupportedError: a static graph, which DDP learns from a backward that travels.
        """
        if self._options.static_graph:
            raise UnsupportedError(
                "static_graph=True needs gradients that are reduced at each backward, which local SGD does not do; leave it out"
            )
        replica = self._replicas.get(id(model))
        if replica is None:  # nothing of it learns
            yield
            return
        replica.is_apart = True
        try:
            with replica.engine.no_sync():
                yield
        finally:
            replica.is_apart = False

    def peers(self) -> Collectives | None:
        """All ranks, except in local SGD and in `no_sync`."""
        replicas = self._replicas.values()
        is_apart = any(each.is_apart or not each.engine.require_backward_grad_sync for each in replicas)
        return None if is_apart else self.everyone

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All that DDP made alike."""
        for each in self._replicas.values():
            ignored = each.engine.parameters_to_ignore
            yield from ((name, p) for name, p in each.engine.module.named_parameters() if name not in ignored)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Its gradients travel, also where the forward was in no_sync."""
        for replica in filter(None, (self._replicas.get(id(model)) for model in models)):
            replica.is_kept_local = False

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward; note whose gradients have not travelled in it."""
        super().backward(loss, factor, precision, **kwargs)
        for each in self._replicas.values():
            if each.is_armed:
                each.is_armed = _unfinished(each.engine) is not None
            elif each.engine.require_backward_grad_sync and not each.is_kept_local:
                each.must_average = True
            each.is_kept_local = False

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Average gradients that backward left on this rank, and give all ranks rank 0's buffers (e.g. running statistics)."""
        for each in self._replicas.values():
            if each.must_average:
                self._average(each.engine)
                each.must_average = False
        if not self._options.broadcast_buffers:
            return
        for each in self._replicas.values():
            module = each.engine.module
            buffers = [buffer for buffer in module.buffers() if buffer.numel()]
            if buffers and module.training and not each.is_apart:
                # The engine's own coalesced broadcast: one message for all buffers.
                _broadcast_coalesced(each.engine.process_group, buffers, _BUFFER_BUCKET_BYTES, 0)

    def _average(self, engine: DistributedDataParallel) -> None:
        """What has travelled already is the same on all ranks, and an average leaves it as it is."""
        parameters = [p for p in engine.module.parameters() if id(p) in self._reduced and p.requires_grad]
        if all(p.grad is None for p in parameters):
            return  # it took no part in the loss
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
            raise UnsupportedError(_SPARSE.format(type(engine.module).__name__))
        average_gradients(parameters, self.everyone)

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step, but never on gradients that only this process has.

        Raises:
            StateError: parameters were unfrozen after prepare(), or frozen where DDP waits for their gradients.
            UnsupportedError: some took no part in the loss, and DDP waits for their gradients.
        """
        for engine in [each.engine for each in self._replicas.values() if each.is_armed]:
            error, module = _unfinished(engine), engine.module
            named = error and _named(
                error, module, {n: p for n, p in module.named_parameters() if id(p) in self._reduced}
            )
            if named:
                raise named
        reduced, unknown, frozen = self._reduced, [], []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    if id(p) in reduced:
                        frozen.append(reduced[id(p)])
                elif p.grad is not None and id(p) not in reduced:
                    unknown.append(p)
        if frozen and not self._options.find_unused_parameters:
            raise StateError(_frozen(type(optimizer).__name__, frozen))
        if unknown:
            shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
            raise StateError(
                f"{len(unknown)} parameters of {type(optimizer).__name__} (shapes {shapes}) were unfrozen after prepare(): DDP "
                "does not reduce their gradients, and processes would drift apart. Unfreeze before prepare(), call free_memory() and "
                "prepare again, or use microbatching='auto', which reduces what learns"
            )
        return super().step(optimizer, precision, closure)

    def exchange_order(self, model: torch.nn.Module) -> list[int]:
        """The numbers of the parameters as they lie in the engine's buckets; none where that is not known, or all the same.

        PowerSGD, which keeps a state from exchange to exchange, goes by none.
        """
        replica = self._replicas.get(id(model))
        is_kept = self._options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD)
        if replica is None or is_kept or not _is_rebuilt(replica.engine):
            return []
        engine = replica.engine
        engine.reducer._rebuild_buckets()  # after the first backward: what the next forward would do
        if _KEY not in _told(engine) and engine.logger is not None:
            engine.logger.set_runtime_stats_and_log()
        return [int(number) for number in re.findall(r"\d+", str(_told(engine).get(_KEY, "")))]

    def keep_exchange_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Let the buckets begin with it, by gradients of zero that come in that order."""
        replica = self._replicas.get(id(model))
        if not order or replica is None or not _is_rebuilt(replica.engine):
            return
        trained = [parameter for parameter in replica.engine.module.parameters() if parameter.requires_grad]
        if sorted(order) != list(range(len(trained))):
            return
        grads = [parameter.grad for parameter in trained]
        with _without_hooks(trained):
            replica.engine.reducer.prepare_for_backward([])
            for number in order:
                trained[number].grad = None
                trained[number].backward(torch.zeros_like(trained[number]))
        for parameter, grad in zip(trained, grads):
            parameter.grad = grad

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model's engine, or all."""
        super().release()
        self._replicas = {} if model is None else {k: each for k, each in self._replicas.items() if k != id(model)}
        kept = {id(parameter) for each in self._replicas.values() for parameter in each.engine.module.parameters()}
        self._reduced = {key: name for key, name in self._reduced.items() if key in kept}


def _unfinished(engine: DistributedDataParallel) -> RuntimeError | None:
    """torch's error about gradients that the reducer still waits for; None: it waits for none. It has no other way to ask."""
    try:
        engine.reducer._check_reducer_finalized()
    except RuntimeError as error:
        return error
    return None


def _register_hook(engine: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    if options.comm_hook is Hook.NO:
        # DDP's own reduction, unless an attempt at a batch size is in progress.
        if attempt.is_in_progress():
            engine.register_comm_hook(engine.process_group, attempt.hold_back(default_hooks.allreduce_hook))
        return
    check_hook(options, next(iter(engine.module.parameters())).device, engine.process_group)
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
    engine.register_comm_hook(state, attempt.hold_back(hook))


def check_hook(options: DistributedDataParallelKwargs, device: torch.device, group: dist.ProcessGroup) -> None:
    """Can the engine that carries gradients from this device do what was asked?

    Raises:
        UnsupportedError: bf16 over gloo.
    """
    is_bf16 = Hook.BF16 in (options.comm_hook, options.comm_wrapper)
    if is_bf16 and engine_of(device, group) == CPU_ENGINE:
        raise UnsupportedError("the bf16 communication hook needs NCCL; on gloo use comm_hook='fp16' or 'power_sgd'")


def _frozen(owner: str, names: list[str]) -> str:
    return (
        f"{len(names)} parameters of {owner} ({listed(names)}) were frozen after prepare(): DDP waits for "
        "their gradients, and did not reduce those of the others. Freeze before prepare(), or pass "
        "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
    )


def _named(error: RuntimeError, model: torch.nn.Module, trained: dict[str, torch.nn.Parameter]) -> HeadwayError | None:
    """torch's error about an unfinished reduction with names for its parameter indices; None for any other.

    Args:
        error: torch's.
        model: the user's.
        trained: what DDP was made to reduce.
    """
    text = str(error)
    if "finished reduction in the prior iteration" not in text:
        return None
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", text)
    all_names = list(trained)
    names = [all_names[int(index)] for index in found[1].split() if int(index) < len(all_names)] if found else []
    frozen = [name for name in names or all_names if not trained[name].requires_grad]
    if frozen:
        return StateError(_frozen(type(model).__name__, frozen))
    if not names:
        return None
    return UnsupportedError(
        f"these parameters of {type(model).__name__} took no part in the last loss: {', '.join(names)}. Every rank must "
        "give every parameter a gradient: use them, freeze them with requires_grad_(False), or pass "
        "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
    )
