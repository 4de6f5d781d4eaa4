"""A dry run of a model whose blocks repeat: a few of them are run, checked to be alike, and extrapolated to all.

What a rank holds, sends and computes must grow by as much with the fifth repetition as with the fourth; its peak is that of the
events of all of them (`headway.forecasting.tracing.repeats`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace

from torch import nn

from headway.config.engines import EngineOptions
from headway.forecasting.tracing.repeats import TRACED, find_blocks, trace_repeated
from headway.forecasting.tracing.trace import Trace
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning.dry_run.meter import Volume
from headway.planning.dry_run.trial import StepDryRun

_COUNTS = ("buffers", "weights", "gradients", "optimizer_state", "activations", "buckets")


def treats_blocks_alike(options: EngineOptions) -> bool:
    """Do these options treat a block in the same way, however many there are?"""
    sharding, checkpointing = options.sharding, options.checkpointing
    if checkpointing is not None and checkpointing.every > 1:
        return False
    return sharding is None or (
        not sharding.min_num_params and sharding.forward_prefetch <= 1 and sharding.backward_prefetch <= 1
    )


def dry_run_repeated(
    make: Callable[[], nn.Module], dry_run: Callable[[Callable[[], nn.Module]], StepDryRun]
) -> StepDryRun | None:
    """The dry run of a whole model from those with a few of its blocks; None where none repeat, or these do not prove to be alike.

    Args:
        make: makes the model, where parameters take no memory.
        dry_run: of a model that is made so; it treats blocks alike.
    """
    with init_empty_weights(include_buffers=True):
        model = make()
    blocks = find_blocks(model)
    if blocks is None:
        return None
    found: dict[int, StepDryRun] = {}

    def trace(count: int) -> Trace:
        def shortened() -> nn.Module:
            model = make()
            blocks.shorten(model, count)
            return model

        found[count] = dry_run(shortened)
        made = found[count].trace
        assert made is not None
        return made

    traced = trace_repeated(trace, blocks.count)
    in_order = [_counts(found[count]) for count in sorted(found)]
    counts = None if traced is None else _carried_on(in_order, blocks.count - TRACED)
    first = found[min(found)]
    places = {piece.name: index for index, piece in enumerate(first.pieces)}
    names = [name for name, _ in model.named_parameters()]
    if counts is None or not all(blocks.first_alike(name) in places for name in names):
        return None
    from_places = [places[blocks.first_alike(name)] for name in names]
    assert first.volumes is not None
    assert first.flops is not None
    return replace(
        first,
        pieces=tuple(replace(first.pieces[place], name=name) for name, place in zip(names, from_places)),
        states=tuple(first.states[place] for place in from_places) if first.states else (),
        volumes={key: Volume(*(counts[key, name] for name in asdict(Volume()))) for key in first.volumes},
        flops={phase: counts["flops", phase] for phase in first.flops},
        trace=traced,
        buffers=counts["buffers"],
        weights=counts["weights"],
        gradients=counts["gradients"],
        optimizer_state=counts["optimizer_state"],
        activations=counts["activations"],
        buckets=counts["buckets"],
    )


def _counts(run: StepDryRun) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {name: getattr(run, name) for name in _COUNTS}
    found |= {("flops", phase): number for phase, number in (run.flops or {}).items()}
    for key, volume in (run.volumes or {}).items():
        found |= {(key, name): number for name, number in asdict(volume).items()}
    return found


def _carried_on(runs: Sequence[dict[Hashable, int]], ahead: int) -> dict[Hashable, int] | None:
    """All numbers so many steps after the first; None where one of the two known steps is another than the other."""
    first, second, third = runs
    if not first.keys() == second.keys() == third.keys():
        return None
    if any(third[key] - second[key] != second[key] - first[key] for key in first):
        return None
    return {key: first[key] + ahead * (second[key] - first[key]) for key in first}
