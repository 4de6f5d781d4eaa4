"""Environment variables that restrict which accelerators a process may see, and the devices that stay visible."""

import re
from collections.abc import Mapping

# Variables that choose the devices a process may see, by kind of accelerator. The first one that is set counts.
VISIBLE_DEVICES_VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "mps": (),
}

_LOWER_LAYER_VARIABLES = {"rocm": "ROCR_VISIBLE_DEVICES"}
"""Variable that a lower layer of the driver applies first, by kind of accelerator.

If it is set, the indices in the variables of `VISIBLE_DEVICES_VARIABLES` refer to the remaining devices, counted from 0.
"""

_HIDING_VALUES = ("", "-1", "NoDevFiles")
"""Values by which users and SLURM hide all devices from a process."""


def describe_hiding_variables(kind: str, environment: Mapping[str, str]) -> str:
    """Describe the environment variables that hide all devices of a kind by mistake, as "HIP_VISIBLE_DEVICES='2'".

    Call this only if no device is visible: the variables that are set then name only devices that do not exist. Return
    "" if none is set, or if a variable hides all devices on purpose, for example with an empty value.

    Args:
        kind: Kind of accelerator, a key of `VISIBLE_DEVICES_VARIABLES`.
        environment: Environment variables of the process.
    """
    names = [
        *([_LOWER_LAYER_VARIABLES[kind]] if kind in _LOWER_LAYER_VARIABLES else []),
        *VISIBLE_DEVICES_VARIABLES[kind],
    ]
    values = {name: environment[name] for name in names if name in environment}
    if any(text.strip() in _HIDING_VALUES for text in values.values()):
        return ""
    return ", ".join(f"{name}={text!r}" for name, text in values.items())


def list_visible_ids(kind: str, num_devices: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the IDs of the devices that a process may see, as listed in the vendor's environment variable.

    An index that does not exist ends the list, as it does in the drivers. If no variable is set, the IDs are the
    indices of all devices.

    Args:
        kind: Kind of accelerator, a key of `VISIBLE_DEVICES_VARIABLES`.
        num_devices: Number of devices in the machine.
        environment: Environment variables of the process.
    """
    below = environment.get(_LOWER_LAYER_VARIABLES.get(kind, ""))
    if below is not None:
        num_devices = len(_find_listed_ids(below, num_devices))
    values = [environment[variable] for variable in VISIBLE_DEVICES_VARIABLES[kind] if variable in environment]
    return _find_listed_ids(values[0], num_devices) if values else tuple(str(index) for index in range(num_devices))


def _find_listed_ids(text: str, num_devices: int) -> tuple[str, ...]:
    """Return the devices in a list such as "0,1". As in CUDA, an invalid index ends the list."""
    ids: list[str] = []
    for part in text.split(","):
        name = part.strip()
        is_index = re.fullmatch(r"-?\d+", name) is not None
        if not name or (is_index and not 0 <= int(name) < num_devices):
            break
        ids.append(name)
    return tuple(ids)
