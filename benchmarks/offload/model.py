"""A model of 24 equal blocks, 1.6 GB in fp32, saved as 24 shards; and control of the page cache for its files."""

import gc
import json
import mmap
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from headway.offload.readahead import measure_resident_share, read_pages, release_pages

WIDTH = 1440
NUM_BLOCKS = 24
NUM_TOKENS = 64


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def build_model(device: str = "meta") -> nn.Sequential:
    """Build the model, by default on the meta device."""
    with torch.device(device):
        return nn.Sequential(*(Block(WIDTH) for _ in range(NUM_BLOCKS))).eval()


def write_checkpoint(folder: Path) -> list[Path]:
    """Save the model block by block with an index, and return the files."""
    weight_map, files = {}, []
    for number in range(NUM_BLOCKS):
        torch.manual_seed(number)
        file = folder / f"model-{number + 1:05d}-of-{NUM_BLOCKS:05d}.safetensors"
        state = {f"{number}.{name}": tensor.detach() for name, tensor in Block(WIDTH).state_dict().items()}
        save_file(state, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(state, file.name))
        files.append(file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return files


def _map_file(file: Path) -> torch.Tensor:
    with file.open("rb") as opened:
        view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=torch.uint8)


def drop_from_page_cache(files: list[Path], model: nn.Module | None = None) -> float:
    """Drop the files from the page cache, and return the share of pages that stayed, according to mincore."""
    for tensor in [] if model is None else model.parameters():
        if tensor.device.type == "cpu" and hasattr(tensor, "headway_mapped_at"):
            release_pages(tensor)  # the kernel keeps pages that a process has mapped
    gc.collect()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    shares = [measure_resident_share(_map_file(file)) or 0.0 for file in files]
    return sum(shares) / len(shares)


def read_files(files: list[Path]) -> None:
    """Read every page of the files in order: the floor of a cold start."""
    for file in files:
        read_pages(_map_file(file))


def get_anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024
