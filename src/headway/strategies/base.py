"""What a strategy is: the narrow set of questions that a way of spreading a model over processes answers.

One process: plain PyTorch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.data.sampling.shard import ShardIndex
from headway.errors import CollectiveError, PrepareError, UnsupportedError
from headway.precision.mixed import Precision
from headway.runtime.collective_log import Step
from headway.runtime.collectives.checked import Collectives
from headway.runtime.transfers import move
from headway.strategies.deepspeed.plugin import DummyOptim, DummyScheduler
from headway.strategies.fully_sharded.values import check_initialisers, fill

Transform = Callable[[torch.nn.Module], torch.nn.Module]
"""Something done to a model before it is wrapped: activation checkpointing, compile, sharding."""
Engine = Callable[..., Any]
"""What a prepared model's forward goes through when gradients are wanted, or always where it says `serves_evaluation`."""

_SYNCHRONISED = nullcontext()


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do; asked once, generically.

    Attributes:
        several_models: more than one model may be prepared.
        deferred_sync: gradients can stay local for some micro-batches.
        clip_by_value: gradients can be clamped element by element.
        rollback: a step can be taken back.
        lone_forward: a model may be called on one rank alone; False: its forward is an exchange.
        whole_gradients: each rank's gradients are all of them, alike on all ranks; False: a rank holds a part.
        copies: a prepared model can be copied and pickled; False: a rank holds a part, and a copy would lose its engine.
        optimizer_state: a prepared optimizer's state_dict() is its state; False: an engine keeps it, and checkpoints have it.
        scales_losses: an engine scales fp16 losses itself, and skips updates whose gradients overflow.
        lone_pieces: each rank computes the pieces of a batch alone, and gradients travel after the last one; False: every
            forward and backward is an exchange, and a rank whose memory ran out stands in for itself (`stand_in`).
        local_training: ranks may learn apart for a while (local SGD); False: a rank holds a part, or all sum every batch.
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

    def require(self, name: str, strategy: str, remedy: str) -> None:
        """Raise the one uniform error where the capability is missing.

        Raises:
            UnsupportedError: it is.
        """
        if not getattr(self, name):
            raise UnsupportedError(f"the {strategy} strategy does not support {name.replace('_', ' ')}; {remedy}")


class Strategy:
    """One way to spread training over processes.

    Attributes:
        name: for messages.
        capabilities: what it can do.
        data_shard: this process's slice of the data; not always (rank, world size).
        data_group: the processes among which weights of losses and metrics reduce: one of each shard of the data.
        everyone: all processes: for votes, verdicts on gradients, replays, checkpoints and the loaders' seed.
        gradient_divisor: what the engine divides summed gradients by on its own; the loss is multiplied by it.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    data_shard: ShardIndex
    data_group: Collectives
    everyone: Collectives
    gradient_divisor: int

    def __init__(self, collectives: Collectives) -> None:
        self.data_group = self.everyone = self._peers = collectives
        self.data_shard = ShardIndex(collectives.rank, collectives.world_size)
        self.gradient_divisor = 1
        self._expected: Set[str] = frozenset()
        self._seeds: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Wrap or shard a model once; parameter names are those of the bare model, captured before."""
        for transform in transforms:
            transform(model)
        return None

    def adopt(
        self, optimizers: Sequence[torch.optim.Optimizer], precision: str, num_steps: int, micro_batches: Sequence[int]
    ) -> Sequence[torch.optim.Optimizer]:
        """Objects have been prepared: an engine that takes a model and its optimizer together is made here, once.

        Args:
            optimizers: all that are prepared.
            precision: "no", "bf16" or "fp16".
            num_steps: micro-batches per update.
            micro_batches: rows per rank of each prepared loader that says.

        Returns:
            Optimizers of the engine's own that it has made, which step for those that are prepared.
        """
        return ()

    def stand_for(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """The optimizer or schedule that a stand-in stands for, which the engine's own configuration defines.

        Args:
            dummy: the stand-in.
            share: of how many processes' updates each one makes its own.

        Raises:
            PrepareError: the engine has no configuration of its own.
        """
        raise PrepareError(
            f"{type(dummy).__name__} is a placeholder for what DeepSpeed's JSON defines, but this run uses {self.name}; give a real "
            "one, or strategy='deepspeed'"
        )

    def expect(self, names: Set[str]) -> None:
        """The values of these tensors of the next model come when it is set up, or after that: from files, or from rank 0."""
        self._expected = names

    def materialise(self, model: torch.nn.Module) -> None:
        """Give a model that was built without memory (meta device) its values, alike on all ranks, here or in `setup`.

        Called before `place`. What comes later (`expect`) gets memory only.

        Raises:
            PrepareError: whole models come with their values, or all of them are expected.
        """
        lazy = [name for name, p in model.named_parameters() if p.is_meta and name not in self._expected]
        if lazy:
            raise PrepareError(
                f"{len(lazy)} parameters of {type(model).__name__} are on the meta device (as {lazy[0]!r}); before prepare(), name "
                "the checkpoint that has their values: accelerator.load_weights(model, folder)"
            )
        check_initialisers(model, self._expected)
        fill(model, (), self.everyone.runtime.device, self.everyone, self._expected)

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """Bring a model to this process's device, before `setup`; what shards it may leave that to `setup`."""
        move(model, device)

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer can step on parameters as this strategy leaves them.

        Raises:
            UnsupportedError: it cannot.
        """

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter that stands where this one stood before `setup`: a shard has taken its place; else itself."""
        return parameter

    def cut(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A whole tensor of the parameter's shape (an optimizer's state, say) as it is kept beside `parameter`."""
        return tensor

    def at_rest(self, model: torch.nn.Module) -> None:
        """From here to the next forward, the model's names and parameters may be read: nothing is gathered any more."""

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own module."""
        return model

    def forward_context(self, precision: Precision) -> Callable[[], AbstractContextManager[Any]] | None:
        """What makes the context of a prepared model's forward; None where it needs none."""
        return precision.autocast if precision.is_mixed else None

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch: do gradients travel in its backward?"""
        return _SYNCHRONISED

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A block in which nothing of the model travels, neither gradients nor buffers, whatever `accumulate` says.

        Raises:
            UnsupportedError: the strategy has no `local_training`.
        """
        remedy = "use strategy='ddp' without microbatching='auto', or drop local SGD"
        self.capabilities.require("local_training", self.name, remedy)
        return nullcontext()

    def compute(
        self,
        fn: Callable[[Any], torch.Tensor],
        batch: Any,
        weigh: Callable[[Any], float | torch.Tensor] | None,
        reduction: str,
    ) -> torch.Tensor:
        """The loss of a batch that is held as a function: `fn(batch)`, or what stands for it until backward has computed it.

        Args:
            fn: from the batch, or a part of it, to its loss.
            batch: nested tensors.
            weigh: from the batch, or a part, to the items its loss is taken over; None: its rows.
            reduction: "mean" over those, or "sum".
        """
        return fn(batch)

    def plain(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """The loss as a plain tensor, and what its backward is multiplied by; all ranks ask for it together."""
        return loss, factor

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Add the gradient of `loss * factor`."""
        loss = precision.scale_loss(loss)
        key = (factor, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None or seed.shape != loss.shape:
            seed = torch.full_like(loss, factor, requires_grad=False)
            if len(self._seeds) > 64:  # token counts differ from batch to batch
                self._seeds.clear()
            self._seeds[key] = seed
        torch.autograd.backward(loss, seed, **kwargs)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Another backward follows on forwards whose gradients have travelled already; they must travel again."""

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate what `reduce_gradients` will need, so that memory cannot run out within it.

        Returns:
            How many of the parameters have no gradient here, where that matters to the others.
        """
        return 0

    @contextmanager
    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """A block whose backward gives these parameters gradients of zero, whatever comes: its loss weighs nothing."""
        with ExitStack() as stack:
            for parameter in parameters:
                if parameter.requires_grad:
                    stack.enter_context(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]
            yield

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forget the gradients of a window that failed, those that an engine still keeps among them."""
        for parameter in parameters:
            parameter.grad = None

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Any:
        """Take their gradients out, those that an engine keeps among them; returns what `put_back` needs."""
        kept = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def put_back(self, kept: Any) -> None:
        """Let these parameters have the gradients that were set aside, instead of those that came since."""
        for parameter, grad in kept:
            parameter.grad = grad

    def break_off(self) -> None:
        """A forward or backward ended in an error here: free what it has left behind, and be ready to stand in for it."""

    def members(self, step: Step) -> Sequence[int]:
        """The ranks with which this one has an exchange that a batch's trail has noted."""
        return self._collectives_of(step).members()

    def stand_in(self, step: Step) -> None:
        """Take part in it without results, as the others wait in it.

        Raises:
            CollectiveError: it is an exchange that nobody can stand in for.
        """
        self._collectives_of(step).stand_in(step)

    def _collectives_of(self, step: Step) -> Collectives:
        for group in (self.everyone, self.data_group):
            if group.place == step[0]:
                return group
        raise CollectiveError(f"{step[1]} of {step[0]} is no exchange of the {self.name} strategy")

    def snapshot(self) -> Any:
        """What `restore` needs to take a batch back, beside gradients and buffers."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good; what the batch has left gathered or in flight is let go."""

    def peers(self) -> Collectives | None:
        """Those whose optimizers must be like this rank's; None while ranks learn apart, each from its own gradients."""
        return self._peers

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters, by name, that each of them holds whole, and alike."""
        return ()

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of each gradient that there is, as plain tensors that may be changed in place."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """What remains to be reduced when the window's last backward has returned: buffers, deferred gradients.

        Args:
            parameters: those of the window that learn.
            has_gaps: on some rank, some of them have no gradient (what `ready` returned is not 0 everywhere).
        """

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply gradients: the one correction of (sum, weight)."""
        grads = self.local_gradients(parameters)
        if grads:
            torch._foreach_mul_(grads, factor)

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of all gradients together, a plain 0-d tensor, the same on all ranks; sharded: one exchange.

        Where any gradient on any rank is not finite, neither is the norm.
        """
        return torch.nn.utils.get_total_norm(self.local_gradients(parameters), norm_type)

    def clip(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clip by the global norm; returns the norm from before, a plain 0-d tensor.

        Args:
            parameters: whose gradients.
            max_norm: the most it may be.
            norm_type: 2 for the Euclidean norm.
            known: the total norm of these gradients, where it is known already.
        """
        norm = self.total_norm(parameters, norm_type) if known is None else known
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch does; nobody waits for the device
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self.local_gradients(parameters):
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), found in alike.items():
            torch._foreach_mul_(found, factor.to(device))
        return norm

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step; False where the update was skipped."""
        return precision.step(optimizer, closure)

    def rollback(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drop the gradients of an update that will not happen."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model, or all, so that their memory can go.

        Raises:
            UnsupportedError: a model that was given cannot become the bare one again.
        """
        self._seeds.clear()

    def exchange_order(self, model: torch.nn.Module) -> list[int]:
        """What decides about the last bits of gradients beside the ranks: the order in which they travel; all ranks call it."""
        return []

    def keep_exchange_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Begin with the order of the run that is resumed; all ranks call it."""

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors by the bare module's names, one at a time; sharded ones as DTensors or pieces, never gathered."""
        yield from self.unwrap(model).state_dict().items()

    def part_of(self, parameter: torch.Tensor) -> Any:
        """A parameter as `export_state` gives it: itself, or the piece that this rank holds."""
        return parameter

    def exposed(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """A block in which a prepared optimizer shows its state, where an engine keeps it elsewhere."""
        return nullcontext()

    def settle(self) -> None:
        """Values were put into what `export_state` gives, and states into optimizers: go on from them. All ranks call it."""


class SingleStrategy(Strategy):
    """The model as it is, on the one process there is."""

    name = "single"
