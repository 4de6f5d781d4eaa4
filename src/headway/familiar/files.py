"""Objects to files and back, as functions; and the names of weight files."""

from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from headway.checkpoint.weights import save_object
from headway.errors import UnsupportedError
from headway.familiar.state import door

WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object with torch.save (or a dict of tensors with safetensors), from the main process only.

    Args:
        obj: the object.
        f: the file.
        save_on_each_node: from the first process of every machine.
        safe_serialization: with safetensors.
    """
    runtime = door().runtime
    if runtime.is_local_main_process if save_on_each_node else runtime.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load, which runs no code of the file's (`weights_only=True`) unless told so; numpy arrays may be in it.

    Args:
        f: a file or its path.
        map_location: where tensors go.
        kwargs: for torch.load.
    """
    kinds = [type(numpy.dtype(kind)) for kind in ("uint8", "uint32", "int32", "int64", "float32", "float64", "bool")]
    reconstruct: Any = numpy.empty(0).__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, numpy.ndarray, numpy.dtype, *kinds]):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def load_state_dict(checkpoint_file: str | Path, device_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a weights file by name, safetensors or torch's own.

    Args:
        checkpoint_file: the file.
        device_map: a map whose parts lie on one device: tensors go there. None: the CPU.

    Raises:
        UnsupportedError: a map over several devices.
    """
    devices = set((device_map or {"": "cpu"}).values())
    if len(devices) > 1:
        raise UnsupportedError(
            f"load_state_dict got a device_map over {len(devices)} devices; use load_checkpoint_in_model(model, file, "
            "device_map), which puts each tensor where it belongs"
        )
    device = torch.device(devices.pop())
    if str(checkpoint_file).endswith(".safetensors"):
        return load_file(checkpoint_file, device=str(device))
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location=device, weights_only=True)
    return loaded
