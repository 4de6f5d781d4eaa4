"""Measure how much memory a process needs on a GPU besides tensors, and store the result.

`headway estimate --calibrate` runs the measurement. The result is stored in the folder of the user's config file. The
measurement starts a second process, which runs some typical kernels. The overhead of its CUDA context and libraries is
the drop in free memory, minus the memory that its allocator has reserved. Other processes do not disturb the
measurement as long as their memory does not change.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from headway.common import atomic
from headway.common.untrusted import parse_json
from headway.core.config.files import find_default_file
from headway.errors import ConfigError, DeviceUnavailable

FILE_NAME = "devices.json"
"""Name of the file that stores the calibration records."""

_WORK = """
import json, sys, torch
torch.cuda.set_device(int(sys.argv[1]))
square = torch.randn(2048, 2048, device="cuda", requires_grad=True)
for dtype in (torch.float32, torch.float16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        torch.nn.functional.layer_norm(torch.softmax(square @ square, -1), (2048,)).sum().backward()
images = torch.randn(8, 16, 32, 32, device="cuda")
torch.nn.functional.conv2d(images, torch.randn(16, 16, 3, 3, device="cuda"))
optimizer = torch.optim.AdamW([square])
optimizer.step()
del images, optimizer, square
torch.cuda.synchronize()
print(json.dumps({"reserved": torch.cuda.memory_reserved(), "kept": torch.cuda.memory_allocated()}), flush=True)
sys.stdin.read()
"""
"""Source code of the process whose memory is measured.

The process runs typical kernels on the CUDA device whose index is its argument, prints its allocator's statistics, and
waits for the end of its input.
"""


@dataclass(frozen=True)
class CalibrationRecord:
    """Measured memory overhead of a process on one GPU.

    Attributes:
        product: Product name of the GPU as reported by the driver.
        memory: Bytes of the GPU's memory.
        capability: Compute capability.
        overhead: Bytes that a process uses after its first kernels, in addition to its allocator's reserved memory.
        kept: Bytes that the allocator still has in use after these kernels, for workspaces of libraries.
        torch: Version of torch at the measurement.
        date: Date of the measurement in ISO format.
    """

    product: str
    memory: int
    capability: tuple[int, int]
    overhead: int
    kept: int
    torch: str
    date: str

    @property
    def source(self) -> str:
        """Sentence that names the GPU, the torch version and the date of the measurement."""
        return f"measured on {self.product}, {self.date}, with torch {self.torch} (headway estimate --calibrate)"


def locate_records(environment: Mapping[str, str]) -> Path:
    """Return the path of the file with the calibration records, which is in the folder of the user's config file.

    Args:
        environment: Environment variables that determine the folder.
    """
    return find_default_file(environment).with_name(FILE_NAME)


def read_records(path: Path) -> dict[str, CalibrationRecord]:
    """Return the calibration records in a file, by device name. The dict is empty if the file does not exist.

    Raises:
        ConfigError: If the file cannot be read, or does not contain calibration records.
    """
    try:
        records = parse_json(path.read_text(encoding="utf-8"))
        return {
            name: CalibrationRecord(**{**each, "capability": tuple(each["capability"])})
            for name, each in records.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} was not written by `headway estimate --calibrate` ({error}); remove it, and calibrate again"
        ) from error


def write_record(path: Path, name: str, record: CalibrationRecord) -> None:
    """Store a calibration record under a device name. The file's records of other devices are kept.

    Args:
        path: File with the calibration records.
        name: Name of the device.
        record: Record to store.

    Raises:
        ConfigError: If the file does not contain calibration records or cannot be written.
    """
    records = {**read_records(path), name: record}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps({key: asdict(each) for key, each in records.items()}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}); set HEADWAY_HOME to a folder that you can write to"
        ) from error


class CudaProperties(NamedTuple):
    """Properties of a CUDA device as reported by the driver.

    Attributes:
        product: Product name, such as "NVIDIA A100-SXM4-80GB".
        memory: Bytes of the device's memory.
        capability: Compute capability.
    """

    product: str
    memory: int
    capability: tuple[int, int]


def read_device_properties() -> CudaProperties:
    """Return the properties of this process's CUDA device.

    Raises:
        DeviceUnavailable: If there is no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            "there is no CUDA device here, so nothing can be measured and device='this' cannot be used; run this on the machine with "
            "the GPU, or give a device listed in docs/forecast.md"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return CudaProperties(properties.name, properties.total_memory, (properties.major, properties.minor))


def measure_overhead() -> CalibrationRecord:
    """Measure the memory that a process needs on a CUDA device in addition to tensors, and return the record.

    The device is the one that this process uses.

    Raises:
        DeviceUnavailable: If there is no CUDA device, or the process that runs the kernels failed.
    """
    properties = read_device_properties()
    import torch

    device = torch.cuda.current_device()
    free_before, _ = torch.cuda.mem_get_info(device)
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORK, str(device)],  # "cuda" alone would be the first device in the new process
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    line = worker.stdout.readline()
    free_after, _ = torch.cuda.mem_get_info(device)
    _, message = worker.communicate("")
    if not line:
        last_line = (message.strip() or "it ended without a message").splitlines()[-1]
        raise DeviceUnavailable(
            f"the work to be measured failed on {properties.product}: {last_line}. Free memory on it, or check its driver with "
            "nvidia-smi"
        )
    statistics: dict[str, Any] = json.loads(line)
    overhead = free_before - free_after - int(statistics["reserved"])
    return CalibrationRecord(
        **properties._asdict(),
        overhead=overhead,
        kept=int(statistics["kept"]),
        torch=torch.__version__,
        date=date.today().isoformat(),
    )
