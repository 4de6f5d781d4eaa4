"""Part of `TensorParallelOptions` that applies to one of several models, such as a policy and a critic."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from headway.core.config.parallelism import TensorParallelOptions
from headway.layouts.tensor import head_counts, plans


def select_options(
    model: torch.nn.Module, options: TensorParallelOptions, other_models: Iterable[torch.nn.Module]
) -> TensorParallelOptions:
    """Return the options without the names that only other models have.

    If the plan names no part of the model, the result has no plan, so that the model's own or an automatic plan is used.
    Names that no model has are kept. The split of the model then raises an error that shows them.

    Args:
        model: Model to split.
        options: User's options, which apply to all models of the Accelerator.
        other_models: Other models of the Accelerator. `model` may be one of them.
    """
    others = [other for other in other_models if other is not model]
    if not others:
        return options
    plan = options.plan
    if plan is not None:
        own = plans.list_matching_patterns(model, plan)
        elsewhere = {pattern for other in others for pattern in plans.list_matching_patterns(other, plan)}
        plan = {pattern: style for pattern, style in plan.items() if pattern in own or pattern not in elsewhere} or None

    def is_kept(pattern: str) -> bool:
        return bool(head_counts.find_named_integers(model, (pattern,))) or not any(
            head_counts.find_named_integers(other, (pattern,)) for other in others
        )

    return replace(
        options,
        plan=plan,
        divide=tuple(pattern for pattern in options.divide if is_kept(pattern)),
        keep=tuple(pattern for pattern in options.keep if is_kept(pattern)),
    )
