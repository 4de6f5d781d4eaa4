"""Tensors of every layout as dense ones, and back: sparse and quantized tensors are taken apart; what cannot be held is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headway.errors import CheckpointError
from headway.weights.shards import bits, dtype_name

_COMPRESSED: dict[str, tuple[str, str]] = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of its own."""
    return bits(tensor).clone().view(tensor.dtype)


def is_unmade(tensor: torch.Tensor) -> bool:
    """Is it a parameter or buffer of a lazy module, without a shape yet?"""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def refusal(tensor: torch.Tensor) -> str | None:
    """Why a checkpoint cannot hold this tensor's values, and what to do; None where it can."""
    kind = type(tensor)
    if is_unmade(tensor):
        return "a parameter without values yet (of a lazy module): run one forward before the save"
    if tensor.is_nested:
        return "a nested tensor: save what unbind() returns"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, which keeps its values elsewhere: save the plain tensors in it"
        )
    if tensor.is_meta:
        return "a tensor of the meta device, which has no values: load or initialise it before the save"
    if any(getattr(tensor, "names", ())):
        return "a tensor with named dimensions, which would be lost: save tensor.rename(None)"
    if tensor.is_quantized:
        scheme = _scheme(tensor)
        is_held = scheme in _SCHEMES and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32)
        return None if is_held else f"a quantized tensor of {tensor.dtype} with {scheme or 'no scale'}: save its parts"
    if tensor.layout not in (torch.strided, torch.sparse_coo) and _layout(tensor) not in _COMPRESSED:
        return f"a {tensor.layout} tensor: save tensor.to_dense()"
    return None


def _scheme(tensor: torch.Tensor) -> Any:
    try:
        return tensor.qscheme()
    except RuntimeError:  # e.g. made by torch.empty
        return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Is it no more than its values in order?"""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def take_apart(tensor: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What describes a sparse or quantized tensor, of plain values, and the dense tensors that it is made of."""
    if tensor.is_quantized:
        values, dtype = tensor.int_repr(), dtype_name(tensor.dtype)
        if tensor.qscheme() == torch.per_tensor_affine:
            about = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return {"layout": "quantized", "dtype": dtype, **about}, [values]
        about = {"axis": tensor.q_per_channel_axis()}
        scales = [values, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return {"layout": "quantized", "dtype": dtype, **about}, scales
    shape, layout = list(tensor.shape), _layout(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return {"layout": layout, "shape": shape, "is_coalesced": tensor.is_coalesced()}, parts
    outer, inner = _COMPRESSED[layout]
    return {"layout": layout, "shape": shape}, [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]


def put_together(about: Mapping[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that `take_apart` was given.

    Raises:
        CheckpointError, RuntimeError, LookupError, TypeError, ValueError: these are not its results.
    """
    layout = about["layout"]
    if layout == "quantized":
        values, dtype = parts[0], getattr(torch, about["dtype"])
        if len(parts) == 1:
            make: Callable[..., torch.Tensor] = torch._make_per_tensor_quantized_tensor
            made = make(values, about["scale"], about["zero_point"])
        else:
            made = torch._make_per_channel_quantized_tensor(values, parts[1], parts[2], about["axis"])
        if made.dtype != dtype:
            raise CheckpointError(f"the manifest says {dtype} of a quantized tensor of {made.dtype}")
        return made
    shape = torch.Size(about["shape"])
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts[0], parts[1], shape, is_coalesced=about["is_coalesced"] or None, check_invariants=True
        )
    if layout not in _COMPRESSED:
        raise CheckpointError(f"the manifest says {layout!r} of a tensor's layout, which is unknown")
    outer, inner, values = parts
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=getattr(torch, layout), check_invariants=True
    )
