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
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from headway.core.strategies.fully_sharded.gradient_norm import compute_total_norm, count_copies
from headway.core.strategies.fully_sharded.values import MissingValues, check_initializers, wrap_like
from headway.core.strategies.replica import average_gradients
from headway.core.strategies.sharding_records import ReplacedParameters, ShardedModels
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.layouts.adapters import check_adapters
from headway.layouts.context.context_parallel import ContextParallel
from headway.layouts.pipeline._torch import is_traceable_wrapper_subclass
from headway.layouts.pipeline.plain_calls import PlainCalls
from headway.layouts.pipeline.runner import PipelineRunner, PipelineTask, check_loss
from headway.layouts.pipeline.shared_parameters import SharedParameters
from headway.layouts.pipeline.stage_forward import ModuleRouter, is_routed
from headway.layouts.pipeline.stage_norms import check_norms, release_norms
from headway.layouts.pipeline.stage_rng import advance_generators, gather_used_generators, isolate_generators
from headway.layouts.pipeline.stages import PipelineState, find_stages, list_layer_data
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
        mesh_strategy: Strategy that shards the parameters of this rank's stages. None: they are not sharded. Default:
            None.

    Raises:
        UnsupportedError: If the schedule splits backward in two, and the layout has expert parallelism.
    """

    name = "pp"
    capabilities = Capabilities(
        several_models=False,
        rollback=False,
        lone_forward=False,
        whole_gradients=False,
        copies=False,
        local_training=False,
        splits_calls=True,
    )

    def __init__(
        self,
        collectives: Collectives,
        layout: Layout,
        options: PipelineOptions,
        mesh_strategy: "MeshStrategy | None" = None,
    ) -> None:
        super().__init__(collectives)
        if layout.ep > 1 and options.schedule in _SPLIT_SCHEDULES:
            raise UnsupportedError(
                f"schedule={options.schedule!r} splits backward in two, but with ep={layout.ep} ranks exchange tokens' gradients in "
                "the middle of a backward; use 'gpipe', '1f1b' or 'interleaved', or leave ep out"
            )
        scope.get_or_create(tracebacks.ExceptionHook).add_note(explain_error)
        self.layout = layout
        self.name = format_sizes(dict.fromkeys(layout.sizes))
        self._mesh_strategy = mesh_strategy
        self._options = options
        self._group = collectives.split(layout.list_groups("pp"))
        self.data_group = collectives.split(layout.data_groups)
        self._peers = self.data_group  # ranks along pp have optimizers of different stages
        self._token_group = collectives.split(layout.list_groups("ep")) if layout.ep > 1 else None
        self.data_shard = ShardIndex(layout.find_data_index(collectives.rank), layout.num_data_shards)
        self.gradient_divisor = layout.num_data_shards * layout.cp
        self._replaced = ReplacedParameters(tuple)
        self._shared_parameters = SharedParameters(collectives, self._group, layout)
        self._model: torch.nn.Module | None = None
        self._runner: PipelineRunner | None = None
        self._calls: PlainCalls | None = None
        self._state: PipelineState | None = None
        self._task: PipelineTask | None = None
        self._context: ContextParallel | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_ended = False
        process.release_at_end(self._end_process_group, ends_with_group=True)

    def _end_process_group(self) -> None:
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
                f"{type(model).__name__} was split into stages by a run that has ended, and this process has some of them; build it "
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
        sharded_models = self.everyone.runtime.scope.get_or_create(ShardedModels)
        split_options = (self.layout, self._options)
        split = sharded_models.find_record(model, split_options)
        missing = None
        context: ContextParallel | None = None
        if self._mesh_strategy is not None:
            context = self._mesh_strategy.sharder.split_sequences(model)
        try:
            if split is None:
                if self._mesh_strategy is None:
                    missing = MissingValues(model, self.everyone, self._expected_names)
                else:
                    self._mesh_strategy.sharder.check_shardable(model)
                    missing = self._mesh_strategy.sharder.broadcast_values(model, self._expected_names)
                split = self._split_model(model, transforms)
                sharded_models.record_model(model, split_options, split)
        except BaseException:
            if context is not None:
                context.release()
            raise
        router, state = split
        if self._mesh_strategy is not None:
            self._mesh_strategy.setup_model(model, (), state.list_remote_ids(), context)
            router.finish_forward = partial(self._mesh_strategy.end_forward, model)
        if context is not None:
            context.is_in_stage = lambda: router.current_forward is not None
        self._context = context
        router.context_parallel = context
        if missing is not None:
            missing.fill(model, router.stages.blocks, state.list_remote_ids())
        self._runner = PipelineRunner(model, router, self._group, self._options, self._token_group)
        self._calls = PlainCalls(self._runner)
        router.run_model = self._calls
        self._model = model
        self._state = state
        self._shared_parameters.find_parameters(model, state.holders)
        check_norms(model)
        return context

    def serve_inference_only(self, is_shared: bool) -> None:
        """Configure calls of the model for inference, without gradients. Call it after `setup_model`.

        Args:
            is_shared: Whether all ranks get the outputs. False: only the rank with the last stage gets them, and the
                others get None.
        """
        runner, calls = self._runner, self._calls
        assert runner is not None
        assert calls is not None

        def call_without_gradients(
            original_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            with torch.no_grad():
                return calls(original_call, args, kwargs, is_shared)

        runner.router.run_model = call_without_gradients

    def _split_model(
        self, model: torch.nn.Module, transforms: Iterable[Transform]
    ) -> tuple[ModuleRouter, PipelineState]:
        """Assign the model's modules to stages, apply the transforms, and keep only this rank's tensors.

        Args:
            model: Model to split.
            transforms: Functions that change the model before it is split.

        Raises:
            PrepareError: If the model has too few blocks, AdaLoRA adapters, or modules that need all ranks at once.
            UnsupportedError: If the model is compiled as a whole, or its blocks are compiled and the schedule splits
                backward in two.
        """
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
                "a compiled model cannot be split into stages; use TorchDynamoPlugin(use_regional_compilation=True)"
            )
        splits_backward = self._options.schedule in _SPLIT_SCHEDULES
        if splits_backward and any(getattr(block, "_compiled_call_impl", None) is not None for block in stages.blocks):
            raise UnsupportedError(
                f"schedule={self._options.schedule!r} splits backward in two, which compiled blocks do not allow; use '1f1b' or "
                "'interleaved', or leave compilation out"
            )
        rank_of_stage = [self._options.find_rank(stage, num_ranks) for stage in range(num_stages)]
        local = frozenset(stage for stage in range(num_stages) if rank_of_stage[stage] == rank)
        holders = {
            tensor_id: frozenset(rank_of_stage[stage] for stage in stage_indices)
            for tensor_id, stage_indices in stages.map_stages(model).items()
        }
        log.info("stages of %s: %s", type(model).__name__, stages.describe())
        router = ModuleRouter(model, stages, local, self.everyone.runtime.device)
        layer_data = list_layer_data(model)
        holders_by_name = self._keep_own_tensors(model, holders)
        return router, PipelineState(model, holders_by_name, layer_data, self.layout, self.everyone.rank)

    def _keep_own_tensors(
        self, model: torch.nn.Module, holders: dict[int, frozenset[int]]
    ) -> dict[str, frozenset[int]]:
        """Replace the tensors of other ranks with meta tensors, and move those of this rank to the device.

        This rank's tensors are not moved if they are on the meta device, or if another strategy will shard them.

        Args:
            model: Model that is split.
            holders: Pipeline ranks that hold each tensor, by the tensor's `id`. Entries for the moved tensors and the
                meta tensors are added.

        Returns:
            Pipeline ranks that hold each tensor, by name.
        """
        rank, device = self._group.rank, self.everyone.runtime.device
        replacements: dict[int, torch.Tensor] = {}  # by the ID of the original, and of the replacement itself
        holders_by_name: dict[str, frozenset[int]] = {}
        # `_mesh_strategy` moves only shards.
        moves_tensors = self._mesh_strategy is None
        for path, module in model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for name, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in replacements:
                        replacement = tensor
                        if rank not in holders[id(tensor)]:
                            replacement = wrap_like(tensor, _make_meta_tensor(tensor))
                        elif moves_tensors and not tensor.is_meta and tensor.device != device:
                            replacement = wrap_like(tensor, tensor.to(device))
                        if replacement is not tensor:
                            self._replaced.record_pairs([(tensor, replacement)])
                        replacements[id(tensor)] = replacements[id(replacement)] = replacement
                        holders[id(replacement)] = holders[id(tensor)]
                    table[name] = replacements[id(tensor)]
                    holders_by_name[f"{path}.{name}".lstrip(".")] = holders[id(tensor)]
        return holders_by_name

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer does not step each parameter separately. Otherwise register the optimizer.

        Raises:
            UnsupportedError: If the optimizer concatenates all parameters into one vector (LBFGS).
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS needs all parameters in one vector, and stages have them on different ranks; use AdamW"
            )
        if self._mesh_strategy is not None:
            self._mesh_strategy.check_optimizer(optimizer)
        self._optimizers.add(optimizer)

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaced a parameter, or the parameter itself if it was not replaced.

        The replacement is the full parameter on this rank's device, a shard, or a meta tensor if only other pipeline
        ranks hold the parameter.
        """
        replacement = self._replaced.get_current(parameter)
        return replacement if self._mesh_strategy is None else self._mesh_strategy.find_current(replacement)

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Shard a tensor like a parameter of equal full shape, and return this rank's part of the tensor.

        The part is the full tensor, a shard, or a meta tensor if only other pipeline ranks hold the parameter.
        """
        return torch.empty_like(tensor, device="meta") if parameter.is_meta else dtensors.shard_like(tensor, parameter)

    def free_gathered(self, model: torch.nn.Module) -> None:
        """Free the all-gathered parameters of a model. The next forward gathers them again.

        Do nothing if the parameters of stages are not sharded.
        """
        if self._mesh_strategy is not None:
            self._mesh_strategy.free_gathered(model)

    def silence_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Any:
        """Return a context in which backward produces zero gradients, even for all-gathered parameters."""
        return (
            super().silence_gradients(parameters)
            if self._mesh_strategy is None
            else self._mesh_strategy.silence_gradients(parameters)
        )

    # ---------------------------------------------------------------- micro-batches

    def compute_loss(
        self,
        fn: Callable[[Tree], torch.Tensor],
        batch: Tree,
        weigh: Callable[[Tree], float | torch.Tensor] | None,
        reduction: str,
        split: Callable[[Tree, int, int], Tree] | None = None,
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
            split: Function from (batch, start, stop) to these rows of the batch. None: slice all tensors that have as
                many rows as the batch.
        """
        if self._runner is None:
            return fn(batch)
        micro_batches = self._runner.split_batch(batch, split)
        if weigh is None:
            weights = [float(find_batch_size(micro_batch) or 1) for micro_batch in micro_batches]
        else:
            weights = [float(weigh(micro_batch)) for micro_batch in micro_batches]
        loss = torch.zeros((), device=self.everyone.runtime.device, requires_grad=True)
        self._task = PipelineTask(fn, micro_batches, weights, reduction, loss)
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
        self._shared_parameters.set_summed_gradients_aside()
        task, self._task = self._task, None
        if task is not None and self._context is not None:
            # The dry run of context parallelism needs all stages, so it cannot run in the middle of a schedule.
            with isolate_generators(self.everyone.runtime.hardware):
                for micro_batch in task.micro_batches:
                    self._context.run_dry_run_only(partial(task.fn, micro_batch))
        with nullcontext() if self._context is None else self._context.backward_context():
            if task is not None:
                self._run_schedule(task, factor, precision)
                return
            pending_calls = [] if self._calls is None else self._calls.list_pending()
            super().backward(loss, factor, precision, **kwargs)
            if self._calls is not None:
                self._calls.backward(pending_calls, bool(kwargs.get("retain_graph")))

    def _run_schedule(self, task: PipelineTask, factor: float, precision: Precision) -> None:
        """Run forward and backward of a batch, and store the value of its loss in the placeholder. All ranks must call it.

        Args:
            task: Batch to compute.
            factor: Factor by which the loss is multiplied in backward. The stored value does not include it.
            precision: Precision of the run, which scales losses under fp16.
        """
        runner = self._runner
        assert runner is not None
        last, total = runner.num_stages - 1, torch.zeros((), device=runner.device)

        def compute_stage(stage_index: int, number: int, received: Tree) -> Tree:
            stage_rng.seed_micro_batch(stage_index, number)
            is_last = stage_index == last
            output = runner.router.run(
                stage_index, received, lambda: task.fn(task.micro_batches[number]), runs_to_end=is_last
            )
            if not is_last:
                return output
            check_loss(output)
            share = task.compute_share(number)
            if task.weights[number]:  # a mean over no items may be NaN
                total.add_(output.detach().reshape(()).float(), alpha=share)
            return precision.scale_loss(output.reshape(())) * (factor * share)

        with torch.enable_grad(), isolate_generators(runner.group.runtime.hardware) as stage_rng:
            code = getattr(task.fn, "__code__", type(task.fn))  # a lambda is a new object in each step
            batch = runner.begin_batch(task.micro_batches, compute_stage, code)
            weightless = {number for number, weight in enumerate(task.weights) if not weight or not factor}
            for stage in batch.stages.values():
                stage.weightless = weightless
                if self._token_group is not None:  # other ranks wait for the backward of their tokens
                    stage.silence_gradients = partial(self.silence_gradients, self._list_trained_parameters())
            runner.run_schedule(batch, has_backward=True)
        advance_generators(gather_used_generators(stage_rng.used, runner.group), runner.device)
        total = total.reshape(1)
        runner.group.sum_in_place([total])
        with torch.no_grad():
            task.loss.copy_(total[0])

    def _list_trained_parameters(self) -> list[torch.nn.Parameter]:
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

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Reduce the gradients of an accumulation window. Every rank must call it.

        Gradients of parameters that several stages hold are summed over these stages. All gradients are averaged over
        the replicas of the pipeline. If the replicas are not sharded, the first replica's module buffers are broadcast
        in training mode. Both arguments are ignored.
        """
        if self._model is None:
            return
        if self._mesh_strategy is not None:
            self._mesh_strategy.reduce_gradients()
        self._shared_parameters.sum_gradients()
        if self._mesh_strategy is None and self.data_group.world_size > 1:
            trained = [p for p in self._model.parameters() if p.requires_grad and not p.is_meta]
            average_gradients(trained, self.data_group)
            buffers = [buffer for buffer in self._model.buffers() if buffer.numel() and not buffer.is_meta]
            if self._model.training and buffers:
                self.data_group.broadcast_into(buffers)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the parameters by a factor.

        If the stages are sharded, this includes the unsharded gradients that FSDP has not reduced yet.
        """
        super().scale_gradients(parameters, factor)
        if self._model is not None and self._mesh_strategy is not None:
            unsharded_grads = fsdp_state.list_unreduced_gradients(fsdp_state.iterate_records(self._model))
            for grad in map(dtensors.get_local_shard, unsharded_grads):
                grad.mul_(factor)

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients of those parameters that its stages contain."""
        return dtensors.get_local_gradients(map(self.find_current, parameters))

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Discard the gradients of this rank's stages, and a batch from `compute_loss` whose backward has not run."""
        self._task = None
        self._shared_parameters.drop_gradients()
        own_parameters: Any = [self.find_current(p) for p in parameters]
        if self._mesh_strategy is None:
            super().drop_gradients(own_parameters)
        else:
            self._mesh_strategy.drop_gradients(own_parameters)

    def compute_total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the gradient norm over all stages. A parameter that several stages hold counts once.

        Every rank must call it, with parameters of the whole model.
        """
        counted = [p for p in map(self.find_current, parameters) if not self._shared_parameters.is_counted_elsewhere(p)]
        return compute_total_norm(counted, norm_type, self.everyone, self.layout.num_ranks // self.layout.pp)

    def count_holders(self, parameter: torch.Tensor) -> int:
        """Return the number of ranks of this rank's stages that store each element of a parameter.

        Return 0 if only other stages hold the parameter, or if the first of its stages counts it.
        """
        if parameter.is_meta or self._shared_parameters.is_counted_elsewhere(parameter):
            return 0
        return count_copies(parameter, self.layout.num_ranks // self.layout.pp)

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
        if self._mesh_strategy is None:
            return super().step_optimizer(optimizer, precision, closure)
        return self._mesh_strategy.step_optimizer(optimizer, precision, closure)

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
        if self._model is not None:
            release_norms(self._model)
        if self._runner is not None:
            self._runner.router.run_model = None
            self._runner.router.finish_forward = None
            self._runner.router.context_parallel = None
        if self._mesh_strategy is not None:
            self._mesh_strategy.release_model(model)
        self._runner = None
        self._calls = None
        self._state = None
        self._model = None
        self._task = None
        self._context = None
        self._shared_parameters.release()
        self._replaced.forget_released()
        self._optimizers.clear()


def _make_meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a tensor that other ranks hold.

    torchao's quantized tensors do not implement `empty_like`, so their inner tensors are replaced one by one. A
    checkpoint needs the shapes of all inner tensors on every rank.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor, device="meta")
    names, metadata = tensor.__tensor_flatten__()
    inner_tensors = {name: _make_meta_tensor(getattr(tensor, name)) for name in names}
    meta: torch.Tensor = type(tensor).__tensor_unflatten__(inner_tensors, metadata, tensor.shape, tensor.stride())
    return meta
