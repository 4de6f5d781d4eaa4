"""Memory that an operation's kernel allocates on a device, beyond what the shapes of its results need.

A kernel can allocate scratch memory, before or after its results, and frees it when it ends. It can also give a result
more memory than the shape needs. `_RULES` has a rule for each case, and `list_rules` selects those of a device.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from headway.forecasting.device import attention, copies, recurrent, slow_convolutions, sums
from headway.forecasting.device.copies import Sizes
from headway.forecasting.device.devices import Device

_BFLOAT16_CAPABILITY = (8, 0)
"""First compute capability for which cuDNN has convolutions in bfloat16."""
_MAX_BLOCK_SORT = 4096
"""Longest row that a single CUDA block can sort."""
_MAX_UNSORTED_INDICES = 3072
"""Largest number of indices that an embedding's backward on CUDA processes without sorting them."""

_CUBLAS_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm")
"""Names of the operations that use cuBLAS."""
UNKNOWN_SCRATCH: dict[str, str] = {
    **dict.fromkeys(
        ("aten::convolution", "aten::convolution_backward"),
        "cuDNN's workspaces for convolutions are not counted, because cuDNN chooses its algorithms on the GPU; "
        "the upper end of the range allows for them",
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": (
        "cuDNN's workspace for attention's backward is assumed to be as large as FlashAttention's"
    ),
    "aten::_cudnn_rnn": (
        "the memory that cuDNN keeps for recurrent layers is assumed (gates, cells and outputs of every step); "
        "the upper end of the range allows for twice as much"
    ),
    "aten::_ctc_loss": "the workspace of the CTC loss is not counted",
    "aten::sort": "the workspace of sorting is not counted",
    **dict.fromkeys((f"aten::_fft_{name}" for name in ("r2c", "c2c", "c2r")), "cuFFT's workspaces are not counted"),
    **dict.fromkeys(
        (f"aten::{name}" for name in ("linalg_svd", "_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_inv_ex")),
        "cuSOLVER's workspaces are not counted",
    ),
}
"""Description of scratch memory whose size cannot be computed, by operation. It becomes a caveat of the forecast."""
NAMESPACES = (
    *("aten", "prim", "prims", "profiler", "inductor", "higher_order"),
    *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"),
)
"""Namespaces of operations whose memory is known. A trace's caveats list the operations from all other namespaces."""


def _size_embedding_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor that an embedding's backward allocates before its result.

    These are a contiguous copy of the gradient (unless it is contiguous), the sorted indices, and buffers for the sort.
    Up to 3,072 indices are not sorted.

    Args:
        args: Arguments of the backward operation.
    """
    gradient, indices = args[:2]
    size, rows = indices.numel() * 8, [] if gradient.is_contiguous() else [gradient.nbytes]
    return [*rows, size, size, 2 * size] if indices.numel() > _MAX_UNSORTED_INDICES else rows


def _size_embedding_sums(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the scratch tensors for the partial sums in an embedding's backward.

    A partial sum covers at most ten rows, and every distinct index starts a new one. The number of sums that follows
    from this is an upper bound. If there are few indices, or far more indices than embedding rows, torch uses another
    algorithm without partial sums. The thresholds for this choice were measured.

    Args:
        args: Arguments of the backward operation.
    """
    gradient, indices, num_rows = args[:3]
    num_indices = indices.numel()
    if not num_rows or num_indices <= _MAX_UNSORTED_INDICES or (num_rows < 512 and num_rows * 30 < num_indices):
        return []
    num_sums = num_indices // 10 + min(num_indices, num_rows)
    return [num_sums * 8, num_sums * gradient.shape[-1] * 4]


def _size_embedding_bag_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor before the result of an embedding bag's backward.

    They are those of an embedding, if the gradient is dense and the bags are summed or averaged. Otherwise there are none.

    Args:
        args: Arguments of the backward operation.
    """
    return _size_embedding_backward(args) if _is_dense_sum_or_mean(args) else []


def _size_embedding_bag_sums(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the scratch tensors for the partial sums in an embedding bag's backward.

    They are those of an embedding, if the gradient is dense and the bags are summed or averaged. Otherwise there are none.

    Args:
        args: Arguments of the backward operation.
    """
    gradient, indices, _, _, _, _, num_rows = args[:7]
    return _size_embedding_sums((gradient, indices, num_rows)) if _is_dense_sum_or_mean(args) else []


def _is_dense_sum_or_mean(args: tuple[Any, ...]) -> bool:
    """Whether an embedding bag sums or averages its entries, and its weight gets a dense gradient.

    Args:
        args: Arguments of `aten._embedding_bag_backward`.
    """
    mode, is_sparse = args[8:10]  # mode: 0 sum, 1 mean, 2 max
    return mode < 2 and not is_sparse


def _size_sorting(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of a sort whose rows are too long for one CUDA block.

    The list is empty if the rows have at most 4,096 values. The scratch tensors are the positions of the values, the
    values if there are several rows, and buffers for radix sort. The constant overhead of radix sort (0.1 to 4.5 MB,
    depending on the device) is not included.

    Args:
        args: Arguments of the sort.
    """
    values, size = args[0], args[0].numel() * 8
    dim = args[1] if len(args) > 1 and type(args[1]) is int else -1
    length = values.shape[dim] if values.dim() else 1
    if not size or length <= _MAX_BLOCK_SORT:
        return []
    rows = [size, values.nbytes] if length * 8 < size else []
    return [size, *rows, values.nbytes + size, *([] if values.is_contiguous() else [2 * values.nbytes + size])]


def _size_indexed_sums(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of `index_put` with accumulation, which adds rows by index.

    These are a contiguous copy of the values (unless they are contiguous), the sorted indices, and buffers for the
    sort. The list is empty without accumulation.

    Args:
        args: Arguments of `index_put`.
    """
    if len(args) < 4 or not args[3]:
        return []
    _, indices, values, _ = args[:4]
    size = 8 * max(index.numel() for index in indices if index is not None)
    return [*([] if values.is_contiguous() else [values.nbytes]), *[size] * 4, 2 * size]


def _size_distances(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the scratch tensors of Euclidean distances that are computed as one matrix product.

    For this product, each point gets two additional coordinates. The first scratch tensor is a copy of the first set of
    points, multiplied by -2.

    Args:
        args: The two sets of points.
    """
    one, two = args[:2]
    width, size = one.shape[-1] + 2, one.element_size()
    result_bytes = prod(one.shape[:-1]) * two.shape[-2] * size
    return [prod(one.shape[:-1]) * width * size, max(prod(two.shape[:-1]) * width * size, one.nbytes - result_bytes)]


def _size_masked_rows(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of a softmax that returns zeros for fully masked rows.

    These are the mask of masked elements, the mask of fully masked rows, and the zero that replaces the results of
    those rows.

    Args:
        args: Arguments of the softmax.
    """
    values, dim = args[:2]
    return [values.numel(), values.numel() // values.shape[dim], 4]


def _size_convolution_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the copies of weights and inputs that oneDNN makes in its own memory format.

    Inputs are copied only if their number of channels is a multiple of 8.

    Args:
        args: Arguments of the convolution.
    """
    inputs, weights = args[:2]
    return [weights.nbytes, *_size_reordered(inputs)]


def _size_convolution_backward_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the copies of the gradient and the inputs that oneDNN makes in its own memory format.

    A tensor is copied only if its number of channels is a multiple of 8.

    Args:
        args: Arguments of the convolution's backward.
    """
    gradient, inputs = args[:2]
    return [*_size_reordered(gradient), *_size_reordered(inputs)]


def _size_reordered(tensor: torch.Tensor) -> list[int]:
    """Return a list with the bytes of the copy of a tensor that oneDNN makes in its own memory format.

    The list is empty unless the number of channels is a multiple of 8.
    """
    return [tensor.nbytes] if tensor.shape[1] % 8 == 0 else []


def _size_eight_bit_update_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor in bitsandbytes' 8-bit Adam update on a CPU.

    There, the update uses torch operations. The scratch tensors are five float32 tensors: gradient, two moments, square
    root and denominator.

    Args:
        args: Arguments of the update.
    """
    _, _, parameter = args[:3]
    return [parameter.numel() * 4] * 5


def _size_four_bit_product(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of a four-bit layer's dequantized weight and scales, which are freed after the product.

    Args:
        args: Arguments of the matrix product.
    """
    inputs, shape = args[0], args[2]
    nested = [args[7].numel() * 4] if len(args) > 7 and args[7] is not None else []
    return [*nested, shape[0] * shape[1] * inputs.element_size()]


def _size_nothing(args: tuple[Any, ...]) -> list[int]:
    """Return an empty list, because an in-place kernel needs no scratch memory."""
    return []


def _size_elementwise_loss(args: tuple[Any, ...]) -> list[int]:
    """Return a list with the bytes of the elementwise losses before they are reduced to one number.

    The list is empty with `reduction="none"`.

    Args:
        args: Arguments of the loss function.
    """
    is_reduced = len(args) < 3 or args[2] != 0  # `reduction`: 0 is "none", and "mean" is the default
    return [args[0].nbytes] if is_reduced else []


def _size_logits_loss(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of binary cross-entropy with logits.

    These are the logarithms, and the losses of all elements before they are reduced. With `reduction="none"`, the
    second tensor is the result itself, so it is not in the list.

    Args:
        args: Arguments of the loss function.
    """
    is_reduced = len(args) < 5 or args[4] != 0  # `reduction`: 0 is "none", and "mean" is the default
    return [args[0].nbytes, args[0].nbytes] if is_reduced else [args[0].nbytes]


def _size_softmax_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of a softmax's backward.

    These are the product of gradient and result, and a copy of the gradient if it is not contiguous.

    Args:
        args: Arguments of the backward operation.
    """
    gradient = args[0]
    return [gradient.nbytes] if gradient.is_contiguous() else [gradient.nbytes, gradient.nbytes]


def _size_mask_indices(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the index tensors to which boolean masks are converted.

    Each mask needs one tensor with the indices of all dimensions, and then a separate tensor for each dimension.

    Args:
        args: Arguments of the indexing operation.
    """
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [index.numel() * index.dim() * 8 for index in masks for _ in range(2)]


def _size_chunk_logits(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the float32 logits of a single chunk, for a loss that is computed in chunks."""
    tokens, weight, chunk = args[0], args[1], args[6]
    return [min(len(tokens), chunk) * len(weight) * 4]


def _size_ctc_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor in the CTC loss's backward.

    One is as large as the values that forward has saved, the other as large as the log probabilities.

    Args:
        args: Arguments of the backward operation.
    """
    log_probabilities, forward_values = args[1], args[6]
    return [forward_values.nbytes, log_probabilities.nbytes]


# ---------------------------------------------------------------- table of rules

MemoryRole = Literal["before", "after", "results"]
"""Memory of a rule: scratch memory from before or after the allocation of the results, or the results themselves."""
DeviceGroup = Literal["all", "cpu", "cuda", "old cuda"]
"""Devices of a rule. "old cuda" are CUDA devices without convolutions in bfloat16 (`_BFLOAT16_CAPABILITY`)."""


class MemoryRule(NamedTuple):
    """Rule for memory that an operation allocates on some devices.

    Attributes:
        operation: Name of the operation, such as "aten::sort".
        devices: Devices on which the rule applies.
        role: "before" or "after": scratch memory that is allocated before or after the results. "results": the minimum
            size of each result's storage.
        sizes: Function that computes the bytes from the operation's arguments. A negative size has two meanings: after
            the results, scratch memory of this size that is freed before the next request; for a result, that the
            device's kernel does not create it.
    """

    operation: str
    devices: DeviceGroup
    role: MemoryRole
    sizes: Sizes


def _make_rules(devices: DeviceGroup, role: MemoryRole, rules: dict[str, Sizes]) -> list[MemoryRule]:
    """Return one rule for each operation, all with the same `devices` and `role`.

    Args:
        devices: Devices on which the rules apply.
        role: Memory that the rules describe: "before", "after" or "results", as in `MemoryRule`.
        rules: Function that computes the bytes, as in `MemoryRule.sizes`, by name of the operation.
    """
    return [MemoryRule(operation, devices, role, sizes) for operation, sizes in rules.items()]


_INDEX_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

_RULES: tuple[MemoryRule, ...] = (
    *_make_rules("all", "before", {
        **dict.fromkeys(("aten::index", *_INDEX_PUTS), _size_mask_indices),
        "aten::_ctc_loss_backward": _size_ctc_backward,
        **dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"), _size_elementwise_loss),
        "aten::binary_cross_entropy_with_logits": _size_logits_loss,
        "aten::logsumexp": lambda args: [args[0].nbytes],  # the exponentials of the inputs
        "bitsandbytes::optimizer_update_32bit": _size_nothing,
        "bitsandbytes::dequantize_4bit": _size_nothing,
        "bitsandbytes::dequantize_blockwise": _size_nothing,
        "bitsandbytes::gemm_4bit": _size_four_bit_product,
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _size_chunk_logits,
    }),
    *_make_rules("cpu", "before", {
        "aten::convolution": _size_convolution_on_cpu,
        "aten::convolution_backward": _size_convolution_backward_on_cpu,
        "c10d::_allgather_base_": lambda args: [args[0].nbytes],  # gloo receives into a flat buffer
        "c10d::_reduce_scatter_base_": lambda args: [args[1].nbytes],  # gloo sums all of the input in a copy
        "_c10d_functional::all_gather_into_tensor": lambda args: [args[0].nbytes * args[1]],
        "_c10d_functional::reduce_scatter_tensor": lambda args: [args[0].nbytes],
        "bitsandbytes::optimizer_update_8bit_blockwise": _size_eight_bit_update_on_cpu,
    }),
    *_make_rules("cuda", "before", {
        "aten::_scaled_dot_product_efficient_attention_backward": attention.size_grouped_gradients,
        "aten::embedding_dense_backward": _size_embedding_backward,
        "aten::_embedding_bag_backward": _size_embedding_bag_backward,
        "aten::_euclidean_dist": _size_distances,
        # Grid positions in homogeneous coordinates.
        "aten::affine_grid_generator": lambda args: [
            args[1][0] * prod(args[1][2:]) * args[0].shape[2] * args[0].element_size()
        ],
        "aten::_cudnn_rnn": recurrent.size_cudnn_workspace,
        "aten::_cudnn_rnn_backward": recurrent.size_cudnn_backward_workspace,
        "bitsandbytes::optimizer_update_8bit_blockwise": _size_nothing,
        **copies.COPIES_BEFORE,
    }),
    *_make_rules("cuda", "after", {
        **copies.COPIES_AFTER,
        "aten::_scaled_dot_product_flash_attention_backward": attention.size_flash_backward,
        "aten::_scaled_dot_product_efficient_attention_backward": attention.size_efficient_backward,
        # The result in float32, for heads wider than 128 in half precision.
        "aten::_scaled_dot_product_efficient_attention": lambda args: (
            [args[0].numel() * 4] if args[2].shape[-1] > 128 and args[2].dtype in attention.HALVES else []
        ),
        "aten::_scaled_dot_product_cudnn_attention_backward": attention.size_flash_backward,
        "aten::_safe_softmax": _size_masked_rows,
        "aten::_softmax_backward_data": _size_softmax_backward,
        "aten::embedding_dense_backward": _size_embedding_sums,
        "aten::_embedding_bag_backward": _size_embedding_bag_sums,
        "aten::sort": _size_sorting,
        "aten::_cdist_backward": lambda args: [args[4].numel() * args[1].shape[-1] * args[1].element_size()],
        # For means: ones to count the values, the counts, and a mask of counts that are zero.
        "aten::scatter_reduce": lambda args: (
            [args[3].nbytes, args[0].nbytes, args[0].numel()] if args[4] == "mean" else []
        ),
        **dict.fromkeys(_INDEX_PUTS, _size_indexed_sums),
    }),
    *_make_rules("old cuda", "before", slow_convolutions.SLOW_BEFORE),
    *_make_rules("old cuda", "after", slow_convolutions.SLOW_AFTER),
    # A loss is computed for all elements and then resized to one number, which frees nothing. Recurrent layers keep
    # values for backward.
    *_make_rules("all", "results", {
        **dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss"), _size_elementwise_loss),
        "aten::binary_cross_entropy": lambda args: _size_elementwise_loss((*args[:2], *args[3:])),
        "aten::_cudnn_rnn": recurrent.size_cudnn_reserve,
        "aten::mkldnn_rnn_layer": recurrent.size_onednn_workspace,
    }),
    *_make_rules("cuda", "results", {
        "aten::log_sigmoid_forward": lambda args: [0, -1],
        # The statistics are in float32.
        "aten::native_layer_norm": lambda args: [0, *[args[0].numel() // prod(args[1]) * 4] * 2],
    }),
)  # fmt: skip
"""Rules of all devices, except those for sums, which depend on the number of threads (`sums.make_sum_rules`)."""


@dataclass(frozen=True)
class DeviceRules:
    """Functions that compute the bytes of an operation's memory on one device, by operation.

    Attributes:
        before: Scratch memory that is allocated before the results.
        after: Scratch memory that is allocated after the results, in the order of the requests. A negative size is
            scratch memory that is freed before the next request.
        results: Minimum size of each result's storage. 0 means that the size follows from the result's shape, and a
            negative size that the device's kernel does not create the result.
    """

    before: dict[str, Sizes]
    after: dict[str, Sizes]
    results: dict[str, Sizes]


def list_rules(device: Device) -> DeviceRules:
    """Return the rules for the memory of operations on a device.

    Rules for fewer devices come later in the table, and replace those for more devices.
    """
    device_groups: set[DeviceGroup] = {"all", "cuda" if device.is_cuda else "cpu"}
    if device.is_cuda and device.capability < _BFLOAT16_CAPABILITY:
        device_groups.add("old cuda")
    selected: dict[MemoryRole, dict[str, Sizes]] = {"before": {}, "after": {}, "results": {}}
    for rule in _RULES:
        if rule.devices in device_groups:
            selected[rule.role][rule.operation] = rule.sizes
    if device.is_cuda:
        selected["after"] |= sums.make_sum_rules(device.processors, device.threads)
    return DeviceRules(selected["before"], selected["after"], selected["results"])


def is_cublas_operation(device: Device, name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation uses cuBLAS on a device. cuBLAS's workspace stays allocated after its first use."""
    is_product = name.removeprefix("aten::") in _CUBLAS_OPERATIONS
    return device.cublas > 0 and (
        is_product or (device.capability < _BFLOAT16_CAPABILITY and slow_convolutions.is_slow_convolution(name, args))
    )
