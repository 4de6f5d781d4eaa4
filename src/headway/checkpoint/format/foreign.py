"""What a path holds that is not a checkpoint (nothing, a file, several checkpoints, another program's), and what to do."""

import os
import re
from pathlib import Path

from headway.common.object_path import ObjectPath
from headway.common.text import listed

MANIFEST = "manifest.json"
"""The file that makes a folder a checkpoint."""

_NUMBER = re.compile(r"(\d+)$")
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
_PROGRAMS = {
    "transformers' Trainer": re.compile(r"trainer_state\.json|rng_state(_\d+)?\.pth|training_args\.bin"),
    "Accelerate": re.compile(
        r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|sampler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
        r"|pytorch_model_fsdp_\d+|dl_state_dict(_\d+)?\.bin"
    ),
    "DeepSpeed": re.compile(r"zero_to_fp32\.py|mp_rank_\d+_model_states\.pt|global_step\d+"),
    "torch.distributed.checkpoint": re.compile(r"\.metadata|.+\.distcp"),
}


def explain(path: Path) -> str:
    """Why `path` is not a checkpoint of Headway's, and what to do instead."""
    if isinstance(path, ObjectPath):
        inside = checkpoints_in(path) or checkpoints_in(path.parent)
        hint = f"; there are {listed(inside, 3)}" if inside else ""
        return f"{path} is not a committed checkpoint: it has no {MANIFEST}{hint}; give one that save_state wrote"
    if not os.path.exists(path):
        return f"{path} does not exist{_beside(path)}"
    if not os.path.isdir(path):
        if path.name == "latest" and (inside := checkpoints_in(path.parent)):
            return f"{path} only names the newest checkpoint; give the checkpoint itself, {path.parent / inside[0]}"
        folder = f"; give its folder, {path.parent}" if path.name == MANIFEST else ""
        return f"{path} is a file; a checkpoint is a folder that save_state wrote{folder}"
    if path.name.startswith((".staging-", ".removing-")):
        return f"{path} is what a killed save has left, not a checkpoint{_beside(path)}"
    for parent in (path, path / "checkpoints"):
        inside = checkpoints_in(parent)
        if inside:
            many = (
                "a folder with one checkpoint in it" if len(inside) == 1 else f"a folder of {len(inside)} checkpoints"
            )
            return f"{parent} is {many} ({listed(inside, 3)}); give one of them, as in {parent / inside[0]}"
    name, files = program_of(path)
    if name:
        return (
            f"{path} is a checkpoint of {name} ({listed(files, 3)}), not of Headway: its training state is pickled and is not read."
            f"{_weights_of(path)}"
        )
    weights = _weights_of(path)
    if weights:
        return f"{path} holds weights, but is not a checkpoint of Headway's ({MANIFEST} is missing).{weights}"
    return f"{path} is not a committed checkpoint: it has no {MANIFEST}; give a folder that save_state wrote"


def program_of(folder: Path) -> tuple[str, list[str]]:
    """(the program that left a checkpoint in the folder, its files that say so); ("", []) where none did."""
    names = sorted(_names(folder))
    for program, pattern in _PROGRAMS.items():
        files = [name for name in names if pattern.fullmatch(name)]
        if files:
            return program, files
    return "", []


def foreign_in(parent: Path) -> Path | None:
    """The newest checkpoint of another program in a folder."""
    found = [parent / name for name in _names(parent) if not name.startswith(".") and program_of(parent / name)[0]]
    return max(found, key=_order, default=None)


def checkpoints_in(parent: Path) -> list[str]:
    """The names of the committed checkpoints in a folder, the newest (by the number at its end) first."""
    if isinstance(parent, ObjectPath):
        below = [name.split("/") for name, _ in parent.below()]
        found = [parent / name[0] for name in below if len(name) == 2 and name[1] == MANIFEST]
    else:
        names = [name for name in _names(parent) if not name.startswith(".")]
        found = [parent / name for name in names if os.path.isfile(parent / name / MANIFEST)]
    return [path.name for path in sorted(found, key=_order, reverse=True)]


def _names(folder: Path) -> list[str]:
    """What lies in a folder; nothing where it is none, cannot be read, or is in an object store."""
    try:
        return [] if isinstance(folder, ObjectPath) else os.listdir(folder)
    except (OSError, ValueError):
        return []


def number_of(path: Path) -> int | None:
    """The number at the end of a checkpoint's name; None where it has none."""
    number = _NUMBER.search(path.name)
    return int(number[1]) if number else None


def _order(path: Path) -> tuple[int, str]:
    number = number_of(path)
    return (-1 if number is None else number, path.name)


def _beside(path: Path) -> str:
    parent = path.parent
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    inside = checkpoints_in(parent)
    if inside:
        return f"; {parent} holds {listed(inside, 3)}"
    if parent != path.parent:
        return f", and neither does {path.parent}; give a folder that save_state wrote"
    return '; give a folder that save_state wrote, or resume("latest") for the newest automatic one'


def _weights_of(folder: Path) -> str:
    found = [name for name in _WEIGHTS if os.path.isfile(folder / name)]
    if not found:
        return ""
    return (
        f' To load its weights, call headway.load_checkpoint_in_model(model, "{folder / found[0]}") before prepare(); the '
        "optimizer, the schedule and the position in the data start from the beginning"
    )
