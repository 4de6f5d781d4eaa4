"""Error messages for paths that are not a Headway checkpoint: what the path contains, and what to do instead.

There can be nothing at the path, a file, several checkpoints, or another program's checkpoint.
"""

import os
import re
from pathlib import Path

from headway.common.object_path import ObjectPath
from headway.common.text import join_names

MANIFEST = "manifest.json"
"""Name of the file whose existence makes a folder a checkpoint."""

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
    "transformers' Trainer": r"trainer_state\.json|rng_state(_\d+)?\.pth|training_args\.bin",
    "Accelerate": (
        r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|sampler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
        r"|pytorch_model_fsdp_\d+|dl_state_dict(_\d+)?\.bin"
    ),
    "DeepSpeed": r"zero_to_fp32\.py|mp_rank_\d+_model_states\.pt|global_step\d+",
    "torch.distributed.checkpoint": r"\.metadata|.+\.distcp",
}


def explain_path(path: Path) -> str:
    """Return an error message for a path that is not a Headway checkpoint.

    The message describes what the path contains, and what to do instead.

    Args:
        path: Path that was given as a checkpoint.
    """
    if isinstance(path, ObjectPath):
        checkpoint_names = list_checkpoint_names(path) or list_checkpoint_names(path.parent)
        hint = f"; there are {join_names(checkpoint_names, 3)}" if checkpoint_names else ""
        return f"{path} is not a committed checkpoint: it has no {MANIFEST}{hint}; give one that save_state wrote"
    if not os.path.exists(path):
        return f"{path} does not exist{_describe_neighbors(path)}"
    if not os.path.isdir(path):
        if path.name == "latest" and (checkpoint_names := list_checkpoint_names(path.parent)):
            return f"{path} only names the newest checkpoint; give the checkpoint itself, {path.parent / checkpoint_names[0]}"
        folder = f"; give its folder, {path.parent}" if path.name == MANIFEST else ""
        return f"{path} is a file; a checkpoint is a folder that save_state wrote{folder}"
    if path.name.startswith((".staging-", ".removing-")):
        return f"{path} was left by a save that was killed, and is not a checkpoint{_describe_neighbors(path)}"
    for parent in (path, path / "checkpoints"):
        checkpoint_names = list_checkpoint_names(parent)
        if checkpoint_names:
            many = (
                "a folder with one checkpoint in it"
                if len(checkpoint_names) == 1
                else f"a folder of {len(checkpoint_names)} checkpoints"
            )
            return f"{parent} is {many} ({join_names(checkpoint_names, 3)}); give one of them, as in {parent / checkpoint_names[0]}"
    name, files = identify_program(path)
    if name:
        return (
            f"{path} is a checkpoint of {name} ({join_names(files, 3)}), not of Headway: its training state is pickled "
            "and is not read."
            f"{_advise_loading_weights(path)}"
        )
    weights = _advise_loading_weights(path)
    if weights:
        return f"{path} contains weights, but is not a checkpoint of Headway ({MANIFEST} is missing).{weights}"
    return f"{path} is not a committed checkpoint: it has no {MANIFEST}; give a folder that save_state wrote"


def identify_program(folder: Path) -> tuple[str, list[str]]:
    """Return the name of the program that wrote the checkpoint in a folder, and the files that identify it.

    Returns:
        Pair of (name of the program, names of the files by which it was recognized), or ("", []) if it is unknown.
    """
    names = sorted(_list_names(folder))
    for program, pattern in _PROGRAMS.items():
        files = [name for name in names if re.fullmatch(pattern, name)]
        if files:
            return program, files
    return "", []


def find_foreign_checkpoint(parent: Path) -> Path | None:
    """Return the newest checkpoint of another program in a folder, or None if there is none.

    The newest is the one with the highest number at the end of its name. In an object store, return None.
    """
    candidates = [
        parent / name for name in _list_names(parent) if not name.startswith(".") and identify_program(parent / name)[0]
    ]
    return max(candidates, key=_get_sort_key, default=None)


def list_checkpoint_names(parent: Path) -> list[str]:
    """Return the names of the committed checkpoints in a folder, newest first.

    The newest is the one with the highest number at the end of its name. Names without a number come last. On a disk,
    names that begin with a dot are left out.
    """
    if isinstance(parent, ObjectPath):
        below = [name.split("/") for name, _ in parent.list_objects()]
        candidates = [parent / name[0] for name in below if len(name) == 2 and name[1] == MANIFEST]
    else:
        names = [name for name in _list_names(parent) if not name.startswith(".")]
        candidates = [parent / name for name in names if os.path.isfile(parent / name / MANIFEST)]
    return [path.name for path in sorted(candidates, key=_get_sort_key, reverse=True)]


def _list_names(folder: Path) -> list[str]:
    """Return the names of the entries of a folder, or [] if it is not a readable folder on a disk."""
    try:
        return [] if isinstance(folder, ObjectPath) else os.listdir(folder)
    except (OSError, ValueError):
        return []


def parse_number(path: Path) -> int | None:
    """Return the number at the end of a checkpoint's name, or None if the name has none."""
    number = _NUMBER.search(path.name)
    return int(number[1]) if number else None


def _get_sort_key(path: Path) -> tuple[int, str]:
    """Return a key that sorts checkpoints by number and then by name. Those without a number come first."""
    number = parse_number(path)
    return (-1 if number is None else number, path.name)


def _describe_neighbors(path: Path) -> str:
    """Return the second part of an error message about a missing checkpoint.

    It lists the checkpoints in the nearest existing parent folder. If there are none, it gives general advice.
    """
    parent = path.parent
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    checkpoint_names = list_checkpoint_names(parent)
    if checkpoint_names:
        return f"; {parent} holds {join_names(checkpoint_names, 3)}"
    if parent != path.parent:
        return f", and neither does {path.parent}; give a folder that save_state wrote"
    return '; give a folder that save_state wrote, or resume("latest") for the newest automatic one'


def _advise_loading_weights(folder: Path) -> str:
    """Return advice on loading the weights in a folder that is not a Headway checkpoint, or "" if it has no known file."""
    candidates = [name for name in _WEIGHTS if os.path.isfile(folder / name)]
    if not candidates:
        return ""
    return (
        f' To load its weights, call headway.load_checkpoint_in_model(model, "{folder / candidates[0]}") before prepare(); the '
        "optimizer, the schedule and the position in the data start from the beginning"
    )
