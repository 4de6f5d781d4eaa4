"""Pipeline parallelism: each rank along `pp` has some of a model's blocks, and micro-batches pass from one to the next.

`forward_backward` runs torch's schedules; a model that is called as any other goes through in GPipe's order. Replicas of a pipeline
(`ddp x pp`) average their gradients when a window closes; parameters that several stages hold (tied ones) sum theirs there.
Beside other axes a `MeshStrategy` spreads what this rank's stages hold over the ranks that have the same stages.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headway.common import callsite, scope
from headway.config.mesh import Layout, written
from headway.config.parallelism import PipelineOptions
from headway.data.sampling.shard import ShardIndex
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, find_batch_size
from headway.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.strategies.context.context_parallel import ContextParallel
from headway.strategies.fully_sharded import dtensors, fsdp_state
from headway.strategies.fully_sharded.values import AwaitedValues, check_initialisers, same_kind
from headway.strategies.parts import ReplacedParameters, ShardedModels, left
from headway.strategies.pipeline.plain_calls import PlainCalls
from headway.strategies.pipeline.runner import PipelineRunner, PipelineTask, check_loss, go_on, own_generators
from headway.strategies.pipeline.stage_forward import ModuleRouter, is_routed
from headway.strategies.pipeline.stages import PipelineState, find_stages
from headway.strategies.replica import average_gradients

if TYPE_CHECKING:
    from headway.strategies.fully_sharded.mesh import MeshStrategy  # brings torch's compiler with it

log = get_logger(__name__)


class PipelineStrategy(Strategy):
    """Stages of a model along the axis `pp`, replicas of that along the axis `replicate`.

    Args:
        collectives: all ranks.
        layout: how many ranks each axis takes.
        options: where the model is cut, and the schedule.
        spread: what spreads a stage's parameters; None: they are whole.
    """

    name = "pp"
    capabilities = Capabilities(
        several_models=False,
        rollback=False,
        lone_forward=False,
        whole_gradients=False,
        copies=False,
        local_training=False,
    )

    def __init__(
        self, collectives: Collectives, layout: Layout, options: PipelineOptions, spread: "MeshStrategy | None" = None
    ) -> None:
        super().__init__(collectives)
        scope.own(callsite.Hook).add(dtensors.explain)
        self.layout = layout
        self.name = written(dict.fromkeys(layout.sizes))
        self._spread = spread
        self._options = options
        self._group = collectives.split(layout.groups("pp"))
        self.data_group = collectives.split(layout.data_groups)
        self._peers = self.data_group  # other ranks' optimizers hold the parameters of other stages
        self.data_shard = ShardIndex(layout.data_index(collectives.rank), layout.num_data_shards)
        self.gradient_divisor = layout.num_data_shards * layout.cp
        self._replaced = ReplacedParameters(tuple)
        self._shared: list[tuple[Collectives, list[torch.nn.Parameter]]] = []
        self._uncounted: set[int] = set()
        self._summed: dict[int, torch.Tensor] = {}
        self._aside: dict[int, torch.Tensor] = {}
        self._model: torch.nn.Module | None = None
        self._pipe: PipelineRunner | None = None
        self._calls: PlainCalls | None = None
        self._state: PipelineState | None = None
        self._task: PipelineTask | None = None
        self._context: ContextParallel | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_left = False
        process.at_end(self._leave, is_engine=True)

    def _leave(self) -> None:
        """The process group ends, and its parts with it."""
        self.release()
        self._has_left = True

    # ---------------------------------------------------------------- setting up

    def materialise(self, model: torch.nn.Module) -> None:
        """Nothing, where only other ranks' stages are without memory; else see that `setup` can.

        Raises:
            PrepareError: a module without memory does not know its values.
        """
        if model in self.everyone.runtime.scope.own(ShardedModels):
            return
        if is_routed(model):
            raise PrepareError(
                f"{type(model).__name__} was cut into stages by a run that has ended, and this process has some of them; build it "
                "again, and load its values from a checkpoint"
            )
        check_initialisers(model, self._expected)

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """Not yet: `setup` brings this rank's stages alone to the device."""

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Give all ranks rank 0's values, apply the transforms, and keep this rank's stages.

        Raises:
            PrepareError: the model cannot be cut into so many stages.
        """
        if self._has_left and self.layout.num_ranks > self.layout.pp:
            raise StateError(left(self.layout))
        known = self.everyone.runtime.scope.own(ShardedModels)
        how = (self.layout, self._options)
        parts = known.find(model, how)
        missing = None
        context = None if self._spread is None else self._spread.split_sequences(model)
        try:
            if parts is None:
                if self._spread is None:
                    missing = AwaitedValues(model, self.everyone, self._expected)
                else:
                    missing = self._spread.begin(model, self._expected)
                parts = self._cut(model, transforms)
                known.note(model, how, parts)
        except BaseException:
            if context is not None:
                context.release()
            raise
        route, state = parts
        if self._spread is not None:
            self._spread.setup(model, (), state.elsewhere(), context)
            route.leave = partial(self._spread.leave, model)
        if context is not None:
            context.is_in_stage = lambda: route.running is not None
        self._context = route.context = context
        if missing is not None:
            missing.fill(model, route.stages.blocks, state.elsewhere())
        self._pipe = PipelineRunner(model, route, self._group, self._options)
        self._calls = PlainCalls(self._pipe)
        route.whole = self._calls
        self._model, self._state = model, state
        self._share(model, state)
        return context

    def answer_only(self, is_shared: bool) -> None:
        """Calls of the model need no gradients from now on.

        Args:
            is_shared: all ranks get its outputs; False: the one with the last stage, and None elsewhere.
        """
        pipe, calls = self._pipe, self._calls
        assert pipe is not None
        assert calls is not None

        def call(bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch.no_grad():
                return calls(bare, args, kwargs, is_shared)

        pipe.route.whole = call

    def _cut(self, model: torch.nn.Module, transforms: Iterable[Transform]) -> tuple[ModuleRouter, PipelineState]:
        num_ranks, rank = self._group.world_size, self._group.rank
        num_stages = num_ranks * self._options.num_per_rank
        stages = find_stages(model, num_stages, self._options)  # what is refused is refused before anything is changed
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm | torch.nn.parallel.DistributedDataParallel):
                raise PrepareError(
                    f"{type(model).__name__} contains a {type(module).__name__} at {name!r}, which needs all ranks at once; "
                    "use BatchNorm, and give the bare model"
                )
        super().setup(model, transforms)
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                "a compiled model cannot be cut into stages; use TorchDynamoPlugin(use_regional_compilation=True)"
            )
        is_split = self._options.schedule in ("zero_bubble", "zbv")
        if is_split and any(getattr(block, "_compiled_call_impl", None) is not None for block in stages.blocks):
            raise UnsupportedError(
                f"schedule={self._options.schedule!r} splits backward in two, which compiled blocks do not allow; use '1f1b' or "
                "'interleaved', or leave compilation out"
            )
        local = frozenset(s for s in range(num_stages) if self._options.rank_of(s, num_ranks) == rank)
        holders = {
            key: frozenset(self._options.rank_of(stage, num_ranks) for stage in on)
            for key, on in stages.holders(model).items()
        }
        log.info("stages of %s: %s", type(model).__name__, stages.describe())
        route = ModuleRouter(model, stages, local, self.everyone.runtime.device)
        owners = {id(tensor): holders[id(tensor)] for tensor in (*model.parameters(), *model.buffers())}
        return route, PipelineState(model, self._keep(model, owners), self.layout, self.everyone.rank)

    def _keep(self, model: torch.nn.Module, owners: dict[int, frozenset[int]]) -> dict[str, frozenset[int]]:
        """Empty what is on other ranks only, and bring the rest to the device; returns by name which ranks hold it."""
        rank, device = self._group.rank, self.everyone.runtime.device
        made: dict[int, torch.Tensor] = {}
        found: dict[str, frozenset[int]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for name, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    key = id(tensor)
                    if key not in made:
                        is_whole = self._spread is None and not tensor.is_meta  # else it is brought part by part
                        if rank not in owners[key]:
                            made[key] = same_kind(tensor, torch.empty_like(tensor, device="meta"))
                        elif is_whole and tensor.device != device:
                            made[key] = same_kind(tensor, tensor.to(device))
                        else:
                            made[key] = tensor
                        if made[key] is not tensor:
                            self._replaced.note([(tensor, made[key])])
                        owners[id(made[key])] = owners[key]
                        made[id(made[key])] = made[key]
                    held[name] = made[key]
                    found[f"{path}.{name}".lstrip(".")] = owners[key]
        return found

    def _share(self, model: torch.nn.Module, state: PipelineState) -> None:
        """Which parameters several ranks hold, and who counts them."""
        groups: dict[frozenset[int], list[torch.nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            on = state.owners[name]
            if len(on) > 1:
                groups.setdefault(on, []).append(parameter)
                if self._group.rank != min(on):
                    self._uncounted.add(id(parameter))
        for on, shared in sorted(groups.items(), key=lambda pair: sorted(pair[0])):
            if len(on) == self._group.world_size:
                self._shared.append((self._group, shared))
                continue
            lists = [
                ranks
                for group in self.layout.groups("pp")
                for ranks in ([group[r] for r in sorted(on)], *([group[r]] for r in range(len(group)) if r not in on))
            ]
            part = self.everyone.split(lists)
            if self._group.rank in on:
                self._shared.append((part, shared))

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Those that step each parameter by itself.

        Raises:
            UnsupportedError: one that joins all parameters to one vector.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS needs all parameters in one vector, and stages have them on different ranks; use AdamW"
            )
        if self._spread is not None:
            self._spread.accept(optimizer)
        self._optimizers.add(optimizer)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The empty one that took its place, where it is on other ranks."""
        now = self._replaced.current(parameter)
        return now if self._spread is None else self._spread.current(now)

    def cut(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """All of it, this rank's part, or nothing."""
        return torch.empty_like(tensor, device="meta") if parameter.is_meta else dtensors.cut_like(tensor, parameter)

    def at_rest(self, model: torch.nn.Module) -> None:
        """Free what is gathered."""
        if self._spread is not None:
            self._spread.at_rest(model)

    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> Any:
        """Also what is gathered of them."""
        return super().silence(parameters) if self._spread is None else self._spread.silence(parameters)

    # ---------------------------------------------------------------- micro-batches

    def compute(
        self,
        fn: Callable[[Tree], torch.Tensor],
        batch: Tree,
        weigh: Callable[[Tree], float | torch.Tensor] | None,
        reduction: str,
    ) -> torch.Tensor:
        """What stands for the batch's loss: backward computes it, and leaves its value there."""
        if self._pipe is None:
            return fn(batch)
        pieces = self._pipe.cut(batch)
        weights = [float(find_batch_size(piece) or 1) if weigh is None else float(weigh(piece)) for piece in pieces]
        loss = torch.zeros((), device=self.everyone.runtime.device, requires_grad=True)
        self._task = PipelineTask(fn, pieces, weights, reduction, loss)
        return loss

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run the schedule of a batch in hand; or the loss's own backward, and then the stages' from last to first.

        Raises:
            UnsupportedError: a loss that is made of parameters, which other stages have.
        """
        if loss.is_meta:
            raise UnsupportedError(
                "this loss is on the meta device: it is made of parameters that other stages of the pipeline have. Make the loss of "
                "the model's outputs alone; in place of a penalty on weights, use the optimizer's weight_decay"
            )
        self._set_aside()
        task, self._task = self._task, None
        if task is not None and self._context is not None:
            # How sequences are cut is found by a call of the whole pipeline, which no stage can make in the middle of a schedule.
            with own_generators(self.everyone.runtime.hardware):
                for piece in task.pieces:
                    self._context.rehearse(partial(task.fn, piece))
        with nullcontext() if self._context is None else self._context.recomputing():
            if task is not None:
                self._run(task, factor, precision)
                return
            held = [] if self._calls is None else self._calls.held()
            super().backward(loss, factor, precision, **kwargs)
            if self._calls is not None:
                self._calls.backward(held, bool(kwargs.get("retain_graph")))

    def _run(self, task: PipelineTask, factor: float, precision: Precision) -> None:
        pipe = self._pipe
        assert pipe is not None
        last, total = pipe.num_stages - 1, torch.zeros((), device=pipe.device)

        def compute(stage: int, number: int, received: Tree) -> Tree:
            told.begin(stage, number)
            found = pipe.route.run(stage, received, lambda: task.fn(task.pieces[number]), goes_on=stage == last)
            if stage < last:
                return found
            check_loss(found)
            share = task.share(number)
            if task.weights[number]:  # a mean over nothing may be NaN
                total.add_(found.detach().reshape(()).float(), alpha=share)
            return precision.scale_loss(found.reshape(())) * (factor * share)

        with torch.enable_grad(), own_generators(pipe.group.runtime.hardware) as told:
            what = getattr(task.fn, "__code__", type(task.fn))
            batch = pipe.begin(task.pieces, compute, what)
            nothing = {n for n, weight in enumerate(task.weights) if not weight or not factor}
            for chunk in batch.chunks.values():
                chunk.weightless = nothing
            pipe.drive(batch, has_backward=True)
        go_on(pipe.group.reduce_numbers(told.flags, "max"), pipe.device)
        total = total.reshape(1)
        pipe.group.sum_in_place([total])
        with torch.no_grad():
            task.loss.copy_(total[0])

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Refused: gradients of the window are reduced.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a second backward in a window's last micro-batch: a pipeline has one; add the losses up, and call it once"
        )

    # ---------------------------------------------------------------- gradients

    def _set_aside(self) -> None:
        """Shared gradients that are summed already must not be summed again with what comes now."""
        for _, shared in self._shared:
            for parameter in shared:
                summed = self._summed.pop(id(parameter), None)
                if summed is not None and parameter.grad is summed:
                    self._aside[id(parameter)] = summed
                    parameter.grad = None

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Sum what several stages hold, then average over the replicas; buffers follow the first one."""
        if self._model is None:
            return
        if self._spread is not None:
            self._spread.reduce_gradients()
        for group, shared in self._shared:
            self._sum_shared(group, [parameter for parameter in shared if parameter.requires_grad])
        if self._spread is None and self.data_group.world_size > 1:
            learning = [p for p in self._model.parameters() if p.requires_grad and not p.is_meta]
            average_gradients(learning, self.data_group)
            buffers = [buffer for buffer in self._model.buffers() if buffer.numel() and not buffer.is_meta]
            if self._model.training and buffers:
                self.data_group.broadcast_into(buffers)

    def _sum_shared(self, group: Collectives, shared: list[torch.nn.Parameter]) -> None:
        found = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in shared]
        group.sum_in_place([part for part in map(dtensors.local, found) if part.numel()])
        for parameter, grad in zip(shared, found):
            before = self._aside.pop(id(parameter), None)
            parameter.grad = grad if before is None else before.add_(grad)
            self._summed[id(parameter)] = parameter.grad

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Also those that a stage's ranks have not summed yet."""
        super().scale_gradients(parameters, factor)
        if self._model is not None and self._spread is not None:
            held = fsdp_state.held_gradients(fsdp_state.records(self._model))
            for grad in map(dtensors.local, held):
                grad.mul_(factor)

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Of this rank's stages."""
        return dtensors.local_gradients(map(self.current, parameters))

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Of this rank's stages, and a batch that was not run."""
        self._task = None
        self._summed.clear()
        self._aside.clear()
        own: Any = [self.current(p) for p in parameters]
        if self._spread is None:
            super().drop_gradients(own)
        else:
            self._spread.drop_gradients(own)

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Over all stages; what several hold counts once."""
        own = [p for p in map(self.current, parameters) if id(p) not in self._uncounted]
        return dtensors.total_norm(own, norm_type, self.everyone, self.layout.num_ranks // self.layout.pp)

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step on what is here."""
        if self._spread is None:
            return super().step(optimizer, precision, closure)
        return self._spread.step(optimizer, precision, closure)

    # ---------------------------------------------------------------- state, the end

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """By the bare module's names; what is on some ranks as pieces."""
        if self._state is None or model is not self._model:
            return super().export_state(model)
        self.at_rest(model)
        return self._state.export()

    def part_of(self, parameter: torch.Tensor) -> Any:
        """The piece of it that is here: all or nothing."""
        return parameter if self._state is None else self._state.part_of(parameter)

    def exposed(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """A block in which the optimizer shows the state of all stages."""
        return nullcontext() if self._state is None else self._state.exposed(optimizer, self._group)

    def settle(self) -> None:
        """Optimizers keep the state of what is here."""
        if self._state is not None:
            for optimizer in list(self._optimizers):
                self._state.settle(optimizer)

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget the model. It stays cut, because a whole one need not fit here; it can be prepared again."""
        super().release()
        if self._pipe is not None:
            self._pipe.route.whole = self._pipe.route.leave = self._pipe.route.context = None
        if self._spread is not None:
            self._spread.release(model)
        self._pipe = self._calls = self._state = self._model = self._task = self._context = None
        self._shared, self._uncounted = [], set()
        self._summed.clear()
        self._aside.clear()
        self._replaced.forget()
        self._optimizers.clear()
