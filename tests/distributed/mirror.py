"""Install the example strategy of examples/own_strategy for a test, by writing its entry point to a folder on the path."""

import sys
from pathlib import Path
from typing import Any

import tomllib
import torch

from headway import Accelerator
from headway.core.config.engines import EngineOptions
from headway.core.data.sampling.shard import ShardIndex
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.replica import ReplicaStrategy

FOLDER = Path(__file__).parents[2] / "examples" / "own_strategy"


class MirroredReplicas(ReplicaStrategy):
    """Variant of the example that reduces gradients once per window, so that batches can run again."""

    def __init__(self, collectives: Collectives, text: str, options: EngineOptions) -> None:
        super().__init__(collectives, options.ddp)
        world = collectives.world_size
        self.data_shard = ShardIndex(collectives.rank // 2, world // 2)
        self.data_group = collectives.split([range(copy, world, 2) for copy in range(2)])
        self.gradient_divisor = world // 2

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        super().backward(loss, factor / 2, precision, **kwargs)


def write_entry_points(folder: Path) -> Path:
    """Write the entry points that pip would write for the example package and for the class above. Return the folder."""
    folder.mkdir(exist_ok=True)
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    write_package(folder, project["name"], groups)
    own = {"headway.strategies": {"mirrored_replicas": f"{__name__}:{MirroredReplicas.__name__}"}}
    write_package(folder, "own", own)
    return folder


def write_package(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    about = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in groups.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))


def add_to_path(folder: Path) -> None:
    """Add the packages' folders to `sys.path`."""
    sys.path += [path for path in (str(folder), str(FOLDER)) if path not in sys.path]


def make_mirrored_accelerator(folder: Path, strategy: str = "mirror", **options: Any) -> Accelerator:
    """Return an Accelerator with the example strategy, in which pairs of ranks hold the same rows."""
    add_to_path(folder)
    return Accelerator(cpu=True, strategy=strategy, **options)
