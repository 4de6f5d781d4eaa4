"""`Strategy`, the base class of classes that replicate or shard a model, and `SingleStrategy` for one process."""

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.data.sampling.shard import ShardIndex
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.moving import move_module
from headway.core.strategies._torch import foreach_mul_
from headway.core.strategies.checkpoint_protocol import CheckpointStrategy
from headway.core.strategies.comparison_protocol import ComparedStrategy
from headway.core.strategies.placeholders import Placeholder
from headway.core.strategies.replay_protocol import ReplayStrategy
from headway.errors import LossError, PrepareError, UnsupportedError

Transform = Callable[[torch.nn.Module], torch.nn.Module]
"""Function that changes a model before it is wrapped: activation checkpointing, compilation or sharding."""
Engine = Callable[..., Any]
"""Callable that runs a prepared model's forward with gradients.

It also runs forwards without gradients if its attribute `serves_evaluation` is true. If it has a method `expose_output`, the
model's call by the engine returns `expose_output(output)` to the engine, and the engine returns the output itself.
"""

_NO_CONTEXT = nullcontext()
_CONSTANT_LOSS = (
    "backward() got a constant: a tensor made with requires_grad=True, which no model computed. No parameter of this rank gets a "
    "gradient from it, and the other ranks wait for this rank's gradients forever. For a batch that has nothing to learn from, "
    "still call the model, and give a loss of zero that depends on its output: (output * 0).sum()"
)


@dataclass(frozen=True)
class Capabilities:
    """Features that a strategy supports. Callers check these instead of the strategy's type.

    Attributes:
        several_models: Whether more than one model may be prepared.
        deferred_sync: Whether gradients can stay unreduced for some micro-batches.
        clip_by_value: Whether gradients can be clamped element by element.
        rollback: Whether a batch can be undone and run again, as automatic micro-batching requires.
        lone_forward: Whether a model may be called on one rank alone. False: its forward is a collective.
        whole_gradients: Whether each rank has all gradients, with equal values on all ranks. False: each rank has only
            its shards.
        copies: Whether a prepared model can be copied and pickled. False: each rank has only a part of the model, or a
            copy would lose the engine that runs it.
        optimizer_state: Whether state_dict() of a prepared optimizer contains its state. False: an engine keeps the
            state, and only checkpoints contain it.
        scales_losses: Whether an engine scales fp16 losses itself and skips updates whose gradients overflow.
        lone_pieces: Whether each rank can compute the micro-batches of a batch without its peers, because gradients are
            reduced after the last one. False: every forward and backward contains collectives. A rank that runs out of
            memory must then join the collectives of its peers with `join_collective`.
        local_training: Whether ranks may train separately for some updates (local SGD). False: each rank has only a
            part of the model, or gradients are summed over the ranks for every batch.
        splits_calls: Whether each call of a prepared model is split into micro-batches by its rows, as in a pipeline.
    """

    several_models: bool = True
    deferred_sync: bool = True
    clip_by_value: bool = True
    rollback: bool = True
    lone_forward: bool = True
    whole_gradients: bool = True
    copies: bool = True
    optimizer_state: bool = True
    scales_losses: bool = False
    lone_pieces: bool = True
    local_training: bool = True
    splits_calls: bool = False

    def require(self, name: str, strategy: str, remedy: str) -> None:
        """Raise `UnsupportedError` if the strategy lacks a capability. All strategies use the same wording.

        Args:
            name: Name of the attribute.
            strategy: Name of the strategy for the message.
            remedy: Advice to the user for the message.

        Raises:
            UnsupportedError: If the capability is missing.
        """
        if not getattr(self, name):
            raise UnsupportedError(f"the {strategy} strategy does not support {name.replace('_', ' ')}; {remedy}")


class Strategy(ReplayStrategy, CheckpointStrategy, ComparedStrategy):
    """Base class of all strategies. Its defaults keep the full model on each rank and do not communicate.

    This class defines the methods that training needs. It inherits three protocols with defaults: `ReplayStrategy`
    discards gradients and repeats batches, `CheckpointStrategy` saves and loads values, and `ComparedStrategy` names
    the parameters that ranks compare.

    Args:
        collectives: Collectives over all ranks.

    Attributes:
        name: Name of the strategy in messages.
        capabilities: Features that the strategy supports.
        data_shard: Index of this rank's shard of the data, and the number of shards. They can differ from the rank and
            the world size.
        data_group: Collectives over which loss weights and metrics are reduced: one rank per shard of the data.
        everyone: Collectives over all ranks, for votes, decisions about gradients, replays, checkpoints and the
            loaders' seed.
        gradient_divisor: Number by which the engine divides summed gradients. The loss is multiplied by it in advance.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    data_shard: ShardIndex
    data_group: Collectives
    everyone: Collectives
    gradient_divisor: int

    def __init__(self, collectives: Collectives) -> None:
        self.everyone = collectives
        self.data_group = collectives
        self._peers = collectives
        self.data_shard = ShardIndex(collectives.rank, collectives.world_size)
        self.gradient_divisor = 1
        self._expected_names: Set[str] = frozenset()

    def announce_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Receive all models of a `prepare()` call, before `setup_model` is called for each of them. Ignored by default.

        Override this method if the setup of one model depends on the others.

        Args:
            models: Models that `prepare()` was given.
        """

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Wrap or shard a model. `prepare()` calls this once for each model.

        Args:
            model: Model to prepare. Parameter names in checkpoints are those that it has before this call.
            transforms: Functions to apply to the model before it is wrapped.

        Returns:
            Engine that runs forwards, or None to call the model itself.
        """
        for transform in transforms:
            transform(model)
        return None

    def create_engine(
        self, optimizers: Sequence[torch.optim.Optimizer], precision: str, num_steps: int, micro_batches: Sequence[int]
    ) -> Sequence[torch.optim.Optimizer]:
        """Create an engine that needs the model and its optimizers together, such as DeepSpeed's.

        Called at the end of each `prepare()`. The engine is created once, when both are prepared. By default there is
        no engine.

        Args:
            optimizers: All prepared optimizers.
            precision: "no", "bf16" or "fp16".
            num_steps: Micro-batches per update.
            micro_batches: Batch size per rank of each prepared loader whose batch size is known.

        Returns:
            Optimizers of the engine, which step in place of the prepared ones. Empty if no engine was created.
        """
        return ()

    def replace_placeholder(self, placeholder: Placeholder, update_ratio: int) -> Any:
        """Return the real optimizer or scheduler for a placeholder, as the engine's configuration defines it.

        The default always raises `PrepareError`. Strategies whose engine has such a configuration override it.

        Args:
            placeholder: Placeholder that the script has prepared.
            update_ratio: Number of updates that a single-process run makes on the data of one update of this run. A
                scheduler's `total_num_steps`, which is given for a single-process run, is divided by it.

        Raises:
            PrepareError: If this strategy has no engine whose configuration defines the object.
        """
        raise PrepareError(
            f"{type(placeholder).__name__} is a placeholder for what {placeholder.defined_by} defines, but this run uses "
            f"{self.name}; give a real one, or strategy={placeholder.engine!r}"
        )

    def move_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Move a model to this process's device, before `setup_model`.

        A sharding strategy may leave this to `setup_model`.
        """
        move_module(model, device)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer cannot step on the parameters as this strategy stores them.

        Raises:
            UnsupportedError: If the optimizer cannot step on them, for example because they are shards.
        """

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter that has replaced `parameter` since `setup_model`, such as its shard.

        Return `parameter` itself if it was not replaced.
        """
        return parameter

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor, sharded like a parameter.

        If the parameter is not sharded, the tensor is returned unchanged.

        Args:
            tensor: Full tensor of the parameter's unsharded shape, such as an optimizer state.
            parameter: Parameter as this strategy stores it.
        """
        return tensor

    def forward_context(self, precision: Precision) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return a function that creates the context of a prepared model's forward, or None if none is needed."""
        return precision.autocast if precision.is_mixed else None

    def micro_batch_context(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Return the context in which a micro-batch runs.

        Args:
            model: Prepared model.
            sync: Whether the backward of the micro-batch reduces gradients.
        """
        return _NO_CONTEXT

    def trains_locally(self) -> bool:
        """Whether a model is inside `keep_local`, so that the gradients of ranks may differ. Default: False."""
        return False

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which neither gradients nor buffers of the model are communicated.

        This context takes precedence over that of `micro_batch_context`.

        Raises:
            UnsupportedError: If the strategy does not support `local_training`.
        """
        remedy = "use strategy='ddp' without microbatching='auto', or drop local SGD"
        self.capabilities.require("local_training", self.name, remedy)
        return nullcontext()

    def compute_loss(
        self,
        fn: Callable[[Any], torch.Tensor],
        batch: Any,
        weigh: Callable[[Any], float | torch.Tensor] | None,
        reduction: str,
        split: Callable[[Any, int, int], Any] | None = None,
    ) -> torch.Tensor:
        """Return the loss of a batch, `fn(batch)`, or a placeholder whose value is computed in `backward`.

        Args:
            fn: Function from the batch, or a micro-batch of it, to its loss.
            batch: Nested tensors.
            weigh: Function from the batch, or a micro-batch, to the number of items that its loss covers. If None, the
                number of rows is used.
            reduction: "mean" over the items, or "sum".
            split: Function from (batch, start, stop) to these rows of the batch, for a strategy that runs it in
                micro-batches. None: slice all tensors that have as many rows as the batch.
        """
        return fn(batch)

    def unshard_loss(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """Convert a loss to a plain tensor for its backward, if that is necessary. All ranks must call this.

        Args:
            loss: Loss, which can be a DTensor.
            factor: Factor by which backward multiplies the loss.

        Returns:
            The loss as a plain tensor, and the factor for it. By default, both are returned unchanged.
        """
        return loss, factor

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward, which accumulates the gradient of `loss * factor` in the parameters.

        Args:
            loss: Loss of the micro-batch.
            factor: Factor for the gradient.
            precision: Precision of the run, which scales the loss if it has a gradient scaler.
            kwargs: Further arguments of `torch.autograd.backward`.

        Raises:
            LossError: If the loss is a constant while other ranks wait for this rank's gradients.
        """
        # A hook may run the model's backward, as in the cached losses of sentence-transformers (GradCache).
        if loss.is_leaf and not loss._backward_hooks and self.must_join_backward():
            raise LossError(_CONSTANT_LOSS)
        if precision.scaler is not None:
            loss = precision.scale_loss(loss)
        # A new tensor each time: autograd makes it the storage of `grad` if the loss is a view of a parameter.
        seed = torch.full_like(loss, factor, requires_grad=False)
        torch.autograd.backward(loss, seed, **kwargs)

    def must_join_backward(self) -> bool:
        """Whether the backward of other ranks blocks until this rank runs a backward, too."""
        return False

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the existing gradients of the parameters as plain tensors that may be changed in place.

        For a sharded gradient this is this rank's shard.
        """
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Reduce gradients that the last backward of the accumulation window has not reduced, and synchronize buffers.

        Args:
            parameters: Trainable parameters of the window. Default: ().
            has_gaps: Whether `prepare_reduction` has reported parameters without a gradient on any rank. Default:
                False.
        """

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply gradients by a factor, to correct them for the actual total loss weight of the accumulation window.

        Args:
            parameters: Parameters whose gradients are changed.
            factor: Factor for the gradients.
        """
        grads = self.get_local_gradients(parameters)
        if grads:
            foreach_mul_(grads, factor)

    def compute_total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients as a plain 0-d tensor, equal on all ranks.

        For sharded models this is a collective. The norm is not finite if any gradient on any rank is not finite.

        Args:
            parameters: Parameters whose gradients are measured.
            norm_type: Order of the norm; 2 for the Euclidean norm.
        """
        return torch.nn.utils.get_total_norm(self.get_local_gradients(parameters), norm_type)

    def count_holders(self, parameter: torch.Tensor) -> int:
        """Return the number of ranks that store each element of this rank's part of a parameter.

        A sum over all ranks of values that are divided by this number counts each element once. 0: this rank has no part, or
        another rank counts the part. The default implementation returns the number of all ranks.

        Args:
            parameter: Parameter as this strategy stores it.
        """
        return self.everyone.world_size

    def clip_gradients(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clip gradients by their global norm, and return the norm before clipping as a plain 0-d tensor.

        Args:
            parameters: Parameters whose gradients are clipped.
            max_norm: Largest norm after clipping.
            norm_type: Order of the norm; 2 for the Euclidean norm.
            known: Total norm of these gradients if it was already computed. If None, it is computed here.
        """
        norm = self.compute_total_norm(parameters, norm_type) if known is None else known
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch; avoids a host synchronization
        # One kernel multiplies all gradients of equal device and dtype.
        batches: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self.get_local_gradients(parameters):
            batches.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in batches.items():
            foreach_mul_(grads, factor.to(device))
        return norm

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer. Return False if the gradient scaler (fp16) skipped the update.

        Args:
            optimizer: torch's own optimizer.
            precision: Precision of the run. Its gradient scaler can skip the step.
            closure: Closure as for a torch optimizer, or None.
        """
        return precision.step(optimizer, closure)

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call an optimizer method, such as "train", that changes parameters. Do nothing if the optimizer lacks it."""
        function = getattr(optimizer, method, None)
        if function is not None:
            function()

    def keeps_whole_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's states are kept as full tensors instead of being sharded like the parameters."""
        return self.capabilities.whole_gradients

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Drop all references to a prepared model, so that its memory can be freed.

        Args:
            model: Model to release. Default: None, which releases all models.

        Raises:
            UnsupportedError: If the given model cannot be restored to its original form.
        """


def does_override(strategy: Strategy, method: Callable[..., Any]) -> bool:
    """Whether a strategy overrides a method whose default in `Strategy` does nothing.

    The training step checks this once and then skips the calls that would do nothing.

    Args:
        strategy: Strategy of the run.
        method: Method of `Strategy`, such as `Strategy.reduce_gradients`.
    """
    return getattr(type(strategy), method.__name__) is not method


class SingleStrategy(Strategy):
    """Strategy of a single process. It neither wraps nor shards the model."""

    name = "single"
