"""One process: plain PyTorch, and the base of strategies that keep the whole model on each process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headway.data.sampling.shard import ShardIndex
from headway.errors import CollectiveError, PrepareError
from headway.precision.base import Precision
from headway.runtime.collective_log import Step
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import Capabilities, Engine, Transform
from headway.strategies.deepspeed.dummies import DummyOptim, DummyScheduler
from headway.weights.moving import move

_NOTHING = nullcontext()


class SingleStrategy:
    """The model as it is, on the one process there is."""

    name = "single"
    capabilities = Capabilities()

    def __init__(self, collectives: Collectives) -> None:
        self.data_group = self.everyone = self._peers = collectives
        self.data_shard = ShardIndex(collectives.rank, collectives.world_size)
        self.gradient_divisor = 1
        self._seeds: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Apply the transforms; no engine is needed."""
        for transform in transforms:
            transform(model)
        return None

    def adopt(
        self, optimizers: Sequence[torch.optim.Optimizer], precision: str, num_steps: int, micro_batches: Sequence[int]
    ) -> Sequence[torch.optim.Optimizer]:
        """Optimizers step by themselves."""
        return ()

    def stand_for(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """Nothing: only DeepSpeed has a configuration that defines optimizers.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            f"{type(dummy).__name__} is a placeholder for what DeepSpeed's JSON defines, but this run uses {self.name}; give a real "
            "one, or strategy='deepspeed'"
        )

    def materialise(self, model: torch.nn.Module) -> None:
        """Refuse: whole models come with their values."""
        lazy = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        raise PrepareError(
            f"{type(model).__name__} has {len(lazy)} parameters on the meta device, such as {lazy[0]!r}; "
            "load or initialise them before prepare()"
        )

    def place(self, model: torch.nn.Module, device: torch.device) -> None:
        """All of it."""
        move(model, device)

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Any: parameters are whole."""

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Itself: nothing took its place."""
        return parameter

    def cut(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """All of it."""
        return tensor

    def at_rest(self, model: torch.nn.Module) -> None:
        """It always is."""

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module itself: prepare() gave back the user's own object."""
        return model

    def forward_context(self, precision: Precision) -> Callable[[], AbstractContextManager[Any]] | None:
        """The precision's autocast."""
        return precision.autocast if precision.is_mixed else None

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Nothing travels."""
        return _NOTHING

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Nothing travels."""
        return nullcontext()

    def compute(
        self,
        fn: Callable[[Any], torch.Tensor],
        batch: Any,
        weigh: Callable[[Any], float | torch.Tensor] | None,
        reduction: str,
    ) -> torch.Tensor:
        """Call it."""
        return fn(batch)

    def plain(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """It is one."""
        return loss, factor

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward with `factor` as the gradient of the loss: no extra operation is recorded."""
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
        """Nothing travels."""

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Nothing is needed."""
        return 0

    @contextmanager
    def silence(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """By hooks on the parameters."""
        hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """They are where torch keeps them."""
        for parameter in parameters:
            parameter.grad = None

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Any:
        """They are where torch keeps them."""
        kept = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def put_back(self, kept: Any) -> None:
        """Where torch keeps them."""
        for parameter, grad in kept:
            parameter.grad = grad

    def break_off(self) -> None:
        """It has left nothing behind."""

    def members(self, step: Step) -> Sequence[int]:
        """Those of the group in which it was made."""
        return self._collectives_of(step).members()

    def stand_in(self, step: Step) -> None:
        """By the group in which it was made."""
        self._collectives_of(step).stand_in(step)

    def _collectives_of(self, step: Step) -> Collectives:
        for group in (self.everyone, self.data_group):
            if group.place == step[0]:
                return group
        raise CollectiveError(f"{step[1]} of {step[0]} is no exchange of the {self.name} strategy")

    def snapshot(self) -> Any:
        """Nothing is kept."""

    def restore(self, snapshot: Any) -> None:
        """Nothing is kept."""

    def peers(self) -> Collectives | None:
        """All ranks, always."""
        return self._peers

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """None: nobody else has any."""
        return ()

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """All of them."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Nothing to reduce."""

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply all gradients in place."""
        grads = self.local_gradients(parameters)
        if grads:
            torch._foreach_mul_(grads, factor)

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """torch's own; every rank has all gradients."""
        return torch.nn.utils.get_total_norm(self.local_gradients(parameters), norm_type)

    def clip(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """torch's own clipping."""
        if known is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, known)
            return known
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step through the precision, which may skip."""
        return precision.step(optimizer, closure)

    def rollback(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drop the gradients."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Only the cached seeds are held."""
        self._seeds.clear()

    def exchange_order(self, model: torch.nn.Module) -> list[int]:
        """Nothing is exchanged, or always in one order."""
        return []

    def keep_exchange_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """There is none."""

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The state dict's tensors, as they lie."""
        yield from self.unwrap(model).state_dict().items()

    def part_of(self, parameter: torch.Tensor) -> Any:
        """Itself."""
        return parameter

    def exposed(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """It shows its state always."""
        return nullcontext()

    def settle(self) -> None:
        """Everything is where it is used."""
