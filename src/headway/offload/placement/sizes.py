"""Measure the bytes of a model's tensors and modules, in their current dtype or in the dtype that will be loaded."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import nn

from headway.errors import ConfigError
from headway.offload._torch import is_traceable_wrapper_subclass

_PACKED = {f"{sign}int{bits}": bits / 8 for bits in range(1, 8) for sign in ("", "u")}
"""Bytes per element of torch's integer dtypes with fewer than 8 bits, as packed in use.

torch itself stores each element in a byte.
"""


class CustomDtype(Enum):
    """Weight formats that have no exact counterpart among torch's dtypes: FP8, INT4 and INT2.

    Their elements take 8, 4 and 2 bits. Functions that compute sizes, such as `compute_module_sizes`, accept a member as
    `dtype`.
    """

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


Dtype = torch.dtype | CustomDtype | str
"""Dtype of torch, custom format, or name of either."""

_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
"""Bytes per element of the custom formats."""


def parse_dtype(dtype: Dtype | None) -> torch.dtype | CustomDtype | None:
    """Return the dtype for a name such as `"float16"`, `"torch.float16"` or `"int4"`.

    Dtypes and None are returned unchanged.

    Raises:
        ConfigError: If there is no dtype with this name.
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
    """Return the bytes per element of a dtype: 2 for float16, 1 for bool and float8, 0.5 for (packed) int4.

    Args:
        dtype: A torch.dtype, a `CustomDtype`, or a name such as "bfloat16" or "int4".

    Raises:
        ConfigError: If `dtype` is None or not the name of a dtype.
    """
    known = parse_dtype(dtype)
    if isinstance(known, torch.dtype):
        return _PACKED.get(str(known).removeprefix("torch."), known.itemsize)
    if known is None:
        raise ConfigError("dtype_byte_size() got None; give a dtype or its name")
    return _CUSTOM_BYTES[known]


def get_stored_dtype(tensor: torch.Tensor, dtype: Dtype | None) -> torch.dtype | CustomDtype:
    """Return the dtype that a tensor has after the model is loaded in `dtype`.

    Floating tensors of 16 bits or more are converted. Integer, bool, float8, complex and quantized tensors are not.

    Args:
        tensor: Tensor of the model.
        dtype: Dtype in which the model is loaded, or None for the model's dtype.
    """
    target = parse_dtype(dtype)
    own = tensor.dtype
    stays = not own.is_floating_point or own.itemsize < 2 or is_traceable_wrapper_subclass(tensor)
    return own if target is None or stays else target


def count_tensor_bytes(tensor: torch.Tensor, dtype: Dtype | None = None) -> int:
    """Return the bytes that a tensor has after a conversion to `dtype`.

    Only floating tensors of 16 bits or more are converted. For a quantized tensor, the bytes of its inner tensors are
    summed.

    Args:
        tensor: Tensor on any device, including the meta device.
        dtype: Dtype to convert to, or None for the tensor's dtype. Default: None.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(count_tensor_bytes(getattr(tensor, name)) for name in names)
    return _round_up(tensor.numel() * dtype_byte_size(get_stored_dtype(tensor, dtype)))


def _round_up(size: float) -> int:
    """Return the smallest integer that is not less than a number of bytes, such as 2 for three int4 elements."""
    return math.ceil(size)


class TensorSizes:
    """Callable that returns the bytes that a tensor of the model has after loading.

    Args:
        dtype: Dtype in which the model will be loaded, or None for the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`.
            None (the default): no such tensors.
    """

    def __init__(self, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None) -> None:
        self.dtype = parse_dtype(dtype)
        self.special = {name: parse_dtype(kind) for name, kind in (special_dtypes or {}).items()}
        # This object is called for every tensor of the model, so the element sizes of the few dtypes are cached.
        self._element_sizes: dict[torch.dtype, float] = {}

    def __call__(self, name: str, tensor: torch.Tensor, is_persistent: bool = True) -> int:
        """Return the bytes that a tensor has after loading.

        Args:
            name: Name of the tensor, which is looked up in `special_dtypes`.
            tensor: Tensor of the model.
            is_persistent: Whether the tensor is in the state dict. If not, it keeps its dtype unless `special_dtypes`
                has an entry for it. Default: True.
        """
        if type(tensor) not in (nn.Parameter, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
            return count_tensor_bytes(tensor)
        special = self.special.get(name)
        if special is not None:
            return _round_up(tensor.numel() * dtype_byte_size(special))
        if not is_persistent:
            return _round_up(tensor.numel() * dtype_byte_size(tensor.dtype))
        element_size = self._element_sizes.get(tensor.dtype)
        if element_size is None:
            element_size = self._element_sizes[tensor.dtype] = float(
                dtype_byte_size(get_stored_dtype(tensor, self.dtype))
            )
        return _round_up(tensor.numel() * element_size)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> Counter[str]:
    """Return the bytes of every module and tensor, by name. The key "" is the whole model. Missing names count as 0.

    A tensor with several names counts once, under its first name. It has several names if it is tied or if its module
    is used twice. Parameters and buffers count; gradients do not.

    Args:
        model: Model on any device, including the meta device.
        dtype: Dtype in which persistent floating tensors will be loaded. None (the default): the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`. None (the default): none.
        buffers_only: Whether to leave out parameters. Default: False.

    Raises:
        ConfigError: If `dtype` is not a dtype.

    Example::

        sizes = compute_module_sizes(torch.nn.Linear(4, 2), dtype="float16")
        assert sizes[""] == 20 and sizes["weight"] == 16
    """
    measure_size, sizes = TensorSizes(dtype, special_dtypes), Counter[str]()
    for name, tensor, is_persistent in _iterate_tensors(model, parameters=not buffers_only):
        size = measure_size(name, tensor, is_persistent)
        end = len(name)
        while end > 0:
            sizes[name[:end]] += size
            end = name.rfind(".", 0, end)
        sizes[""] += size
    return sizes


def _iterate_tensors(model: nn.Module, parameters: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (name, tensor, whether the tensor is in the state dict) once for each tensor of a model.

    Args:
        model: Any module.
        parameters: Whether to include parameters, which are yielded before buffers.
    """
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
    """Yield the module's parameters, then its buffers, with their names.

    Args:
        module: Module to read.
        include_buffers: Whether buffers are included. Default: True.
        recurse: Whether tensors of submodules are included, with dotted names. Default: False.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict. Default: False.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        dropped = _list_non_persistent(module, recurse) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in dropped)


def _list_non_persistent(module: nn.Module, recurse: bool) -> set[str]:
    """Return the names of a module's non-persistent buffers, which `state_dict` leaves out.

    Args:
        module: Module.
        recurse: Whether to include the buffers of submodules.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Return the groups of names that share one parameter.

    Each group is sorted, and has at least two names. Groups are in the order of their first names. Buffers do not count.

    Args:
        model: Any module, also on the meta device.
        kwargs: Ignored. Accepted because other libraries pass keyword arguments that are not needed here.
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
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer is the unit that a placement does not divide: a module without children, a module of one of
    `no_split_module_classes`, or a tensor that a larger module owns directly.

    Args:
        modules: Pairs of a name and a module or tensor to search.
        module_sizes: Sizes as returned by compute_module_sizes.
        no_split_module_classes: Names of module classes that are not divided. None: no such classes.
    """
    undivided_classes = collect_class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in undivided_classes:
            waiting.extend((f"{name}.{child}" if name else child, part) for child, part in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def collect_class_names(classes: Iterable[str] | str | None) -> frozenset[str]:
    """Convert `no_split_module_classes`, which is one name, several or None, to a set of class names."""
    return frozenset([classes] if isinstance(classes, str) else classes or ())


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and the bytes and names of its largest layers.

    A layer is a module that is not divided: one without children, or one of a class in the model's `_no_split_modules`.

    Args:
        model: Model on any device, including the meta device. Sizes are those in the model's dtypes.

    Returns:
        Pair of (bytes of the model, pair of (bytes of the largest layer, names of all layers of this size)).
    """
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None))
