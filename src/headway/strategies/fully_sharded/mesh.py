"""Sharded layouts on torch's own engines: a device mesh with named axes, along which parameters are sharded (DTensors).

FSDP2 (`fully_shard`) cuts each parameter along its first dimension over the axis "shard", gathers a unit's parameters before its
forward and its backward, and sums gradients into parts again; HSDP adds the axis "replicate". What follows from parts: optimizers
go by `current`, norms need an exchange (`gradients.py`), and a model runs on all ranks of its mesh or on none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from headway.common import scope, traces
from headway.common.optional import Later
from headway.common.units import format_bytes
from headway.config.float8 import Float8Options
from headway.config.layout.context import TorchContextParallelConfig
from headway.config.layout.mesh import DATA_AXES, Layout, written
from headway.config.layout.sharding import ShardingOptions
from headway.config.layout.tensor import TensorParallelOptions
from headway.data.sampling.shard import ShardIndex
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.precision.base import Precision
from headway.runtime import process
from headway.runtime.collective_log import Step
from headway.runtime.collectives.checked import Collectives
from headway.strategies.axes import build_mesh, left
from headway.strategies.base import Capabilities, Engine, Transform
from headway.strategies.context import check as context_check
from headway.strategies.context.context_parallel import ContextParallel
from headway.strategies.fully_sharded import comm_hooks as doors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.fully_sharded import gradients, values
from headway.strategies.fully_sharded.float8 import check_float8, compute_scales, scale_before_forward, wrap_weights
from headway.strategies.fully_sharded.formats import check_formats, choose_formats, norms_within
from headway.strategies.fully_sharded.lost_writes import LostWrites, check_hooks
from headway.strategies.fully_sharded.optimizers import check_optimizer
from headway.strategies.fully_sharded.replaced import ReplacedParameters
from headway.strategies.fully_sharded.scalars import WholeScalars
from headway.strategies.fully_sharded.second_order import SecondOrder
from headway.strategies.fully_sharded.sharded_models import ShardedModels
from headway.strategies.fully_sharded.units import ShardingUnits, check_whole, find_units
from headway.strategies.fully_sharded.usage import ParameterUsage
from headway.strategies.single import SingleStrategy
from headway.strategies.tensor.tensor_parallel import TensorParallel

fsdp = Later("torch.distributed.fsdp")

log = get_logger(__name__)


class MeshStrategy(SingleStrategy):
    """Parameters in parts along the axes of a mesh.

    Args:
        collectives: all ranks.
        layout: how many ranks each axis takes.
        options: of sharding.
        number_format: the run's mixed_precision: "no", "bf16", "fp16" or "fp8".
        tensor: options of tensor parallelism; None: models' own plans.
        context: options of context parallelism.
        float8: options of "fp8".
        computes_on: the type of device whose number formats are chosen; None: this process's own.

    Attributes:
        mesh: torch's device mesh, its axes named as in the layout.
    """

    name = "fsdp"
    capabilities = Capabilities(lone_forward=False, whole_gradients=False, copies=False, lone_pieces=False)

    def __init__(
        self,
        collectives: Collectives,
        layout: Layout,
        options: ShardingOptions,
        number_format: str = "no",
        tensor: TensorParallelOptions | None = None,
        context: TorchContextParallelConfig | None = None,
        float8: Float8Options | None = None,
        computes_on: str | None = None,
    ) -> None:
        super().__init__(collectives)
        options.check(layout.num_shards)
        check_float8(number_format, float8, options, layout.tp, layout.cp)
        self.layout = layout
        self.name = written(dict.fromkeys(layout.sizes)) if layout.sizes else self.name
        self._options = options
        self._number_format = number_format
        self._tensor = tensor or TensorParallelOptions()
        context_check.check_options(self._tensor, layout.cp)
        self._context = context or TorchContextParallelConfig()
        self._float8 = float8
        self._computes_on = computes_on or collectives.runtime.device.type
        self._cuts: list[tuple[torch.nn.Module, TensorParallel]] = []
        self._contexts: list[tuple[torch.nn.Module, ContextParallel]] = []
        self.mesh, self._shards = build_mesh(collectives.runtime.device.type, layout)
        if layout.num_data_shards < layout.num_ranks:
            self.data_group = collectives.split(layout.data_groups)
        self.data_shard = ShardIndex(self._data_index(), layout.num_data_shards)
        # Along cp each rank has the gradient of its part of the same loss: a term, as of another shard of the data.
        self.gradient_divisor = layout.num_data_shards * layout.cp
        self._models: list[torch.nn.Module] = []
        self._replaced = ReplacedParameters(self._models)
        self._doors = doors.CommHooks(collectives)
        self._usage: dict[int, ParameterUsage] = {}
        self._seconds: dict[int, SecondOrder] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._num_steps = 0
        self._lost: dict[int, LostWrites] = {}
        self._has_left = False
        collectives.runtime.scope.own(WholeScalars).enter(collectives.runtime)
        process.at_end(self._leave, is_engine=True)
        scope.own(traces.Hook).add(gradients.explain_mixed)

    def _leave(self) -> None:
        """The process group ends, and the mesh with it."""
        self.release()
        self._has_left = True

    def _data_index(self) -> int:
        index = 0
        for axis in DATA_AXES:
            if axis in self.mesh.mesh_dim_names:
                index = index * self.mesh[axis].size() + self.mesh.get_local_rank(axis)
        return index

    # ---------------------------------------------------------------- setting up

    def materialise(self, model: torch.nn.Module) -> None:
        """See that `setup`, which does it unit by unit, can: each module without memory must know its values.

        Raises:
            PrepareError: one does not.
        """
        values.check_initialisers(model)

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """Not yet: `setup` brings one unit after the other to the device, and keeps a part of each."""

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Give all ranks rank 0's values, apply the transforms, shard; names of parameters stay what they were.

        Raises:
            PrepareError: what cannot be sharded, by name.
            StateError: the process group of the mesh has ended.
        """
        if self._has_left:
            raise StateError(left(self.layout))
        context = self._cut_sequences(model) if self.layout.cp > 1 else None
        try:
            self._shard_once(model, transforms)
        except BaseException:
            if context is not None:
                context.release()
                self._contexts.pop()
            raise
        self._models.append(model)
        self._replaced.look_again()
        self._doors.open(model)
        self._usage[id(model)] = ParameterUsage(model, self.everyone, self._options.find_unused_parameters)
        self._seconds[id(model)] = SecondOrder(model)
        self._dtypes.update(
            (id(record.sharded_param), record.sharded_param.dtype) for record in gathered.records(model)
        )
        return context

    def _shard_once(self, model: torch.nn.Module, transforms: Iterable[Transform]) -> None:
        known = self.everyone.runtime.scope.own(ShardedModels)
        how = (self.layout, self._options, self._number_format, self._tensor)
        if known.is_sharded(model, how):
            self._cut_again(known.cut_of(model), model)
        else:
            check_hooks(model)
            name, before = type(model).__name__, list(model.named_parameters(remove_duplicate=False))
            self._set_up(model, transforms)
            known.note(model, how, next((cut for one, cut in self._cuts if one is model), None))
            after = dict(model.named_parameters(remove_duplicate=False))
            replaced = [(key, parameter) for key, parameter in before if after[key] is not parameter]
            self._replaced.note((parameter, after[key]) for key, parameter in replaced)
            self._lost[id(model)] = LostWrites(model, replaced, name)

    def _cut_sequences(self, model: torch.nn.Module) -> ContextParallel:
        is_exact = self._number_format == "no" and self._options.param_dtype in (None, "float32")
        context = ContextParallel(model, self.mesh["cp"], self.everyone, self._context, is_exact)
        self._contexts.append((model, context))
        return context

    def _cut_again(self, cut: TensorParallel | None, model: torch.nn.Module) -> None:
        if cut is not None and not any(one is model for one, _ in self._cuts):
            cut.resume()
            self._cuts.append((model, cut))

    def _set_up(self, model: torch.nn.Module, transforms: Iterable[Transform]) -> None:
        is_sharded = self.layout.replicate * self.layout.num_shards > 1
        if is_sharded:
            find_units(model, self._options)  # what is refused is refused before anything is changed
        check_whole(model)
        lacks_values = values.is_without_memory(model)
        lacking = [row[0] for row in self.everyone.gather_numbers([float(lacks_values)])]
        if len(set(lacking)) > 1:
            ranks = ", ".join(str(rank) for rank, lacks in enumerate(lacking) if lacks)
            raise PrepareError(
                f"{type(model).__name__} was built on the meta device on ranks {ranks} only; build it the same way on all ranks"
            )
        if lacks_values and self.layout.tp > 1:
            raise PrepareError(
                f"{type(model).__name__} was built on the meta device, which tensor parallelism does not support yet; "
                "build it with its values on each rank"
            )
        if lacks_values:
            values.check_initialisers(model)  # of buffers, too
        # Where they lie: parts of models that were made from different seeds would make a patchwork.
        self.everyone.broadcast_into([each for each in (*model.parameters(), *model.buffers()) if not each.is_meta])
        if self.layout.tp > 1:
            cut = TensorParallel(model, self.mesh["tp"], self._tensor, is_sharded=self.layout.num_shards > 1)
            self._cuts.append((model, cut))
        super().setup(model, transforms)
        if not is_sharded:
            bring_buffers(model, self.everyone.runtime.device)
            return
        num_wrapped = wrap_weights(model, self._float8, self._options, self.layout.num_shards)
        units = find_units(model, self._options)
        if units.split:
            log.info(
                "%s share parameters with modules outside them; their submodules that share none are gathered one by one, and the "
                "shared parameters with the root",
                ", ".join(units.split),
            )
        inner = self._shard(model, units)
        if num_wrapped:
            scale_before_forward(model)
        if lacks_values:
            largest = values.fill(model, inner, self.everyone.runtime.device, self.everyone)
            log.info(
                "%s was initialised unit by unit; the largest unit takes %s",
                type(model).__name__,
                format_bytes(largest),
            )

    def _shard(self, model: torch.nn.Module, units: ShardingUnits) -> list[torch.nn.Module]:
        """Shard each unit and the root; returns the units, innermost first."""
        chosen, device_type = self._options, self.everyone.runtime.device.type
        formats = choose_formats(chosen, self._number_format, self._computes_on)
        if formats.told:
            log.info_once("%s", formats.told)
        offload = fsdp.CPUOffloadPolicy(pin_memory=device_type != "cpu")
        given: dict[str, Any] = {
            "mesh": self._shards,
            "offload_policy": offload if chosen.cpu_offload else fsdp.OffloadPolicy(),
            "ignored_params": set(units.ignored) or None,
        }
        reshard = chosen.reshard_after_forward
        norms = list(norms_within(units.modules, formats))
        for norm in norms:
            fsdp.fully_shard(norm, reshard_after_forward=reshard, mp_policy=formats.root, **given)
        for unit in units.modules:
            fsdp.fully_shard(unit, reshard_after_forward=reshard, mp_policy=formats.blocks, **given)
        whole_root = reshard if isinstance(reshard, bool) else None
        fsdp.fully_shard(model, reshard_after_forward=whole_root, mp_policy=formats.root, **given)
        gathered.sum_unused_too(model)
        wanted = set(map(id, units.modules))
        _prefetch([module for module in model.modules() if id(module) in wanted], chosen)
        for name in chosen.forward_methods:
            if not callable(getattr(model, name, None)):
                raise PrepareError(
                    f"ShardingOptions(forward_methods=...) names {name!r}, but {type(model).__name__} has no such method"
                )
            fsdp.register_fsdp_forward_method(model, name)
        return [*norms, *units.modules]

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Those that work element by element, and those that know DTensors.

        Raises:
            UnsupportedError: one that is known to do neither.
        """
        check_optimizer(optimizer)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part that took its place."""
        return self._replaced.current(parameter)

    def cut(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of it, as the parameter is cut."""
        return gradients.cut_like(tensor, parameter)

    def at_rest(self, model: torch.nn.Module) -> None:
        """Free what is gathered: the root stays whole after a forward without backward."""
        gathered.reshard(model)

    # ---------------------------------------------------------------- micro-batches

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Where gradients stay local, each rank keeps all of them, whole."""
        return nullcontext() if sync or not isinstance(model, fsdp.FSDPModule) else _unsynchronised(model)

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Refused: a rank holds a part of the model, which learns nothing alone.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "local SGD needs a whole model on each rank, and this one is sharded; use strategy='ddp', or drop local SGD"
        )

    def plain(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """A loss of parameters alone is a DTensor, the same on all ranks, and so must its factor be."""
        if not gradients.is_of_parameters(loss):
            return loss, factor
        whole: torch.Tensor = loss.full_tensor()  # type: ignore[attr-defined]
        return whole, self.data_group.reduce_numbers([factor])[0] / self.data_group.world_size

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward, and note which parameters take part in it."""
        for usage in self._usage.values():
            usage.watch()
        with ExitStack() as stack:
            for _, context in self._contexts:
                stack.enter_context(context.recomputing())
            for each in self._seconds.values():
                stack.enter_context(each.backward())
            super().backward(loss, factor, precision, **kwargs)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """It adds to what the window has used."""
        for usage in self._usage.values():
            usage.go_on()

    @contextmanager
    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """By hooks on the whole parameters, which autograd sees; on FSDP's parts they never fire."""
        with ExitStack() as stack:
            stack.enter_context(super().silence(parameters))
            for model in self._models:
                for record in gathered.records(model):
                    whole = gathered.whole_parameter(record)
                    if whole is not None and whole.requires_grad:
                        stack.callback(whole.register_hook(torch.zeros_like).remove)  # type: ignore[no-untyped-call]
            yield

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Also those that wait, whole, for the window's end, and what a failed forward has left gathered."""
        super().drop_gradients([self.current(p) for p in parameters])  # type: ignore[misc]
        for model in self._models:
            gathered.forget_gradients(model)
            self._usage[id(model)].forget()

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Any:
        """Also those that wait, whole, for the window's end; and what their models have used in it."""
        chosen = list(parameters)
        whole = [(model, gathered.take_gradients(model, chosen)) for model in self._models]
        usage = [(each := self._usage[id(model)], each.snapshot()) for model, taken in whole if taken]
        return super().set_aside(chosen), [pair for _, taken in whole for pair in taken], usage

    def put_back(self, kept: Any) -> None:
        """Where FSDP keeps them."""
        parts, whole, usage = kept
        super().put_back(parts)
        gathered.give_gradients(whole)
        for each, state in usage:
            each.restore(state)

    # ---------------------------------------------------------------- a batch that is run again

    def break_off(self) -> None:
        """Free what is gathered and in flight, and whole gradients."""
        for model in self._models:
            gathered.prepare_to_gather(model)
            gathered.forget_gradients(model)

    def members(self, step: Step) -> Sequence[int]:
        """Those along the axis of a unit, or of the group."""
        return self._doors.members(step) if step[0] == doors.PLACE else super().members(step)

    def stand_in(self, step: Step) -> None:
        """With this rank's parts, and gradients of zero."""
        if step[0] == doors.PLACE:
            self._doors.stand_in(step)
        else:
            super().stand_in(step)

    def snapshot(self) -> Any:
        """Which parameters the window has used so far."""
        return [(usage, usage.snapshot()) for usage in self._usage.values()]

    def restore(self, snapshot: Any) -> None:
        """All models at rest, with nothing in flight."""
        self.break_off()
        for usage, state in snapshot:
            usage.restore(state)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Gradients have travelled in backward; what nobody used has none, and buffers follow rank 0."""
        for usage in self._usage.values():
            usage.settle()
        for _, cut in self._cuts:
            cut.check_gradients(self.everyone)
        if not self._options.broadcast_buffers:
            return
        for model in self._models:
            if model.training:
                self.everyone.broadcast_in_place([buffer for buffer in model.buffers() if buffer.numel()])

    # ---------------------------------------------------------------- final gradients

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts."""
        return gradients.local_gradients(map(self.current, parameters))

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Each element once, over all ranks."""
        return gradients.total_norm(map(self.current, parameters), norm_type, self.everyone)

    def clip(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """By the norm over all ranks."""
        norm = self.total_norm(parameters, norm_type) if known is None else known
        gradients.clip_by(self.local_gradients(parameters), max_norm, norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step on the parts; before the first one, everything has the number format that was promised."""
        if not self._num_steps:
            check_formats(self._models, self._dtypes)
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:  # 1, 2, 4, 8 ...
            for lost in self._lost.values():
                lost.check()
        did_step = super().step(optimizer, precision, closure)
        if did_step and self._number_format == "fp8":
            compute_scales(self._models)
        return did_step

    def settle(self) -> None:
        """Weights that are gathered in float8 have other scales now."""
        if self._number_format == "fp8":
            compute_scales(self._models)

    # ---------------------------------------------------------------- the end

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model, or all. They stay sharded, because a whole one need not fit here; they can be prepared again."""
        super().release()
        for known, cut in self._cuts:
            if model is None or known is model:
                cut.release()
        self._cuts = [pair for pair in self._cuts if model is not None and pair[0] is not model]
        for known, context in self._contexts:
            if model is None or known is model:
                context.release()
        self._contexts = [pair for pair in self._contexts if model is not None and pair[0] is not model]
        for each in [known for known in self._models if model is None or known is model]:
            gathered.reshard(each)
            self._doors.close(each)
            self._usage.pop(id(each)).release()
            self._seconds.pop(id(each)).release()
            self._lost.pop(id(each), None)
        self._models[:] = [] if model is None else [known for known in self._models if known is not model]
        self._replaced.forget()
        held = {id(p) for each in self._models for p in each.parameters()}
        self._dtypes = {key: dtype for key, dtype in self._dtypes.items() if key in held}
        self._num_steps = 0

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """By the bare module's names; sharded tensors as DTensors."""
        self.at_rest(model)
        yield from super().export_state(model)


def bring_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model's buffers; its parameters, as DTensors, lie there already. (`fully_shard` moves them itself.)"""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@contextmanager
def _unsynchronised(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _prefetch(units: list[Any], options: ShardingOptions) -> None:
    """Tell each unit, in the order of the tree, which ones to gather ahead."""
    for index, unit in enumerate(units):
        if options.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.forward_prefetch])
        if options.backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[max(0, index - options.backward_prefetch) : index][::-1])
