"""Update parameters in a dry run as a run does: directly, on local shards, or by the ranks that own the parameters.

Some optimizers read whole parameters. In a sharded layout, a run then gathers each parameter to its owner, which also
keeps the parameter's optimizer state. A dry run calls the strategy's own code for this on tensors without values.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn, optim

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout
from headway.core.precision.mixed import Precision
from headway.core.strategies.base import Strategy
from headway.core.training.forecast_types import MakeOptimizer
from headway.errors import StateError
from headway.forecasting.tracing.fake_model import fill_model
from headway.forecasting.tracing.reads import answer_reads
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_kind_of_class
from headway.layouts.whole_updates.updates import choose_kind, choose_owners
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning._torch import FakeTensorMode, disable_current_modes
from headway.planning.dry_run.boxes import RankBoxes
from headway.planning.dry_run.fake_group import run_as_rank
from headway.planning.optimizers import MuonAndAdamW, Optimizer, is_elementwise, list_inner_optimizers

_KINDS_WITH_OWNERS = (UpdateKind.OWNED, UpdateKind.TOGETHER)
"""Kinds of updates in which one rank, the owner, updates a full parameter for all ranks."""


class DryRunUpdates:
    """Makes the optimizer updates of a dry run, through the strategy of the layout if there is one.

    Args:
        strategy: Strategy of the layout. None for replicas and pipeline stages, whose optimizers step on the parameters
            directly.
        options: Options of the engines.
    """

    def __init__(self, strategy: Strategy | None = None, options: EngineOptions | None = None) -> None:
        self._strategy = strategy
        self._options = options or EngineOptions()

    def adopt_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Let the strategy check an optimizer, and decide how the optimizer updates parameters, as `prepare` does.

        Do nothing without a strategy.

        Raises:
            UnsupportedError: If the optimizer cannot train a sharded model.
        """
        if self._strategy is None:
            return
        with disable_current_modes():  # Headway tries unknown optimizers on small tensors with values
            for part in list_inner_optimizers(optimizer):
                self._strategy.check_optimizer(part)

    def step_optimizer(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Make an update with an optimizer.

        Args:
            optimizer: Optimizer that `adopt_optimizer` has checked.
            closure: Closure of the step, or None. Default: None.
        """
        for index, part in enumerate(list_inner_optimizers(optimizer)):
            part_closure = closure if index == 0 else None  # a closure is called once per update
            with answer_reads(part):
                if self._strategy is None:
                    part.step(*([] if part_closure is None else [part_closure]))
                else:
                    self._strategy.step_optimizer(part, Precision(), part_closure)
        if isinstance(optimizer, MuonAndAdamW):
            optimizer.collect_state()

    def find_owners(self, optimizer: optim.Optimizer, num_ranks: int) -> dict[torch.Tensor, int]:
        """Return the rank that owns each parameter, for the parameters that are updated by owners.

        An owner is the one rank that updates a full parameter for all ranks. Without a strategy, the dict is empty.

        Args:
            optimizer: Optimizer that `adopt_optimizer` has checked.
            num_ranks: World size.
        """
        if self._strategy is None:
            return {}
        with disable_current_modes():
            return find_owners(optimizer, self._options, num_ranks)


def find_owners(optimizer: optim.Optimizer, options: EngineOptions, num_ranks: int) -> dict[torch.Tensor, int]:
    """Return the rank that owns each parameter, for the parameters that are updated by owners in a sharded layout.

    An owner is the one rank that updates a full parameter for all ranks.

    Args:
        optimizer: Optimizer of the whole model or of shards.
        options: Options of the engines.
        num_ranks: World size.
    """
    whole_updates = None if options.sharding is None else options.sharding.whole_updates
    owners: dict[torch.Tensor, int] = {}
    if whole_updates is False:
        return owners
    for part in list_inner_optimizers(optimizer):
        try:
            kind = choose_kind(part, bool(whole_updates))
        except TrialRefused:
            continue
        if kind in _KINDS_WITH_OWNERS:
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            owners |= zip(parameters, choose_owners(kind, [each.shape for each in parameters], num_ranks))
    return owners


def find_fullest_owner(
    make: Callable[[], nn.Module],
    optimizer: Optimizer,
    make_optimizer: MakeOptimizer | None,
    layout: Layout,
    options: EngineOptions,
    machine_ranks: int,
    prepare: Callable[[nn.Module], object] | None = None,
) -> int | None:
    """Return the rank that needs the most memory for updates. Return None if no parameter has an owner.

    The result is also None if the model cannot be prepared or the optimizer cannot be made. The trace of the step then
    raises the error. Layouts with pipeline stages are not supported, and give None.

    An owner is the one rank that updates a full parameter. The estimate assumes that a rank gathers all parameters that it
    owns at once. In fact, it gathers them bucket by bucket. This does not change which rank needs the most memory. A
    rank that owns more parameters also has more optimizer state. Its buckets are at least as full. An owner has the
    full parameter and its gradient twice: as received, and as given to the optimizer. It also has a receive buffer for
    each rank that has a part of the parameter.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        optimizer: Name of the optimizer, or the user's function that makes it.
        make_optimizer: Function that makes the optimizer that `optimizer` names, or None for no update.
        layout: Layout of the run.
        options: Options of the engines.
        machine_ranks: Ranks per machine.
        prepare: Function that changes the model before training, or None. Default: None.

    Raises:
        StateError: If this process has joined a process group.
    """
    is_forced = options.sharding is not None and options.sharding.whole_updates is True
    if make_optimizer is None or layout.is_replicas_only or layout.pp > 1:
        return None
    if not is_forced and (is_elementwise(optimizer) or _is_known_direct(optimizer)):
        return None
    with init_empty_weights(include_buffers=True):
        model = make()
    fill_model(model, FakeTensorMode(allow_non_fake_inputs=True))
    boxes, update_bytes = RankBoxes(layout), [0] * layout.num_ranks
    try:
        if prepare is not None:
            prepare(model)
        with run_as_rank(model, layout, 0, machine_ranks, "no", options):
            torch_optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
            owners = find_owners(torch_optimizer, options, layout.num_ranks)
            for parameter, owner in owners.items():
                # Parameter and gradient, each as received and as given to the optimizer.
                num_values = 4 * parameter.numel() + _count_received_values(parameter, boxes)
                update_bytes[owner] += num_values * parameter.dtype.itemsize
    except StateError:
        raise
    except Exception:  # the trace of the step raises the same error, with an explanation
        return None
    return update_bytes.index(max(update_bytes)) if owners else None


def _count_received_values(parameter: torch.Tensor, boxes: RankBoxes) -> int:
    """Return the number of values in the buffers in which the owner of a parameter receives the parts of all ranks."""
    num_values = 0
    for boxes_of_rank in boxes.list_boxes(parameter):
        for _, shape in boxes_of_rank:
            spans_whole_rows = shape[1:] == parameter.shape[1:]
            # Boxes that do not span whole rows are copied once more, to make them contiguous.
            num_values += prod(shape) * (1 if spans_whole_rows else 2)
    return num_values


def _is_known_direct(optimizer: Optimizer) -> bool:
    """Whether an optimizer is a class that is known to update shards directly, so that no parameter has an owner."""
    return isinstance(optimizer, type) and find_kind_of_class(optimizer) in (UpdateKind.DIRECT, UpdateKind.LOCAL)
