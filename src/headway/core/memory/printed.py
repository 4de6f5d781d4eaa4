"""`print_gpu_utilization` and `print_summary`: memory and speed in the format of Hugging Face's notebooks."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.core.memory.driver import open_nvml
from headway.core.memory.use import all_memory_use, measure_host
from headway.core.runtime import process
from headway.errors import ConfigError

MIB = 1024**2


def read_occupied_gpu_memory() -> int | None:
    """Return the bytes that all processes hold on all GPUs of this machine, or None without a GPU.

    If NVML cannot be read (package nvidia-ml-py), only the GPUs that are visible to this process are counted.
    """
    with open_nvml() as library:
        if library is not None:
            # NVML does not know the memory of GPUs that share it with the host, and may be denied single GPUs.
            with suppress(library.NVMLError):
                handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
                if handles:
                    return sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    devices = [use for use in all_memory_use() if use.device != "cpu"]
    return sum(use.occupied for use in devices) if devices else None


def print_gpu_utilization() -> None:
    """Print the memory that all processes hold on all GPUs of this machine, in MiB.

    If NVML cannot be read (package nvidia-ml-py), only the GPUs that are visible to this process are counted. Without a
    GPU, print this process's host memory. Only the main process prints; no rank waits.
    """
    if not process.current().is_main_process:
        return
    occupied = read_occupied_gpu_memory()
    if occupied is not None:
        print(f"GPU memory occupied: {occupied // MIB} MB.")
    else:
        print(
            f"GPU memory occupied: none, there is no GPU here. Host memory of this process: {measure_host().used // MIB} MB."
        )


def print_summary(result: Any) -> None:
    """Print time in seconds, samples per second, and memory of a finished training run. Only the main process prints.

    The memory is that of this moment, as from `print_gpu_utilization`.

    Args:
        result: Object with `metrics` (such as the result of a trainer's train()), or the metrics: a dict that contains
            `train_runtime` in seconds and `train_samples_per_second`.

    Raises:
        ConfigError: If these metrics are missing.

    Example::

        print_summary(trainer.train())
    """
    metrics = getattr(result, "metrics", result)
    needed = ("train_runtime", "train_samples_per_second")
    if not isinstance(metrics, Mapping) or not all(name in metrics for name in needed):
        given = sorted(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        raise ConfigError(f"print_summary needs {' and '.join(needed)}; it got {given}. Give what train() returned")
    if process.current().is_main_process:
        print(f"Time: {metrics['train_runtime']:.2f}")
        print(f"Samples/second: {metrics['train_samples_per_second']:.2f}")
    print_gpu_utilization()
