"""Dry run of a model with repeated blocks: only a few blocks are run, and the results are extrapolated.

This requires that the fifth repetition adds as much communication and computation as the fourth. The peak memory is
computed from the extrapolated allocation events (`headway.forecasting.tracing.repeats`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from headway.core.config.engines import EngineOptions
from headway.forecasting.tracing.repeated_blocks import find_blocks
from headway.forecasting.tracing.repeats import FEWEST_TRACED, trace_repeated
from headway.forecasting.tracing.trace import Trace
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning.dry_run.meter import Volume
from headway.planning.dry_run.rank_update import StepDryRun

_COUNTS = ("buffers", "weights", "gradients", "optimizer_state", "activations", "buckets")
"""Fields of `StepDryRun` that are extrapolated linearly with the number of repeated blocks."""


def can_repeat_blocks(options: EngineOptions) -> bool:
    """Whether the engine options treat all repeated blocks of a model equally.

    If so, the dry run of a few blocks can be extrapolated to all of them.
    """
    sharding, checkpointing = options.sharding, options.checkpointing
    if checkpointing is not None and checkpointing.every > 1:
        return False
    return sharding is None or (
        not sharding.min_num_params and sharding.forward_prefetch <= 1 and sharding.backward_prefetch <= 1
    )


def dry_run_repeated(
    make: Callable[[], nn.Module], dry_run: Callable[[Callable[[], nn.Module]], StepDryRun]
) -> StepDryRun | None:
    """Return the dry run of a full model, extrapolated from dry runs with a few of its blocks.

    Return None if the model has too few repeated blocks, or if they differ in their dry runs.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        dry_run: Function that takes a function that makes a model, and returns the model's dry run. It must treat all
            blocks equally.
    """
    with init_empty_weights(include_buffers=True):
        model = make()
    blocks = find_blocks(model)
    if blocks is None:
        return None
    dry_runs: dict[int, StepDryRun] = {}  # by number of repetitions

    def trace_repeats(count: int) -> Trace:
        def make_shortened() -> nn.Module:
            model = make()
            blocks.shorten(model, count)
            return model

        dry_runs[count] = dry_run(make_shortened)
        trace = dry_runs[count].trace
        assert trace is not None
        return trace

    full_trace = trace_repeated(trace_repeats, blocks.count)
    if full_trace is None:
        return None
    counts_by_length = [_collect_counts(dry_runs[count]) for count in sorted(dry_runs)]
    counts = _extrapolate_counts(counts_by_length, blocks.count - FEWEST_TRACED)
    if counts is None:
        return None
    shortest = dry_runs[min(dry_runs)]
    # Each parameter of the full model is described like the corresponding one of the shortened model.
    index_by_name = {parameter.name: index for index, parameter in enumerate(shortest.parameters)}
    names = [name for name, _ in model.named_parameters()]
    names_in_first = [blocks.name_in_first(name) for name in names]
    if any(name not in index_by_name for name in names_in_first):
        return None
    indices = [index_by_name[name] for name in names_in_first]
    assert shortest.volumes is not None
    assert shortest.flops is not None
    volumes = {}
    for exchange in shortest.volumes:
        volumes[exchange] = Volume(**{field: counts[exchange, field] for field in asdict(Volume())})
    numbers: dict[str, Any] = {name: counts[name] for name in _COUNTS}
    return replace(
        shortest,
        parameters=tuple(replace(shortest.parameters[index], name=name) for name, index in zip(names, indices)),
        states=tuple(shortest.states[index] for index in indices) if shortest.states else (),
        volumes=volumes,
        flops={phase: counts["flops", phase] for phase in shortest.flops},
        trace=full_trace,
        **numbers,
    )


def _collect_counts(run: StepDryRun) -> dict[Hashable, int]:
    """Return the counts of a dry run that grow with the number of repeated blocks.

    The key of a count is the name of its field. If the field is a dict, the key is a pair that identifies the entry.
    """
    counts: dict[Hashable, int] = {name: getattr(run, name) for name in _COUNTS}
    counts |= {("flops", phase): number for phase, number in (run.flops or {}).items()}
    for key, volume in (run.volumes or {}).items():
        counts |= {(key, name): number for name, number in asdict(volume).items()}
    return counts


def _extrapolate_counts(runs: Sequence[dict[Hashable, int]], num_added: int) -> dict[Hashable, int] | None:
    """Return all counts, extrapolated linearly to more repetitions of the blocks.

    Return None if a count does not grow by the same amount from each run to the next.

    Args:
        runs: Counts of three dry runs. Each has one more repetition of the blocks than the previous one.
        num_added: Number of repetitions to add to the first run.
    """
    first, second, third = runs
    if not first.keys() == second.keys() == third.keys():
        return None
    if any(third[key] - second[key] != second[key] - first[key] for key in first):
        return None
    return {key: first[key] + num_added * (second[key] - first[key]) for key in first}
