"""tqdm's bar on one process of each machine."""

from typing import Any

from headway import optional
from headway.errors import ConfigError
from headway.familiar.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm.auto.tqdm, shown by the first process of each machine only; it iterates on every process.

    `headway.track` does the same without tqdm, and writes plain lines where nobody watches.

    Args:
        args, kwargs: for tqdm.
        main_process_only: False: every process shows its bar.

    Raises:
        ConfigError: a truth value in the place of what is iterated.
        OptionalDependencyMissing: tqdm is not installed.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...) is an old spelling: the first argument is what is iterated; write main_process_only={args[0]}"
        )
    bar = optional.require("tqdm.auto", "headway.tqdm shows its bars with", "tqdm").tqdm
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=hidden)
