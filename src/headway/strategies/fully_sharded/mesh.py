"""Sharded layouts on torch's own engines: a device mesh with named axes, along which parameters are sharded (DTensors).

FSDP2 (`fully_shard`) cuts each parameter along its first dimension over the axis "shard", gathers a unit's parameters before its
forward and its backward, and sums gradients into parts again; HSDP adds the axis "replicate". What follows from parts: optimizers
go by `current`, norms need an exchange (`dtensors.py`), and a model runs on all ranks of its mesh or on none.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.common import callsite, scope
from headway.common.optional import Later
from headway.config.engines import Float8Options
from headway.config.mesh import Layout, written
from headway.config.parallelism import ShardingOptions, TensorParallelOptions, TorchContextParallelConfig
from headway.data.sampling.shard import ShardIndex
from headway.errors import StateError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime import process
from headway.runtime.collective_log import Step
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.strategies.context import sequences
from headway.strategies.context.context_parallel import ContextParallel
from headway.strategies.fully_sharded import dtensors, units
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.fully_sharded.checks import (
    LostWrites,
    ParameterUsage,
    SecondOrder,
    check_hooks,
    check_optimizer,
)
from headway.strategies.fully_sharded.values import AwaitedValues, check_initialisers
from headway.strategies.parts import ReplacedParameters, ShardedModels, ShardedStages, build_mesh, left
from headway.strategies.tensor.experts import distribute_experts
from headway.strategies.tensor.tensor_parallel import TensorParallel

fsdp = Later("torch.distributed.fsdp")
log = get_logger(__name__)


@dataclass
class ShardedModel:
    """A model that is prepared, and what goes with it.

    Attributes:
        model: the user's own.
        context: what cuts its sequences.
        cut: what has cut its matrices.
        lost_writes: what looks for writes that would be lost.
        usage: which parameters a window's losses have used.
        second_order: what looks for a backward through another one.
        dtypes: by id of each part, what it and its gradient are promised to be of.
    """

    model: torch.nn.Module
    context: ContextParallel | None = None
    cut: TensorParallel | None = None
    lost_writes: LostWrites | None = None
    usage: ParameterUsage = field(init=False)
    second_order: SecondOrder = field(init=False)
    dtypes: dict[int, torch.dtype] = field(init=False)

    def watch(self, everyone: Collectives, options: ShardingOptions) -> None:
        """It is sharded: look after its parameters from now on."""
        self.usage = ParameterUsage(self.model, everyone, options.find_unused_parameters)
        self.second_order = SecondOrder(self.model)
        parts = [record.sharded_param for record in gathered.records(self.model)]
        self.dtypes = {id(part): part.dtype for part in parts}

    def leave_alone(self) -> None:
        """Undo what reaches beyond its parameters."""
        if self.cut is not None:
            self.cut.release()
        if self.context is not None:
            self.context.release()


class MeshStrategy(Strategy):
    """Parameters in parts along the axes of a mesh.

    Args:
        collectives: all ranks.
        layout: how many ranks each axis takes; in a pipeline `everyone` are those with this rank's stages.
        options: of sharding.
        number_format: the run's mixed_precision: "no", "bf16", "fp16" or "fp8".
        tensor: options of tensor parallelism; None: models' own plans.
        context: options of context parallelism.
        float8: options of "fp8".
        computes_on: the type of device whose number formats are chosen; None: this process's own.

    Attributes:
        mesh: torch's device mesh, its axes named as in the layout.
        is_sharded: FSDP looks after parameters.
    """

    name = "fsdp"
    capabilities = Capabilities(
        lone_forward=False, whole_gradients=False, copies=False, lone_pieces=False, local_training=False
    )

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
        units.check_float8(number_format, float8, options, layout.tp, layout.cp)
        self.layout = layout
        self.is_sharded = layout.replicate * layout.num_shards > 1
        self.name = written(dict.fromkeys(layout.sizes)) if layout.sizes else self.name
        self._options = options
        self._number_format = number_format
        self._tensor = tensor or TensorParallelOptions()
        sequences.check_options(self._tensor, layout.cp)
        self._context = context or TorchContextParallelConfig()
        self._float8 = float8
        self._computes_on = computes_on or collectives.runtime.device.type
        self.mesh, self._shards = build_mesh(collectives.runtime.device.type, layout)
        self._all = collectives
        if layout.pp > 1:
            self.everyone = collectives.split(layout.stages)
        elif layout.num_data_shards < layout.num_ranks:
            self.data_group = collectives.split(layout.data_groups)
        self.data_shard = ShardIndex(layout.data_index(collectives.rank), layout.num_data_shards)
        # Along cp each rank has the gradient of its part of the same loss: a term, as of another shard of the data.
        self.gradient_divisor = layout.num_data_shards * layout.cp
        self._prepared: list[ShardedModel] = []
        self._replaced = ReplacedParameters(lambda: self._models)
        self._comm_hooks = gathered.CommHooks(collectives)
        self._num_steps = 0
        self._has_left = False
        collectives.runtime.scope.own(dtensors.WholeScalars).enter(collectives.runtime)
        process.at_end(self._leave, is_engine=True)
        scope.own(callsite.Hook).add(dtensors.explain)

    def _leave(self) -> None:
        """The process group ends, and the mesh with it."""
        self.release()
        self._has_left = True

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [each.model for each in self._prepared]

    # ---------------------------------------------------------------- setting up

    def materialise(self, model: torch.nn.Module) -> None:
        """See that `setup`, which does it unit by unit, can: each module without memory must know its values.

        Raises:
            PrepareError: one does not.
        """
        check_initialisers(model, self._expected)

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """Not yet: `setup` brings one unit after the other to the device, and keeps a part of each."""

    def setup(
        self,
        model: torch.nn.Module,
        transforms: Iterable[Transform] = (),
        elsewhere: Container[int] = (),
        context: ContextParallel | None = None,
    ) -> Engine | None:
        """Give all ranks rank 0's values, apply the transforms, shard; names of parameters stay what they were.

        Args:
            model: the user's own.
            transforms: what is done to it before.
            elsewhere: ids of empty tensors, which are those of other stages of a pipeline.
            context: what cuts its sequences already.

        Raises:
            PrepareError: what cannot be sharded, by name.
            StateError: the process group of the mesh has ended.
        """
        if self._has_left:
            raise StateError(left(self.layout))
        made = ShardedModel(model, context or self.split_sequences(model))
        try:
            self._shard_once(made, transforms, elsewhere)
        except BaseException:
            made.leave_alone()
            raise
        made.watch(self.everyone, self._options)
        self._prepared.append(made)
        self._replaced.look_again()
        self._comm_hooks.open(model)
        return made.context

    def split_sequences(self, model: torch.nn.Module) -> ContextParallel | None:
        """What cuts its sequences, put into the model before its transforms; None: they stay whole."""
        if self.layout.cp == 1:
            return None
        is_exact = self._number_format == "no" and self._options.param_dtype in (None, "float32")
        return ContextParallel(model, self.mesh["cp"], self._all, self._context, is_exact)

    def _shard_once(self, made: ShardedModel, transforms: Iterable[Transform], elsewhere: Container[int]) -> None:
        model = made.model
        known = self.everyone.runtime.scope.own(ShardedModels if self.layout.pp == 1 else ShardedStages)
        how = (self.layout, self._options, f"mixed_precision={self._number_format!r}", self._tensor)
        cut = known.find(model, how)
        if cut is not None:
            made.cut = cut()
            if made.cut is not None:
                made.cut.resume()
            return
        check_hooks(model)
        name, before = type(model).__name__, list(model.named_parameters(remove_duplicate=False))
        self._set_up(made, transforms, elsewhere)
        # Weakly: it holds the model, whose hooks hold what needs it.
        known.note(model, how, (lambda: None) if made.cut is None else weakref.ref(made.cut))
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = [(key, parameter) for key, parameter in before if after[key] is not parameter]
        self._replaced.note((parameter, after[key]) for key, parameter in replaced)
        made.lost_writes = LostWrites(model, replaced, name)

    def begin(self, model: torch.nn.Module, expected: Set[str]) -> AwaitedValues:
        """Refuse what cannot be sharded, before anything is changed, and give all ranks rank 0's values.

        Args:
            expected: names of tensors whose values are read afterwards.

        Returns:
            What fills the rest once the model is spread.

        Raises:
            PrepareError: what cannot be, by name.
        """
        if self.is_sharded:
            units.find_units(model, self._options)
        units.check_whole(model)
        return AwaitedValues(model, self._all, expected)

    def _set_up(self, made: ShardedModel, transforms: Iterable[Transform], elsewhere: Container[int]) -> None:
        model = made.model
        missing = self.begin(model, self._expected) if self.layout.pp == 1 else None
        if self.layout.tp > 1:
            made.cut = TensorParallel(model, self.mesh["tp"], self._tensor, is_sharded=self.layout.num_shards > 1)
        experts = distribute_experts(model, self.mesh, self.everyone.ledger) if self.layout.ep > 1 else []
        super().setup(model, transforms)
        if not self.is_sharded:
            if missing is not None:
                missing.fill(model, ())
            units.bring_buffers(model, self.everyone.runtime.device)
            return
        num_wrapped = units.wrap_weights(model, self._float8, self._options, self.layout.num_shards)
        found = units.find_units(model, self._options)
        if found.split:
            log.info(
                "%s share parameters with modules outside them; their submodules that share none are gathered one by one, and the "
                "shared parameters with the root",
                ", ".join(found.split),
            )
        inner = self._shard(model, found, elsewhere, experts)
        if num_wrapped:
            # All scales are computed, in one exchange, as a forward of the sharded model begins.
            model.register_forward_pre_hook(lambda model, args: units.compute_scales([model]), prepend=True)
        if missing is not None:
            missing.fill(model, inner)

    def _shard(
        self, model: torch.nn.Module, found: units.ShardingUnits, elsewhere: Container[int], experts: Sequence[Any]
    ) -> list[torch.nn.Module]:
        """Shard each unit and the root; returns the units, innermost first."""
        chosen, device_type = self._options, self.everyone.runtime.device.type
        dtypes = units.choose_formats(chosen, self._number_format, self._computes_on)
        if dtypes.told:
            log.info_once("%s", dtypes.told)
        offload = fsdp.CPUOffloadPolicy(pin_memory=device_type != "cpu")
        given: dict[str, Any] = {
            "offload_policy": offload if chosen.cpu_offload else fsdp.OffloadPolicy(),
            "ignored_params": {*found.ignored, *(p for p in model.parameters() if id(p) in elsewhere)} or None,
        }
        is_held = self.layout.pp > 1
        reshard = False if is_held else chosen.reshard_after_forward
        kept = reshard if isinstance(reshard, bool) else None
        for module in experts:  # along "ep" each rank has its own
            among = self.mesh["replicate", "shard"] if self.layout.replicate > 1 else self.mesh["shard"]
            fsdp.fully_shard(module, mesh=among, reshard_after_forward=kept, mp_policy=dtypes.blocks, **given)
        given["mesh"] = self._shards
        modules = units.units_here(model, found.modules, elsewhere)
        norms = list(units.norms_within(modules, dtypes))
        for norm in norms:
            fsdp.fully_shard(norm, reshard_after_forward=reshard, mp_policy=dtypes.root, **given)
        for unit in (unit for unit in modules if not any(unit is module for module in experts)):
            fsdp.fully_shard(unit, reshard_after_forward=reshard, mp_policy=dtypes.blocks, **given)
        fsdp.fully_shard(model, reshard_after_forward=kept, mp_policy=dtypes.root, **given)
        (gathered.hold if is_held else gathered.sum_unused_too)(model)
        wanted = set(map(id, modules))
        gathered.prefetch([module for module in model.modules() if id(module) in wanted], chosen)
        gathered.add_forward_methods(model, chosen.forward_methods)
        return [*norms, *modules]

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
        return dtensors.cut_like(tensor, parameter)

    def at_rest(self, model: torch.nn.Module) -> None:
        """Free what is gathered: the root stays whole after a forward without backward."""
        gathered.reshard(model)

    # ---------------------------------------------------------------- micro-batches

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Where gradients stay local, each rank keeps all of them, whole."""
        return nullcontext() if sync or not isinstance(model, fsdp.FSDPModule) else gathered.unsynchronised(model)

    def plain(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """A loss of parameters alone is a DTensor, the same on all ranks, and so must its factor be."""
        if not dtensors.is_of_parameters(loss):
            return loss, factor
        whole: torch.Tensor = loss.full_tensor()  # type: ignore[attr-defined]
        return whole, self.data_group.reduce_numbers([factor])[0] / self.gradient_divisor

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward, and note which parameters take part in it."""
        with ExitStack() as stack:
            for each in self._prepared:
                each.usage.watch()
                if each.context is not None:
                    stack.enter_context(each.context.recomputing())
                stack.enter_context(each.second_order.backward())
            super().backward(loss, factor, precision, **kwargs)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """It adds to what the window has used."""
        for each in self._prepared:
            each.usage.go_on()

    @contextmanager
    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """By hooks on the whole parameters, which autograd sees; on FSDP's parts they never fire.

        Not on distributed experts: their gradients are those of other ranks' tokens, too.
        """
        with ExitStack() as stack:
            stack.enter_context(super().silence(parameters))
            for model in self._models:
                for record in gathered.records(model):
                    whole = gathered.whole_parameter(record)
                    is_distributed = "ep" in record.sharded_param.device_mesh.mesh_dim_names
                    if whole is not None and whole.requires_grad and not is_distributed:
                        stack.callback(whole.register_hook(torch.zeros_like).remove)  # type: ignore[no-untyped-call]
            yield

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Also those that wait, whole, for the window's end, and what a failed forward has left gathered."""
        super().drop_gradients([self.current(p) for p in parameters])  # type: ignore[misc]
        for each in self._prepared:
            gathered.forget_gradients(each.model)
            each.usage.forget()

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Any:
        """Also those that wait, whole, for the window's end; and what their models have used in it."""
        chosen = list(parameters)
        whole = [(each.usage, gathered.take_gradients(each.model, chosen)) for each in self._prepared]
        usage = [(each, each.snapshot()) for each, taken in whole if taken]
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
        is_ours = step[0] == gathered.PLACE
        return self._comm_hooks.unit(step).ranks(step[1]) if is_ours else super().members(step)

    def stand_in(self, step: Step) -> None:
        """With this rank's parts, and gradients of zero."""
        if step[0] != gathered.PLACE:
            super().stand_in(step)
        else:
            self._comm_hooks.unit(step).stand_in(step[1], step[4:])

    def snapshot(self) -> Any:
        """Which parameters the window has used so far."""
        return [(each.usage, each.usage.snapshot()) for each in self._prepared]

    def restore(self, snapshot: Any) -> None:
        """All models at rest, with nothing in flight."""
        self.break_off()
        for usage, state in snapshot:
            usage.restore(state)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Gradients have travelled in backward; what nobody used has none, and buffers follow rank 0."""
        for each in self._prepared:
            if self.layout.pp == 1:
                each.usage.settle()
            elif self.is_sharded:
                gathered.reduce_held(each.model, self.everyone)
        for each in self._prepared:
            if each.cut is not None:
                each.cut.check_gradients(self._all)
            if self._options.broadcast_buffers and each.model.training:
                buffers = [buffer for buffer in each.model.buffers() if buffer.numel() and not buffer.is_meta]
                self.everyone.broadcast_in_place(buffers)

    def leave(self, model: torch.nn.Module, output: Any) -> Any:
        """A stage's last block has run, and the model's forward was left: what comes at the end of one, of its output."""
        for each in self._prepared:
            if each.model is model and each.cut is not None:
                each.cut.leave()
        return gathered.leave_forward(model, output) if self.is_sharded else output

    # ---------------------------------------------------------------- final gradients

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts."""
        return dtensors.local_gradients(map(self.current, parameters))

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Each element once, over all ranks."""
        return dtensors.total_norm(map(self.current, parameters), norm_type, self.everyone)

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step on the parts; before the first one, everything has the number format that was promised."""
        if not self._num_steps:
            for each in self._prepared:
                units.check_formats(each.model, each.dtypes)
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:  # 1, 2, 4, 8 ...
            for lost in filter(None, (each.lost_writes for each in self._prepared)):
                lost.check()
        for model in self._models:  # what a forward has gathered since backward will be older than the update
            gathered.reshard(model)
        did_step = super().step(optimizer, precision, closure)
        if did_step and self._number_format == "fp8":
            units.compute_scales(self._models)
        return did_step

    def settle(self) -> None:
        """Weights that are gathered in float8 have other scales now."""
        if self._number_format == "fp8":
            units.compute_scales(self._models)

    # ---------------------------------------------------------------- the end

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model, or all. They stay sharded, because a whole one need not fit here; they can be prepared again."""
        super().release()
        gone = [each for each in self._prepared if model is None or each.model is model]
        for each in gone:
            each.leave_alone()
            gathered.reshard(each.model)
            self._comm_hooks.close(each.model)
            each.usage.release()
            each.second_order.release()
        self._prepared = [each for each in self._prepared if not any(each is one for one in gone)]
        self._replaced.forget()
        self._num_steps = 0

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """By the bare module's names; sharded tensors as DTensors."""
        self.at_rest(model)
        yield from super().export_state(model)
