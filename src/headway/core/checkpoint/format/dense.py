"""Convert sparse and quantized tensors to dense ones and back, and refuse tensors that a checkpoint cannot hold."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headway.core.checkpoint import _torch
from headway.core.weights.tensor_bytes import get_dtype_name, view_as_bits
from headway.errors import CheckpointError

_COMPRESSED: dict[str, tuple[str, str]] = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)


def explain_refusal(tensor: torch.Tensor) -> str | None:
    """Return the reason why a checkpoint cannot hold a tensor, with advice. Return None if it can hold the tensor."""
    kind = type(tensor)
    if is_uninitialized(tensor):
        return "a parameter without values yet (of a lazy module): run one forward before the save"
    if tensor.is_nested:
        return "a nested tensor: save what unbind() returns"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, which keeps its values elsewhere: save the plain tensors in it"
        )
    if tensor.is_meta:
        return "a tensor of the meta device, which has no values: load or initialize it before the save"
    if any(getattr(tensor, "names", ())):
        return "a tensor with named dimensions, which would be lost: save tensor.rename(None)"
    if tensor.is_quantized:
        scheme = _get_qscheme(tensor)
        is_held = scheme in _SCHEMES and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32)
        return None if is_held else f"a quantized tensor of {tensor.dtype} with {scheme or 'no scale'}: save its parts"
    if tensor.layout not in (torch.strided, torch.sparse_coo) and _format_layout(tensor) not in _COMPRESSED:
        return f"a {tensor.layout} tensor: save tensor.to_dense()"
    return None


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a lazy module whose first forward has not yet determined the tensor's shape."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def _get_qscheme(tensor: torch.Tensor) -> Any:
    """Return the quantization scheme of a quantized tensor, or None if torch does not know it."""
    try:
        return tensor.qscheme()
    except RuntimeError:  # e.g. made by torch.empty
        return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and not quantized. Its values in row-major order then represent it completely."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor in new memory."""
    return view_as_bits(tensor).clone().view(tensor.dtype)


def split_into_dense(tensor: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Split a sparse or quantized tensor, which is not a DTensor, into dense tensors.

    Returns:
        Pair of (description that `join_from_dense` needs, dense tensors).
    """
    if tensor.is_quantized:
        values, dtype = tensor.int_repr(), get_dtype_name(tensor.dtype)
        if tensor.qscheme() == torch.per_tensor_affine:
            about = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return {"layout": "quantized", "dtype": dtype, **about}, [values]
        about = {"axis": tensor.q_per_channel_axis()}
        scales = [values, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return {"layout": "quantized", "dtype": dtype, **about}, scales
    shape, layout = list(tensor.shape), _format_layout(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = _torch.read_sparse_parts(tensor)
        return {"layout": layout, "shape": shape, "is_coalesced": tensor.is_coalesced()}, parts
    outer, inner = _COMPRESSED[layout]
    return {"layout": layout, "shape": shape}, [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]


def join_from_dense(about: Mapping[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rebuild a tensor from the description and the dense tensors that `split_into_dense` returned.

    Args:
        about: Description of the tensor.
        parts: Dense tensors.

    Raises:
        CheckpointError, RuntimeError, LookupError, TypeError, ValueError: If the arguments are not results of
            `split_into_dense`.
    """
    layout = about["layout"]
    if layout == "quantized":
        values, dtype = parts[0], getattr(torch, about["dtype"])
        if len(parts) == 1:
            make: Callable[..., torch.Tensor] = _torch.make_per_tensor_quantized
            tensor = make(values, about["scale"], about["zero_point"])
        else:
            tensor = _torch.make_per_channel_quantized(values, parts[1], parts[2], about["axis"])
        if tensor.dtype != dtype:
            raise CheckpointError(f"the manifest has the dtype {dtype} for a quantized tensor of {tensor.dtype}")
        return tensor
    shape = torch.Size(about["shape"])
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts[0], parts[1], shape, is_coalesced=about["is_coalesced"] or None, check_invariants=True
        )
    if layout not in _COMPRESSED:
        raise CheckpointError(f"the manifest has the unknown tensor layout {layout!r}")
    outer, inner, values = parts
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=getattr(torch, layout), check_invariants=True
    )


def _format_layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")
