"""What a card takes beside tensors, measured on it once and kept in the user's folder: `headway estimate --calibrate`.

A second process is started, and what the card has less while that one has done its first work is what it takes: its context, the
libraries it has loaded, and what its allocator holds, which it tells. Other processes do not count, as long as they stay as they are.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.untrusted import parse_json
from headway.config.files import default_file
from headway.errors import ConfigError, DeviceUnavailable

FILE_NAME = "devices.json"

_WORK = """
import json, sys, torch
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


@dataclass(frozen=True)
class CalibrationRecord:
    """One card, measured.

    Attributes:
        product: what the driver calls it.
        memory: bytes on the card.
        capability: compute capability.
        overhead: bytes that a process takes beside what its allocator holds, after its first work.
        kept: bytes that its allocator holds for libraries' workspaces after that.
        torch: the version that it was measured with.
        date: of the measurement.
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
        """For people."""
        return f"measured on {self.product}, {self.date}, with torch {self.torch} (headway estimate --calibrate)"


def file(environment: Mapping[str, str]) -> Path:
    """Where the records are: beside the config file."""
    return default_file(environment).with_name(FILE_NAME)


def read(path: Path) -> dict[str, CalibrationRecord]:
    """The records, by the device's name; empty where there is no file.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {
            name: CalibrationRecord(**{**each, "capability": tuple(each["capability"])}) for name, each in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not hold what `headway estimate --calibrate` writes ({error}); remove it, and calibrate again"
        ) from error


def write(path: Path, name: str, record: CalibrationRecord) -> None:
    """Keep a record under that name, beside those of other cards.

    Raises:
        ConfigError: the file holds something else, or cannot be written.
    """
    records = {**read(path), name: record}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps({key: asdict(each) for key, each in records.items()}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}); set HEADWAY_HOME to a folder that you can write to"
        ) from error


def product() -> tuple[str, int, tuple[int, int]]:
    """The name, memory and compute capability of this process's CUDA device.

    Raises:
        DeviceUnavailable: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            "there is no CUDA device here, so nothing can be measured and device='this' means nothing; run this on the machine with "
            "the GPU, or give a device listed in docs/forecast.md"
        )
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return about.name, about.total_memory, (about.major, about.minor)


def measure() -> CalibrationRecord:
    """What a process takes on this process's CUDA device beside tensors.

    Raises:
        DeviceUnavailable: there is none, or the work that is measured failed on it.
    """
    name, memory, capability = product()
    import torch

    free, _ = torch.cuda.mem_get_info()
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    line = worker.stdout.readline()
    left, _ = torch.cuda.mem_get_info()
    _, said = worker.communicate("")
    if not line:
        last = (said.strip() or "it ended without a word").splitlines()[-1]
        raise DeviceUnavailable(
            f"the work to be measured failed on {name}: {last}. Free memory on it, or check its driver with nvidia-smi"
        )
    held: dict[str, Any] = json.loads(line)
    overhead = free - left - int(held["reserved"])
    return CalibrationRecord(
        name, memory, capability, overhead, int(held["kept"]), torch.__version__, date.today().isoformat()
    )
