"""Accelerate's progress bar `tqdm`, which only the first process of each machine shows."""

from typing import Any

from headway.common import optional
from headway.errors import ConfigError


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """Return a tqdm.auto.tqdm progress bar that only the first process of each machine shows.

    `headway.track` shows progress without tqdm, as lines of text if the output is not a terminal.

    Args:
        args, kwargs: Arguments of tqdm.
        main_process_only: Whether to hide the bar on all other processes. Default: True.

    Raises:
        ConfigError: If the first argument is a boolean, as in Accelerate's old signature.
        OptionalDependencyMissing: If tqdm is not installed.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...) is an old spelling: the first argument is what is iterated; write main_process_only={args[0]}"
        )
    bar = optional.require("tqdm.auto", "headway.tqdm shows its bars with", "tqdm").tqdm
    is_hidden = kwargs.pop("disable", False)
    if main_process_only and not is_hidden:
        from headway.compat.accelerate.state import PartialState  # imports torch, which `import headway.utils` must not

        is_hidden = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=is_hidden)
