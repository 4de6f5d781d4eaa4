"""Strategy for pipeline parallelism: each rank along `pp` has some of a model's blocks.

`forward_backward` runs torch's schedules. A model that is called directly runs in GPipe's order. Replicas of a
pipeline (`ddp x pp`) average their gradients at the end of an accumulation window. Gradients of parameters that several
stages hold (tied weights) are then also summed over these stages. In combination with other axes, a `MeshStrategy`
shards the parameters of this rank's stages over all ranks that hold the same stages.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headway.common import scope, tracebacks
from headway.core.config.mesh import Layout, format_sizes
from headway.core.config.parallelism import PipelineOptions
from headway.core.data.sampling.shard import ShardIndex
from headway.core.precision.mixed import Precision
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, find_batch_size
from headway.core.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.core.strategies.device_mesh import describe_ended_groups
from headway.core.strategies.fully_sharded import dtensors, fsdp_state
from headway.core.strategies.fully_sharded.values import MissingValues, check_initializers, wrap_like
from headway.core.strategies.replica import average_gradients
from headway.core.strategies.sharding_records import ReplacedParameters, ShardedModels
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.layouts.adapters import check_adapters
from headway.layouts.context.context_parallel import ContextParallel
from headway.layouts.pipeline._torch import is_traceable_wrapper_subclass
from headway.layouts.pipeline.plain_calls import PlainCalls
from headway.layouts.pipeline.runner import (
    PipelineRunner,
    PipelineTask,
    advance_generators,
    check_loss,
    gather_used_generators,
    isolate_generators,
)
from headway.layouts.pipeline.stage_forward import ModuleRouter, is_routed
from headway.layouts.pipeline.stages import PipelineState, find_stages
from headway.log import get_logger

if TYPE_CHECKING:
    from headway.core.strategies.fully_sharded.mesh import MeshStrategy  # brings torch's compiler with it

log = get_logger(__name__)

_SPLIT_SCHEDULES = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights separately."""


class PipelineStrategy(Strategy):
    """Strategy that splits a model into stages along the mesh axis `pp`, with replicas along the axis `replicate`.

    Args:
        collectives: Collectives over all ranks.
        layout: Number of ranks along each axis.
        options: Options of the pipeline, such as its schedule.
        spread: Strategy that shards the parameters of a stage. None: they are not sharded. Default: None.

    Raises:
        UnsupportedError: If the schedule cannot be combined with expert parallelism.
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
        if layout.ep > 1 and options.schedule in _SPLIT_SCHEDULES:
            raise UnsupportedError(
                f"schedule={options.schedule!r} splits backward in two, but with ep={layout.ep} ranks exchange tokens' gradients in "
                "the middle of a backward; use 'gpipe', '1f1b' or 'interleaved', or leave ep out"
            )
        scope.get_or_create(tracebacks.ExceptionHook).add_note(dtensors.explain_error)
        self.layout = layout
        self.name = format_sizes(dict.fromkeys(layout.sizes))
        self._spread = spread
        self._options = options
        self._group = collectives.split(layout.list_groups("pp"))
        self.data_group = collectives.split(layout.data_groups)
        self._peers = self.data_group  # ranks along pp have optimizers of different stages
        self._token_group = collectives.split(layout.list_groups("ep")) if layout.ep > 1 else None
        self.data_shard = ShardIndex(layout.find_data_index(collectives.rank), layout.num_data_shards)
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
        self._has_ended = False
        process.release_at_end(self._end_group, ends_with_group=True)

    def _end_group(self) -> None:
        """Release the model when the process group ends, because the strategy's subgroups end with it."""
        self.release_model()
        self._has_ended = True

    # ---------------------------------------------------------------- setting up

    def materialize_model(self, model: torch.nn.Module) -> None:
        """Check that all modules on the meta device can initialize their values, as `setup_model` later requires.

        A model that this run has already split into stages is not checked again.

        Raises:
            PrepareError: If a module on the meta device cannot initialize its values. Also if an earlier run has split
                the model into stages, so that this process holds only some of them.
        """
        if model in self.everyone.runtime.scope.get_or_create(ShardedModels):
            return
        if is_routed(model):
            raise PrepareError(
                f"{type(model).__name__} was cut into stages by a run that has ended, and this process has some of them; build it "
                "again, and load its values from a checkpoint"
            )
        check_initializers(model, self._expected_names)

    def move_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: `setup_model` moves only this rank's stages to the device."""

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Broadcast rank 0's values, apply the transforms, and keep only this rank's stages.

        If this run has already split the model with equal options, its stages are reused.

        Args:
            model: Model to split.
            transforms: Functions that change the model before it is split. They are not applied again to a model that
                is already split. Default: none.

        Returns:
            Callable that replaces the model under context parallelism, or None without context parallelism.

        Raises:
            PrepareError: If the model cannot be split into the required number of stages.
            UnsupportedError: If the model is compiled in a way that stages do not support.
            StateError: If the strategy's process groups have ended.
        """
        if self._has_ended and self.layout.num_ranks > self.layout.pp:
            raise StateError(describe_ended_groups(self.layout))
        known = self.everyone.runtime.scope.get_or_create(ShardedModels)
        how = (self.layout, self._options)
        parts = known.find_record(model, how)
        missing = None
        context: ContextParallel | None = None if self._spread is None else self._spread.split_sequences(model)
        try:
            if parts is None:
                if self._spread is None:
                    missing = MissingValues(model, self.everyone, self._expected_names)
                else:
                    self._spread.check_shardable(model)
                    missing = self._spread.broadcast_values(model, self._expected_names)
                parts = self._split_model(model, transforms)
                known.record_model(model, how, parts)
        except BaseException:
            if context is not None:
                context.release()
            raise
        route, state = parts
        if self._spread is not None:
            self._spread.setup_model(model, (), state.list_elsewhere(), context)
            route.leave = partial(self._spread.end_forward, model)
        if context is not None:
            context.is_in_stage = lambda: route.running is not None
        self._context = context
        route.context = context
        if missing is not None:
            missing.fill(model, route.stages.blocks, state.list_elsewhere())
        self._pipe = PipelineRunner(model, route, self._group, self._options, self._token_group)
        self._calls = PlainCalls(self._pipe)
        route.whole = self._calls
        self._model = model
        self._state = state
        self._find_shared(model, state)
        return context

    def serve_inference_only(self, is_shared: bool) -> None:
        """Configure calls of the model for inference, without gradients. Call it after `setup_model`.

        Args:
            is_shared: Whether all ranks get the outputs. False: only the rank with the last stage gets them, and the
                others get None.
        """
        pipe, calls = self._pipe, self._calls
        assert pipe is not None
        assert calls is not None

        def call_without_gradients(bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch.no_grad():
                return calls(bare, args, kwargs, is_shared)

        pipe.route.whole = call_without_gradients

    def _split_model(
        self, model: torch.nn.Module, transforms: Iterable[Transform]
    ) -> tuple[ModuleRouter, PipelineState]:
        num_ranks, rank = self._group.world_size, self._group.rank
        num_stages = num_ranks * self._options.num_per_rank
        check_adapters(model, self.name)
        stages = find_stages(model, num_stages, self._options)  # raises before anything is changed
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm | torch.nn.parallel.DistributedDataParallel):
                raise PrepareError(
                    f"{type(model).__name__} contains a {type(module).__name__} at {name!r}, which needs all ranks at once; "
                    "use BatchNorm, and give the bare model"
                )
        super().setup_model(model, transforms)
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                "a compiled model cannot be cut into stages; use TorchDynamoPlugin(use_regional_compilation=True)"
            )
        is_split = self._options.schedule in _SPLIT_SCHEDULES
        if is_split and any(getattr(block, "_compiled_call_impl", None) is not None for block in stages.blocks):
            raise UnsupportedError(
                f"schedule={self._options.schedule!r} splits backward in two, which compiled blocks do not allow; use '1f1b' or "
                "'interleaved', or leave compilation out"
            )
        local = frozenset(s for s in range(num_stages) if self._options.find_rank(s, num_ranks) == rank)
        holders = {
            key: frozenset(self._options.find_rank(stage, num_ranks) for stage in on)
            for key, on in stages.map_holders(model).items()
        }
        log.info("stages of %s: %s", type(model).__name__, stages.describe())
        route = ModuleRouter(model, stages, local, self.everyone.runtime.device)
        owners = {id(tensor): holders[id(tensor)] for tensor in (*model.parameters(), *model.buffers())}
        return route, PipelineState(model, self._keep_own_tensors(model, owners), self.layout, self.everyone.rank)

    def _keep_own_tensors(self, model: torch.nn.Module, owners: dict[int, frozenset[int]]) -> dict[str, frozenset[int]]:
        """Replace the tensors of other ranks with meta tensors, and move those of this rank to the device.

        This rank's tensors are not moved if they are on the meta device, or if another strategy will shard them.

        Args:
            model: Model that is split.
            owners: Pipeline ranks that hold each tensor, by the tensor's `id`. Entries for the moved tensors and the
                meta tensors are added.

        Returns:
            Pipeline ranks that hold each tensor, by name.
        """
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
                        is_whole = self._spread is None and not tensor.is_meta  # `self._spread` moves only shards
                        if rank not in owners[key]:
                            made[key] = wrap_like(tensor, _make_empty(tensor))
                        elif is_whole and tensor.device != device:
                            made[key] = wrap_like(tensor, tensor.to(device))
                        else:
                            made[key] = tensor
                        if made[key] is not tensor:
                            self._replaced.record_pairs([(tensor, made[key])])
                        owners[id(made[key])] = owners[key]
                        made[id(made[key])] = made[key]
                    held[name] = made[key]
                    found[f"{path}.{name}".lstrip(".")] = owners[key]
        return found

    def _find_shared(self, model: torch.nn.Module, state: PipelineState) -> None:
        """Find parameters that several pipeline ranks hold, and create the process groups that sum their gradients.

        Also choose, for each of these parameters, the rank that includes it in gradient norms.
        """
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
                for group in self.layout.list_groups("pp")
                for ranks in ([group[r] for r in sorted(on)], *([group[r]] for r in range(len(group)) if r not in on))
            ]
            part = self.everyone.split(lists)
            if self._group.rank in on:
                self._shared.append((part, shared))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer does not step each parameter separately. Otherwise register the optimizer.

        Raises:
            UnsupportedError: If the optimizer concatenates all parameters into one vector (LBFGS).
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS needs all parameters in one vector, and stages have them on different ranks; use AdamW"
            )
        if self._spread is not None:
            self._spread.check_optimizer(optimizer)
        self._optimizers.add(optimizer)

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaced a parameter, or the parameter itself if it was not replaced.

        The replacement is the full parameter on this rank's device, a shard, or a meta tensor if only other pipeline
        ranks hold the parameter.
        """
        now = self._replaced.get_current(parameter)
        return now if self._spread is None else self._spread.find_current(now)

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Shard a tensor like a parameter of equal full shape, and return this rank's part of the tensor.

        The part is the full tensor, a shard, or a meta tensor if only other pipeline ranks hold the parameter.
        """
        return torch.empty_like(tensor, device="meta") if parameter.is_meta else dtensors.shard_like(tensor, parameter)

    def free_gathered(self, model: torch.nn.Module) -> None:
        """Free the all-gathered parameters of a model. The next forward gathers them again.

        Do nothing if the parameters of stages are not sharded.
        """
        if self._spread is not None:
            self._spread.free_gathered(model)

    def silence_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Any:
        """Return a context in which backward produces zero gradients, even for all-gathered parameters."""
        return (
            super().silence_gradients(parameters)
            if self._spread is None
            else self._spread.silence_gradients(parameters)
        )

    # ---------------------------------------------------------------- micro-batches

    def compute_loss(
        self,
        fn: Callable[[Tree], torch.Tensor],
        batch: Tree,
        weigh: Callable[[Tree], float | torch.Tensor] | None,
        reduction: str,
    ) -> torch.Tensor:
        """Return a placeholder for the batch's loss.

        Backward computes the loss and stores its value in the placeholder. Without a prepared model, the loss itself is
        returned.

        Args:
            fn: Function from a micro-batch to its loss.
            batch: Batch of this rank.
            weigh: Function from a micro-batch to the number of items over which its loss is computed. None: number of
                rows.
            reduction: How the loss is reduced over items: "mean" or "sum".
        """
        if self._pipe is None:
            return fn(batch)
        pieces = self._pipe.split_batch(batch)
        weights = [float(find_batch_size(piece) or 1) if weigh is None else float(weigh(piece)) for piece in pieces]
        loss = torch.zeros((), device=self.everyone.runtime.device, requires_grad=True)
        self._task = PipelineTask(fn, pieces, weights, reduction, loss)
        return loss

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run the pipeline schedule if `loss` is a placeholder from `compute_loss`, else run backward of `loss`.

        If the loss was computed from outputs of the model, backward continues through the stages, from last to first.

        Args:
            loss: Placeholder from `compute_loss`, or a loss.
            factor: Factor by which the loss is multiplied, from its weight in the accumulation window. With 0, a
                placeholder adds no gradients.
            precision: Precision of the run, which scales losses under fp16.
            kwargs: Keyword arguments of torch's backward. They have no effect on a placeholder.

        Raises:
            UnsupportedError: If the loss is computed from parameters that only other stages hold.
            LossError: If the function that was given to `compute_loss` does not return a loss.
            StateError: If backward runs twice through one forward of the model.
        """
        if loss.is_meta:
            raise UnsupportedError(
                "this loss is on the meta device, because it is computed from parameters of other stages of the pipeline. Compute "
                "the loss only from the model's outputs. Instead of a weight penalty, use the optimizer's weight_decay"
            )
        self._stash_summed()
        task, self._task = self._task, None
        if task is not None and self._context is not None:
            # The dry run of context parallelism needs all stages, so it cannot run in the middle of a schedule.
            with isolate_generators(self.everyone.runtime.hardware):
                for piece in task.pieces:
                    self._context.run_dry_run_only(partial(task.fn, piece))
        with nullcontext() if self._context is None else self._context.backward_context():
            if task is not None:
                self._run_schedule(task, factor, precision)
                return
            held = [] if self._calls is None else self._calls.list_pending()
            super().backward(loss, factor, precision, **kwargs)
            if self._calls is not None:
                self._calls.backward(held, bool(kwargs.get("retain_graph")))

    def _run_schedule(self, task: PipelineTask, factor: float, precision: Precision) -> None:
        pipe = self._pipe
        assert pipe is not None
        last, total = pipe.num_stages - 1, torch.zeros((), device=pipe.device)

        def compute_stage(stage_index: int, number: int, received: Tree) -> Tree:
            stage_rng.seed_micro_batch(stage_index, number)
            is_last = stage_index == last
            found = pipe.route.run(stage_index, received, lambda: task.fn(task.pieces[number]), goes_on=is_last)
            if not is_last:
                return found
            check_loss(found)
            share = task.compute_share(number)
            if task.weights[number]:  # a mean over no items may be NaN
                total.add_(found.detach().reshape(()).float(), alpha=share)
            return precision.scale_loss(found.reshape(())) * (factor * share)

        with torch.enable_grad(), isolate_generators(pipe.group.runtime.hardware) as stage_rng:
            what = getattr(task.fn, "__code__", type(task.fn))
            batch = pipe.begin_batch(task.pieces, compute_stage, what)
            nothing = {n for n, weight in enumerate(task.weights) if not weight or not factor}
            for stage in batch.stages.values():
                stage.weightless = nothing
                if self._token_group is not None:  # other ranks wait for the backward of their tokens
                    stage.silence = partial(self.silence_gradients, self._list_trained())
            pipe.run_schedule(batch, has_backward=True)
        advance_generators(gather_used_generators(stage_rng.used, pipe.group), pipe.device)
        total = total.reshape(1)
        pipe.group.sum_in_place([total])
        with torch.no_grad():
            task.loss.copy_(total[0])

    def _list_trained(self) -> list[torch.nn.Parameter]:
        """Return the optimizers' parameters on this rank: shards, even while the model holds gathered parameters."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"] if not parameter.is_meta]

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Raise an error, because a pipeline allows only one backward in an accumulation window's last micro-batch.

        The first backward already reduces the window's gradients.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "backward was called twice in the last micro-batch of a window, but a pipeline supports only one call. Add the "
            "losses, and call backward once"
        )

    # ---------------------------------------------------------------- gradients

    def _stash_summed(self) -> None:
        """Move gradients of shared parameters out of `grad`, if the stages have already summed these gradients.

        The next sum over stages then contains only the gradients of later backward passes. The earlier gradients are
        added to it afterwards.
        """
        for _, shared in self._shared:
            for parameter in shared:
                summed = self._summed.pop(id(parameter), None)
                if summed is not None and parameter.grad is summed:
                    self._aside[id(parameter)] = summed
                    parameter.grad = None

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Reduce the gradients of an accumulation window. Every rank must call it.

        Gradients of parameters that several stages hold are summed over these stages. All gradients are averaged over
        the replicas of the pipeline. If the replicas are not sharded, the first replica's module buffers are broadcast
        in training mode. Both arguments are ignored.
        """
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
        group.sum_in_place([part for part in map(dtensors.get_local_shard, found) if part.numel()])
        for parameter, grad in zip(shared, found):
            before = self._aside.pop(id(parameter), None)
            parameter.grad = grad if before is None else before.add_(grad)
            self._summed[id(parameter)] = parameter.grad

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the parameters by a factor.

        If the stages are sharded, this includes the unsharded gradients that FSDP has not reduced yet.
        """
        super().scale_gradients(parameters, factor)
        if self._model is not None and self._spread is not None:
            held = fsdp_state.list_unreduced_gradients(fsdp_state.iterate_records(self._model))
            for grad in map(dtensors.get_local_shard, held):
                grad.mul_(factor)

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients of those parameters that its stages contain."""
        return dtensors.get_local_gradients(map(self.find_current, parameters))

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Discard the gradients of this rank's stages, and a batch from `compute_loss` whose backward has not run."""
        self._task = None
        self._summed.clear()
        self._aside.clear()
        own: Any = [self.find_current(p) for p in parameters]
        if self._spread is None:
            super().drop_gradients(own)
        else:
            self._spread.drop_gradients(own)

    def compute_total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the gradient norm over all stages. A parameter that several stages hold counts once.

        Every rank must call it, with parameters of the whole model.
        """
        own = [p for p in map(self.find_current, parameters) if id(p) not in self._uncounted]
        return dtensors.compute_total_norm(own, norm_type, self.everyone, self.layout.num_ranks // self.layout.pp)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Update the parameters of this rank's stages.

        Args:
            optimizer: torch's own optimizer.
            precision: Precision of the run. Under fp16, its gradient scaler can skip the step.
            closure: Closure as for a torch optimizer, or None.

        Returns:
            Whether the parameters were updated. False: the step was skipped.
        """
        if self._spread is None:
            return super().step_optimizer(optimizer, precision, closure)
        return self._spread.step_optimizer(optimizer, precision, closure)

    # ---------------------------------------------------------------- state, the end

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each entry of the state dict, named as in the model without wrappers.

        Unless every pipeline rank has all of a tensor, it is yielded as a `ShardPiece` with this rank's values only.
        The tensors of a model that is not the prepared one are yielded in full.
        """
        if self._state is None or model is not self._model:
            return super().export_state(model)
        self.free_gathered(model)
        return self._state.export_state()

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's part of a parameter.

        The part is all of the parameter, a shard, or an empty `ShardPiece` if only other ranks hold it. A parameter
        that does not belong to the prepared model is returned unchanged.
        """
        return parameter if self._state is None else self._state.get_part(parameter)

    def expose_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context in which the optimizer's state covers the parameters of all pipeline stages.

        States of other stages are `ShardPiece` objects without data. All ranks must enter the context, which runs a
        collective. Without a prepared model, the context does nothing.
        """
        return nullcontext() if self._state is None else self._state.expose_state(optimizer, self._group)

    def apply_loaded_values(self) -> None:
        """Convert loaded optimizer states to tensors with the device and sharding of this rank's parameters.

        States of parameters that only other pipeline ranks hold are deleted.
        """
        if self._state is not None:
            for optimizer in list(self._optimizers):
                self._state.convert_loaded_states(optimizer)

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release the strategy's model and optimizers, so that the model can be prepared again.

        The model stays split into stages, because the full model might not fit into memory. Until it is prepared again,
        calls of it raise `UnsupportedError`.

        Args:
            model: Model for the strategy that shards the stages. None (the default): all its models. The pipeline has
                only one model, and always releases it.
        """
        super().release_model()
        if self._pipe is not None:
            self._pipe.route.whole = None
            self._pipe.route.leave = None
            self._pipe.route.context = None
        if self._spread is not None:
            self._spread.release_model(model)
        self._pipe = None
        self._calls = None
        self._state = None
        self._model = None
        self._task = None
        self._context = None
        self._shared = []
        self._uncounted = set()
        self._summed.clear()
        self._aside.clear()
        self._replaced.forget_released()
        self._optimizers.clear()


def _make_empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a tensor that other ranks hold.

    torchao's quantized tensors do not implement `empty_like`, so their inner tensors are replaced one by one. A
    checkpoint needs the shapes of all inner tensors on every rank.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor, device="meta")
    names, about = tensor.__tensor_flatten__()
    inner = {name: _make_empty(getattr(tensor, name)) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, about, tensor.shape, tensor.stride())
    return made
