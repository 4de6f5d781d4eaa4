"""`ParameterNorms`: norms of gradients, weights and updates of each block, module or parameter of a model, in any layout.

An update is measured in two steps. When its gradients are final, each rank adds up the squares of its part of the gradients
and weights, and copies its part of the weights. If a further loss changes the gradients, they are measured again. After all
optimizers of the model have stepped, each rank adds up the squares of the changes. One collective then sums the squares over
all ranks.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headway.core.runtime import process
from headway.core.strategies.blocks import find_blocks, get_class_name
from headway.core.strategies.fully_sharded.dtensors import complete_gradient, get_local_shard
from headway.core.strategies.fully_sharded.gradient_norm import choose_norm_dtype
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.prepared.registry import AcceleratorRegistry
from headway.core.training.step import TrainingStep
from headway.core.weights.compiled import remove_compiled_levels, unwrap_compiled
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

if TYPE_CHECKING:
    from headway.accelerator import Accelerator

log = get_logger(__name__)

_PER = ("block", "module", "parameter")


class Norms(NamedTuple):
    """2-norms of one part of a model in one update.

    Attributes:
        grad_norm: Norm of the gradients, before clipping and without the loss scale of fp16.
        weight_norm: Norm of the weights before the update.
        update_norm: Norm of the change of the weights.
    """

    grad_norm: float
    weight_norm: float
    update_norm: float

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update divided by the norm of the weights. None if the weights were 0."""
        return self.update_norm / self.weight_norm if self.weight_norm else None


@dataclass(frozen=True)
class _MeasuredParameter:
    """Parameter in a measurement.

    Attributes:
        part: Index of its part of the model.
        parameter: The parameter as this rank stores it.
        share: Fraction of its sums of squares that this rank contributes to the sums over all ranks.
        weight: Copy of this rank's part of the weights before the update. None if it is frozen, or not counted on this rank.
    """

    part: int
    parameter: torch.Tensor
    share: float
    weight: torch.Tensor | None


@dataclass
class _Measurement:
    """Update that is being measured.

    Attributes:
        names: Names of the parts of the model.
        squares: This rank's share of the sums of squares: a row for each part of the model, with columns for gradients,
            weights and updates. The column for gradients is filled when the measurement ends.
        entries: The model's parameters.
        grad_squares: This rank's share of the sum of squares of each entry's gradient.
        stepped_ids: IDs of the optimizers that have stepped.
    """

    names: list[str]
    squares: torch.Tensor
    entries: list[_MeasuredParameter]
    grad_squares: torch.Tensor
    stepped_ids: set[int] = field(default_factory=set)


class ParameterNorms:
    """Norms of gradients, weights and updates of each part of a model, measured every few updates and logged.

    The norms are those of full gradients and weights in every layout except DeepSpeed's. Create it on every rank, after
    `prepare`. A measured update needs one collective and a copy of this rank's part of the trainable weights. The host then
    waits for the device. Other updates cost a few function calls.

    Each measurement is logged with `accelerator.log` as "grad_norm/NAME", "weight_norm/NAME" and "update_ratio/NAME".

    Args:
        accelerator: Accelerator that prepared the model.
        model: Prepared model.
        every: Number of updates from one measurement to the next. Default: 100.
        per: Parts of the model: "block" for each repeated block, and each module with parameters outside of blocks;
            "module" for each module with parameters; "parameter" for each parameter. Default: "block".
        log: Whether to log the measurements. Default: True.

    Attributes:
        latest: Norms of the last measured update, by the name of the part. Empty before the first measurement. Equal on all
            ranks. Parts without trainable parameters are left out.

    Raises:
        ConfigError: If the model is not prepared by the Accelerator, or if an argument is not allowed. Also if the norms of
            another model are logged under the same names.
        UnsupportedError: If the model is trained by DeepSpeed.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        norms = ParameterNorms(accelerator, model, every=100)
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        model: torch.nn.Module,
        every: int = 100,
        per: str = "block",
        log: bool = True,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r}; give a number of updates, at least 1")
        if per not in _PER:
            raise ConfigError(f"per={per!r}; allowed: {', '.join(map(repr, _PER))}")
        self.latest: dict[str, Norms] = {}
        self._accelerator = accelerator
        self._every = every
        self._logs = log
        self._step = step = _find_step(model, accelerator)
        if not step.strategy.capabilities.optimizer_state:
            raise UnsupportedError(
                f"ParameterNorms does not support the {step.strategy.name} strategy, whose engine keeps gradients and weights "
                "itself; use 'fsdp' or 'ddp'"
            )
        bare_model = _unwrap(model, accelerator)
        self._model = weakref.ref(bare_model)
        self._per = per
        if log:
            self._check_names(bare_model)
        # Prepared optimizers that train the model. Weak, so that `free_memory` can free them.
        self._optimizers: list[weakref.ref[Any]] = []
        self._measurement: _Measurement | None = None
        step.hooks.gradients_final.append(self._begin_if_due)
        step.hooks.gradients_changed.append(self._measure_changed_gradients)
        step.hooks.updated.append(self._note_update)
        step.hooks.before_learning.append(self._finish_partial)

    def _check_names(self, model: torch.nn.Module) -> None:
        """Raise `ConfigError` if the norms of another model are logged under the same names.

        Args:
            model: The unwrapped model of this object.

        Raises:
            ConfigError: If a part of another model, whose norms are logged, has the name of a part of this model.
        """
        names = set(_assign_parts(model, self._per))
        for hook in self._step.hooks.updated:
            other = getattr(hook, "__self__", None)
            if not isinstance(other, ParameterNorms) or not other._logs:
                continue
            other_model = other._model()
            if other_model is None or other_model is model:
                continue
            if names & set(_assign_parts(other_model, other._per)):
                raise ConfigError(
                    f"the norms of a {get_class_name(model)} and of a {get_class_name(other_model)} would be logged under the same "
                    "names; pass log=False to one of the two ParameterNorms, and log its `latest` under other names"
                )

    # ---------------------------------------------------------------- moments of an update

    def _begin_if_due(self) -> None:
        """When gradients are final, begin a measurement if the next update of the model is due for one."""
        self._measurement = None
        first = self._optimizers[0]() if self._optimizers else None
        if first is None:
            self._optimizers = self._find_optimizers()
            first = self._optimizers[0]() if self._optimizers else None
        if first is None:
            if (model := self._model()) is not None:
                log.warning_once(
                    "ParameterNorms measures nothing, because no prepared optimizer trains the %s; pass its optimizer to "
                    "accelerator.prepare()",
                    get_class_name(model),
                )
            return
        if (first.num_updates + 1) % self._every:
            return
        # Otherwise, the gradients of another model are final.
        if self._step.find_window_of_optimizer(first.optimizer) is self._step.windows.current:
            self._optimizers = self._find_optimizers()  # some may have been added
            self._measurement = self._begin()

    def _find_optimizers(self) -> "list[weakref.ref[Any]]":
        """Return the prepared optimizers that train the model. The list is empty if the model has been freed."""
        if len(self._step.prepared.models) == 1:
            # In a pipeline, this rank's stage may have no parameters of an optimizer, but all ranks must measure together.
            return [weakref.ref(each) for each in self._step.prepared.optimizers]
        ids = {id(parameter) for parameter in self._list_parameters()}
        return [
            weakref.ref(each)
            for each in self._step.prepared.optimizers
            if any(id(parameter) in ids for parameter in iterate_parameters(each.optimizer))
        ]

    def _begin(self) -> _Measurement:
        """Begin a measurement: measure gradients and weights, and copy the weights."""
        model = self._model()
        assert model is not None  # an optimizer trains it
        parts = _assign_parts(model, self._per)
        names = list(dict.fromkeys(parts))
        numbers = {name: number for number, name in enumerate(names)}
        device = self._step.run.runtime.device
        squares = torch.zeros(len(names), 3, dtype=choose_norm_dtype(device), device=device)
        entries = []
        for part, parameter in zip(parts, self._list_parameters()):
            share = self._compute_share(parameter)
            weight = get_local_shard(parameter).detach()
            is_measured = bool(share) and parameter.requires_grad
            if is_measured:
                squares[numbers[part], 1] += _compute_norm(weight).to(squares) ** 2 * share
            copied = weight.clone() if is_measured else None
            entries.append(_MeasuredParameter(numbers[part], parameter, share, copied))
        measurement = _Measurement(names, squares, entries, grad_squares=squares.new_zeros(len(entries)))
        self._measure_gradients(measurement)
        return measurement

    def _measure_changed_gradients(self) -> None:
        """Measure gradients again, because a further loss of the window's last micro-batch has been added to them."""
        if self._measurement is None:
            self._begin_if_due()
            return
        model = self._model()
        assert model is not None  # its backward has just ended
        self._step.strategy.free_gathered(model)
        self._measure_gradients(self._measurement)

    def _measure_gradients(self, measurement: _Measurement) -> None:
        """Measure the gradients of all parameters, except those whose optimizer has already stepped in this window."""
        optimizers = [each.optimizer for reference in self._optimizers if (each := reference()) is not None]
        stepped = [optimizer for optimizer in optimizers if id(optimizer) in measurement.stepped_ids]
        updated_ids = {id(parameter) for optimizer in stepped for parameter in iterate_parameters(optimizer)}
        for index, entry in enumerate(measurement.entries):
            if entry.parameter.is_meta or id(entry.parameter) in updated_ids:
                continue
            # Every rank calls this, because the sum of a partial gradient is a collective.
            grad = complete_gradient(entry.parameter)
            if grad is None:
                measurement.grad_squares[index] = 0.0
                continue
            norm = self._step.precision.unscale_norm(_compute_norm(get_local_shard(grad)))
            measurement.grad_squares[index] = norm.to(measurement.grad_squares) ** 2 * entry.share

    def _note_update(self, optimizer: torch.optim.Optimizer, window: int) -> None:
        """Finish the measurement if all optimizers of the model have stepped.

        Args:
            optimizer: Optimizer that has stepped.
            window: Number of the accumulation window.
        """
        measurement = self._measurement
        if measurement is not None:
            expected = {id(each.optimizer) for reference in self._optimizers if (each := reference()) is not None}
            measurement.stepped_ids |= expected & {id(optimizer)}
            if measurement.stepped_ids == expected:
                self._finish(measurement)

    def _finish_partial(self) -> None:
        """Before the next micro-batch, finish a measurement for which only some of the optimizers have stepped.

        If none has stepped, the update was skipped, and the measurement is dropped.
        """
        measurement = self._measurement
        if measurement is not None and self._step.windows.current.is_applied:
            if measurement.stepped_ids:
                self._finish(measurement)
            self._measurement = None

    def _finish(self, measurement: _Measurement) -> None:
        """Measure the changes of the weights, sum the squares over all ranks, and log the norms."""
        self._measurement = None
        squares = measurement.squares
        for entry, grad_square in zip(measurement.entries, measurement.grad_squares):
            squares[entry.part, 0] += grad_square
            if entry.weight is not None:
                change = get_local_shard(entry.parameter).detach() - entry.weight
                squares[entry.part, 2] += _compute_norm(change).to(squares) ** 2 * entry.share
        if self._step.strategy.everyone.world_size > 1:
            self._step.strategy.everyone.sum_in_place([squares])
        rows = squares.sqrt().tolist()
        trained = sorted({entry.part for entry in measurement.entries if entry.parameter.requires_grad})
        self.latest = {measurement.names[part]: Norms(*rows[part]) for part in trained}
        if self._logs:
            self._accelerator.log(_make_log_values(self.latest))

    # ---------------------------------------------------------------- parts of this rank

    def _list_parameters(self) -> list[torch.Tensor]:
        """Return the model's parameters as this rank stores them: shards, or meta tensors if only other ranks have them."""
        model = self._model()
        if model is None:
            return []
        self._step.strategy.free_gathered(model)
        return [self._step.strategy.find_current(parameter) for parameter in model.parameters()]

    def _compute_share(self, parameter: torch.Tensor) -> float:
        """Return the fraction of a sum of squares that this rank contributes to the sum over all ranks."""
        num_holders = self._step.strategy.count_holders(parameter)
        return 1.0 / num_holders if num_holders else 0.0


def _find_step(model: torch.nn.Module, accelerator: "Accelerator") -> TrainingStep:
    """Return the training step of the Accelerator that has prepared a model.

    Raises:
        ConfigError: If the Accelerator has not prepared the model.
    """
    bare_model = _unwrap(model, accelerator)
    for step in process.current().scope.get_or_create(AcceleratorRegistry).list_newest_first():
        prepared_models = step.prepared.models if step.strategy is accelerator.strategy else []
        if any(_unwrap(each, accelerator) is bare_model for each in prepared_models):
            return step
    raise ConfigError(
        f"ParameterNorms got a {get_class_name(model)} that this Accelerator has not prepared; create it after accelerator.prepare()"
    )


def _unwrap(model: torch.nn.Module, accelerator: "Accelerator") -> torch.nn.Module:
    """Return a model without wrappers, also without the one that `torch.compile(model)` returns."""
    return unwrap_compiled(accelerator.unwrap_model(model))


def _assign_parts(model: torch.nn.Module, per: str) -> list[str]:
    """Return the name of the part to which each parameter belongs, in the order of `model.parameters()`.

    Args:
        model: Model without wrappers.
        per: "block", "module" or "parameter".
    """
    block_ids = {id(block) for block in find_blocks(model)} if per == "block" else set()
    blocks = [name for name, module in model.named_modules() if id(module) in block_ids]
    parts = []
    for full_name, _ in model.named_parameters():
        block = next((name for name in blocks if full_name.startswith(f"{name}.")), None)
        if per == "parameter":
            part = full_name
        elif block is not None:
            part = block
        else:
            part = full_name.rpartition(".")[0] or full_name  # a parameter of the model itself has no module name
        parts.append(remove_compiled_levels(part))
    return parts


def _compute_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of a plain tensor, as a 0-d tensor of at least float32."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def _make_log_values(norms: Mapping[str, Norms]) -> dict[str, Any]:
    """Return the values to log. Ratios of parts whose weights were 0 are None, which `accelerator.log` skips."""
    return {
        "grad_norm": {name: each.grad_norm for name, each in norms.items()},
        "weight_norm": {name: each.weight_norm for name, each in norms.items()},
        "update_ratio": {name: each.update_ratio for name, each in norms.items()},
    }
