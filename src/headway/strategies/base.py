"""The strategy protocol: the narrow set of questions that a way of spreading a model over processes answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.data.sampling.shard import ShardIndex
from headway.errors import UnsupportedError
from headway.precision.base import Precision
from headway.runtime.collective_log import Step
from headway.runtime.collectives.checked import Collectives
from headway.strategies.deepspeed.dummies import DummyOptim, DummyScheduler

Transform = Callable[[torch.nn.Module], torch.nn.Module]
"""Something done to a model before it is wrapped: activation checkpointing, compile, sharding."""
Engine = Callable[..., Any]
"""What a prepared model's forward goes through when gradients are wanted, or always where it says `serves_evaluation`."""


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

    def require(self, name: str, strategy: str, remedy: str) -> None:
        """Raise the one uniform error where the capability is missing.

        Raises:
            UnsupportedError: it is.
        """
        if not getattr(self, name):
            raise UnsupportedError(f"the {strategy} strategy does not support {name.replace('_', ' ')}; {remedy}")


class Strategy(Protocol):
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
    capabilities: Capabilities
    data_shard: ShardIndex
    data_group: Collectives
    everyone: Collectives
    gradient_divisor: int

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Wrap or shard a model once; parameter names are those of the bare model, captured before."""

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

    def stand_for(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """The optimizer or schedule that a stand-in stands for, which the engine's own configuration defines.

        Args:
            dummy: the stand-in.
            share: of how many processes' updates each one makes its own.

        Raises:
            PrepareError: the engine has no configuration of its own.
        """

    def materialise(self, model: torch.nn.Module) -> None:
        """Give a model that was built without memory (meta device) its values, alike on all ranks, here or in `setup`.

        Called before `place`.

        Raises:
            PrepareError: whole models come with their values.
        """

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """Bring a model to this process's device, before `setup`; what shards it may leave that to `setup`."""

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer can step on parameters as this strategy leaves them.

        Raises:
            UnsupportedError: it cannot.
        """

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter that stands where this one stood before `setup`: a shard has taken its place; else itself."""

    def cut(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A whole tensor of the parameter's shape (an optimizer's state, say) as it is kept beside `parameter`."""

    def at_rest(self, model: torch.nn.Module) -> None:
        """From here to the next forward, the model's names and parameters may be read: nothing is gathered any more."""

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own module."""

    def forward_context(self, precision: Precision) -> Callable[[], AbstractContextManager[object]] | None:
        """What makes the context of a prepared model's forward; None where it needs none."""

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch: do gradients travel in its backward?"""

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A block in which nothing of the model travels, neither gradients nor buffers, whatever `accumulate` says."""

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

    def plain(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """The loss as a plain tensor, and what its backward is multiplied by; all ranks ask for it together."""

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Add the gradient of `loss * factor`."""

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Another backward follows on forwards whose gradients have travelled already; they must travel again."""

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate what `reduce_gradients` will need, so that memory cannot run out within it.

        Returns:
            How many of the parameters have no gradient here, where that matters to the others.
        """

    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[object]:
        """A block whose backward gives these parameters gradients of zero, whatever comes: its loss weighs nothing."""

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forget the gradients of a window that failed, those that an engine still keeps among them."""

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Any:
        """Take their gradients out, those that an engine keeps among them; returns what `put_back` needs."""

    def put_back(self, kept: Any) -> None:
        """Let these parameters have the gradients that were set aside, instead of those that came since."""

    def break_off(self) -> None:
        """A forward or backward ended in an error here: free what it has left behind, and be ready to stand in for it."""

    def members(self, step: Step) -> Sequence[int]:
        """The ranks with which this one has an exchange that a batch's trail has noted."""

    def stand_in(self, step: Step) -> None:
        """Take part in it without results, as the others wait in it.

        Raises:
            CollectiveError: it is an exchange that nobody can stand in for.
        """

    def snapshot(self) -> Any:
        """What `restore` needs to take a batch back, beside gradients and buffers."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good; what the batch has left gathered or in flight is let go."""

    def peers(self) -> Collectives | None:
        """Those whose optimizers must be like this rank's; None while ranks learn apart, each from its own gradients."""

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters, by name, that each of them holds whole, and alike."""

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of each gradient that there is, as plain tensors that may be changed in place."""

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """What remains to be reduced when the window's last backward has returned: buffers, deferred gradients.

        Args:
            parameters: those of the window that learn.
            has_gaps: on some rank, some of them have no gradient (what `ready` returned is not 0 everywhere).
        """

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply gradients: the one correction of (sum, weight)."""

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of all gradients together, a plain 0-d tensor, the same on all ranks; sharded: one exchange.

        Where any gradient on any rank is not finite, neither is the norm.
        """

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

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step; False where the update was skipped."""

    def rollback(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drop the gradients of an update that will not happen."""

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model, or all, so that their memory can go.

        Raises:
            UnsupportedError: a model that was given cannot become the bare one again.
        """

    def exchange_order(self, model: torch.nn.Module) -> list[int]:
        """What decides about the last bits of gradients beside the ranks: the order in which they travel; all ranks call it."""

    def keep_exchange_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Begin with the order of the run that is resumed; all ranks call it."""

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors by the bare module's names, one at a time; sharded ones as DTensors or pieces, never gathered."""

    def part_of(self, parameter: torch.Tensor) -> Any:
        """A parameter as `export_state` gives it: itself, or the piece that this rank holds."""

    def exposed(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """A block in which a prepared optimizer shows its state, where an engine keeps it elsewhere."""

    def settle(self) -> None:
        """Values were put into what `export_state` gives, and states into optimizers: go on from them. All ranks call it."""
