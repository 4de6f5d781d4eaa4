"""Selection of the accelerators that a launch uses, by the settings `cpu`, `multi_gpu` and `gpu_ids`."""

from dataclasses import replace

from headway.core.config.load import ResolvedSettings
from headway.errors import ConfigError
from headway.launch.machine import Machine
from headway.launch.visible_devices import VISIBLE_DEVICES_VARIABLES

_NO_ACCELERATOR = "{} has no accelerator that torch can use; check the driver and CUDA_VISIBLE_DEVICES"
_NO_NVIDIA_GPU = (
    "enable_cpu_affinity ({origin}) binds processes to the cores near their NVIDIA GPUs, but this run uses none; "
    "remove it"
)


def select_devices(resolved: ResolvedSettings, machine: Machine) -> Machine:
    """Return the description of the machine with only those accelerators that the settings allow.

    Raises:
        ConfigError: If the settings request accelerators that the machine does not have or that are hidden, or if they
            contradict each other.
    """
    if resolved.get("cpu", False):
        _refuse_accelerator_settings(resolved)
        return replace(machine, accelerator=None, device_ids=(), hidden_by="")
    if machine.hidden_by:
        raise ConfigError(
            f"{machine.hostname} has accelerators, but all are hidden by {machine.hidden_by}: name devices that exist (on ROCm, "
            "HIP_VISIBLE_DEVICES numbers those that ROCR_VISIBLE_DEVICES leaves, from 0), unset it, or add --cpu"
        )
    if resolved.get("multi_gpu", False) and machine.accelerator is None:
        raise ConfigError(
            f"multi_gpu ({resolved.get_origin('multi_gpu')}), but {_NO_ACCELERATOR.format(machine.hostname)}, or take "
            "--multi_gpu out to run on the CPU"
        )
    if resolved.get("enable_cpu_affinity", False) and machine.torch_device != "cuda":
        raise ConfigError(_NO_NVIDIA_GPU.format(origin=resolved.get_origin("enable_cpu_affinity")))
    return replace(machine, device_ids=_choose_device_ids(resolved, machine))


def _refuse_accelerator_settings(resolved: ResolvedSettings) -> None:
    """Check that the settings of a run on the CPU do not request accelerators. Only `gpu_ids` is ignored instead.

    Raises:
        ConfigError: If `multi_gpu` or `enable_cpu_affinity` is true.
    """
    if resolved.get("multi_gpu", False):
        raise ConfigError(
            f"multi_gpu ({resolved.get_origin('multi_gpu')}) contradicts cpu ({resolved.get_origin('cpu')}); remove one of them"
        )
    if resolved.get("enable_cpu_affinity", False):
        raise ConfigError(_NO_NVIDIA_GPU.format(origin=resolved.get_origin("enable_cpu_affinity")))


def _choose_device_ids(resolved: ResolvedSettings, machine: Machine) -> tuple[str, ...]:
    """Return the IDs of the accelerators that the setting `gpu_ids` selects, in its order. Default: all.

    Raises:
        ConfigError: If an ID is unknown or is listed twice, or if the machine has no accelerator.
    """
    text = resolved.get("gpu_ids", "all")
    if text == "all":
        return machine.device_ids
    origin = resolved.get_origin("gpu_ids")
    if not machine.device_ids:
        raise ConfigError(
            f"gpu_ids={text!r} ({origin}), but {_NO_ACCELERATOR.format(machine.hostname)}, or remove gpu_ids to run on the CPU"
        )
    requested_ids = tuple(part.strip() for part in text.split(","))
    has_duplicates = len(set(requested_ids)) != len(requested_ids)
    if has_duplicates or not set(requested_ids).issubset(machine.device_ids):
        raise ConfigError(
            f"gpu_ids={text!r} ({origin}) must list different accelerators of this machine: {', '.join(machine.device_ids)}"
        )
    return requested_ids


def choose_visible_variable(resolved: ResolvedSettings, machine: Machine) -> str:
    """Return the environment variable that restricts a process to some accelerators, such as CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: If no such variable is known for the machine's accelerators.
    """
    variables = VISIBLE_DEVICES_VARIABLES.get(machine.accelerator or "")
    if not variables:
        raise ConfigError(
            f"gpu_ids ({resolved.get_origin('gpu_ids')}): Headway does not know which variable hides {machine.accelerator} devices "
            "from a process; remove it and set the vendor's own variable, or start fewer processes with -n"
        )
    return variables[0]
