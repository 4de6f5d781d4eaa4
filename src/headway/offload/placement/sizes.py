"""Sizes: how many bytes a model's tensors and modules take, as they are or as they will be loaded."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.errors import ConfigError


class CustomDtype(Enum):
    """Formats that weights may be loaded in, and that torch has no dtype of this size for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


Dtype = torch.dtype | CustomDtype | str

_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
# torch keeps one element of these in a byte of its own; in use they are packed.
_PACKED = {f"{sign}int{bits}": bits / 8 for bits in range(1, 8) for sign in ("", "u")}


def as_dtype(dtype: Dtype | None) -> torch.dtype | CustomDtype | None:
    """Read `"float16"`, `"torch.float16"` or `"int4"` as the dtype meant.

    Raises:
        ConfigError: there is no dtype of that name.
    """
    if dtype is None or isinstance(dtype, (torch.dtype, CustomDtype)):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name in {kind.value for kind in CustomDtype}:
        return CustomDtype(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        custom = ", ".join(kind.value for kind in CustomDtype)
        raise ConfigError(f"{dtype!r} is not a dtype; give one of torch's, its name ('bfloat16'), or one of {custom}")
    return found


def dtype_byte_size(dtype: Dtype) -> int | float:
    """Bytes that one element takes: 2 for float16, 1 for bool and float8, 0.5 for int4 (packed)."""
    known = as_dtype(dtype)
    if isinstance(known, torch.dtype):
        return _PACKED.get(str(known).removeprefix("torch."), known.itemsize)
    if known is None:
        raise ConfigError("dtype_byte_size() got None; give a dtype or its name")
    return _CUSTOM_BYTES[known]


def stored_dtype(tensor: torch.Tensor, dtype: Dtype | None) -> torch.dtype | CustomDtype:
    """What a checkpoint's tensor becomes where the model is loaded with `dtype`.

    Floating tensors of 16 bits and more are converted; integers, bools, float8, complex and quantised tensors stay.
    """
    target = as_dtype(dtype)
    own = tensor.dtype
    stays = not own.is_floating_point or own.itemsize < 2 or is_traceable_wrapper_subclass(tensor)
    return own if target is None or stays else target


def tensor_bytes(tensor: torch.Tensor, dtype: Dtype | None = None) -> int:
    """Bytes of a tensor, on any device, as loaded with `dtype`. Quantised tensors are counted by the parts they hold."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return _ceil(tensor.numel() * dtype_byte_size(stored_dtype(tensor, dtype)))


def _ceil(size: float) -> int:
    return -int(-size // 1)


class TensorSizes:
    """The size that each tensor of a model will have, under `dtype` and the exceptions by name to it."""

    def __init__(self, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None) -> None:
        self.dtype = as_dtype(dtype)
        self.special = {name: as_dtype(kind) for name, kind in (special_dtypes or {}).items()}
        # Asked once per tensor of the model: the element sizes of the few dtypes that occur are kept.
        self.known: dict[torch.dtype, float] = {}

    def __call__(self, name: str, tensor: torch.Tensor, is_persistent: bool = True) -> int:
        """Bytes of the tensor called `name`. What no checkpoint holds (`is_persistent=False`) is not converted."""
        if type(tensor) not in (nn.Parameter, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
            return tensor_bytes(tensor)
        special = self.special.get(name)
        if special is not None:
            return _ceil(tensor.numel() * dtype_byte_size(special))
        if not is_persistent:
            return _ceil(tensor.numel() * dtype_byte_size(tensor.dtype))
        width = self.known.get(tensor.dtype)
        if width is None:
            width = self.known[tensor.dtype] = float(dtype_byte_size(stored_dtype(tensor, self.dtype)))
        return _ceil(tensor.numel() * width)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> Counter[str]:
    """Bytes of every module and tensor by name; `""` is the whole model, and names without tensors count 0.

    A tensor with several names (tied weights, a module used twice) is counted once, under its first name.

    Args:
        model: on any device, the meta device included.
        dtype: what the model will be loaded with; persistent floating tensors are counted in it.
        special_dtypes: {tensor name: dtype} that come before `dtype`.
        buffers_only: leave parameters out.

    Raises:
        ConfigError: no such dtype.
    """
    price, sizes = TensorSizes(dtype, special_dtypes), Counter[str]()
    for name, tensor, is_persistent in _tensors(model, parameters=not buffers_only):
        size = price(name, tensor, is_persistent)
        end = len(name)
        while end > 0:
            sizes[name[:end]] += size
            end = name.rfind(".", 0, end)
        sizes[""] += size
    return sizes


def _tensors(model: nn.Module, parameters: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is it in the state dict?), parameters first, each once."""
    if parameters:
        for name, parameter in model.named_parameters():
            yield name, parameter, True
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                full = f"{prefix}.{name}" if prefix else name
                yield full, buffer, name not in module._non_persistent_buffers_set


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters, then its buffers, by name.

    Args:
        include_buffers: False gives parameters only.
        recurse: also those of its submodules.
        remove_non_persistent: leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        dropped = _non_persistent(module, recurse) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in dropped)


def _non_persistent(module: nn.Module, recurse: bool) -> set[str]:
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Groups of names that are one parameter, each sorted; also on the meta device, in the order of first names.

    Args:
        model: any module.
        kwargs: ignored; taken because other libraries pass them.
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Iterable[str] | str | None,
) -> tuple[int, list[str]]:
    """The size of the largest layer, and the names of all layers of that size.

    A layer is what a placement may not divide: a module without children, a module of one of `no_split_module_classes`,
    or a tensor that a larger module holds itself.

    Args:
        modules: (name, module or tensor) pairs to look into.
        module_sizes: as compute_module_sizes gives them.
        no_split_module_classes: class names.
    """
    whole = class_names(no_split_module_classes)
    largest, found = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in whole:
            waiting.extend((f"{name}.{child}" if name else child, part) for child, part in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, found = size, [name]
        elif size == largest:
            found.append(name)
    return largest, found


def class_names(classes: Iterable[str] | str | None) -> frozenset[str]:
    """The names in `no_split_module_classes`, which may be one name, several or None."""
    return frozenset([classes] if isinstance(classes, str) else classes or ())


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and (bytes, names) of its largest layers, by the model's own `_no_split_modules`."""
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None))
