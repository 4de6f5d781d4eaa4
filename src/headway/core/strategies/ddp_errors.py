"""Better messages for DDP's errors, which name the parameters that got no gradient."""

import re

import torch

from headway.common.text import join_names
from headway.errors import HeadwayError, StateError, UnsupportedError

_UNUSED = (
    "Every rank must give every parameter a gradient: use them, freeze them with requires_grad_(False), or pass "
    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] (Trainer: ddp_find_unused_parameters=True). If "
    "another loss of the update uses them, add the losses and call backward() once"
)
_NOT_FOUND_IN_OUTPUT = (
    "find_unused_parameters=True does not help here, because the model's output depends on them, but this loss does not, such as a "
    "gradient penalty. Add all losses of the update, and call backward() once"
)


def explain_error(error: BaseException) -> str:
    """Return advice to append to a DDP error message, or "" if there is none for this message."""
    if "Expected to mark a variable ready only once" not in str(error):
        return ""
    return (
        "headway: if the loop calls backward several times for one forward, all of these losses must reach the same parameters under "
        "ddp. Add the losses, and call accelerator.backward once. With find_unused_parameters=True, all tensors that the loss uses "
        "must be in the model's output: in containers, or in attributes of objects, but not in caches of keys and values"
    )


def describe_frozen(owner: str, names: list[str]) -> str:
    """Return the error message for parameters that were frozen after `prepare`.

    Args:
        owner: Class name of the model or optimizer that holds the parameters.
        names: Names of the parameters.
    """
    return (
        f"{len(names)} parameters of {owner} ({join_names(names)}) were frozen after prepare(): DDP waits for "
        "their gradients, and did not reduce those of the others. Freeze before prepare(), or pass "
        "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] (Trainer: ddp_find_unused_parameters=True)"
    )


def make_parameter_error(
    error: RuntimeError, model: torch.nn.Module, trained: dict[str, torch.nn.Parameter], searches_unused: bool
) -> HeadwayError | None:
    """Return an error that names the parameters, to replace torch's error about an unfinished reduction.

    Return None if torch's error is about anything else, or if the parameters cannot be identified.

    Args:
        error: torch's error.
        model: User's model.
        trained: Parameters that DDP reduces, by name.
        searches_unused: Whether DDP searches each forward's output for parameters on which it does not depend.
    """
    text = str(error)
    if "finished reduction in the prior iteration" not in text:
        return None
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", text)
    all_names = list(trained)
    names = [all_names[int(index)] for index in found[1].split() if int(index) < len(all_names)] if found else []
    frozen = [name for name in names or all_names if not trained[name].requires_grad]
    if frozen:
        return StateError(describe_frozen(type(model).__name__, frozen))
    if not names:
        return None
    return UnsupportedError(
        f"these parameters of {type(model).__name__} took no part in the last loss: {', '.join(names)}. "
        + (_NOT_FOUND_IN_OUTPUT if searches_unused else _UNUSED)
    )
