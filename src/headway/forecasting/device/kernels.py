"""Make a trace on fake CPU tensors allocate the memory that the target device's kernels would allocate.

Fake tensors are on the CPU. During a trace, some operations have another implementation for fake tensors, which
requests the memory that the target's kernels request. Real tensors are computed as usual. The implementations are
registered in torch's dispatcher, so they also apply to calls from C++ and to recomputation in backward.

CUDA's autocast and a CPU's autocast differ in which operations they cast to float32. The operations listed here are
those that torch registers for AutocastCUDA (`aten/src/ATen/autocast_mode.h`). A test compares them with the installed
torch. Both autocasts run the same operations in half precision.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch

from headway.forecasting._torch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    FakeTensor,
    has_kernel_for_dispatch_key,
)
from headway.forecasting.device import attention, copies, recurrent, sums
from headway.forecasting.device.copies import Sizes
from headway.forecasting.device.devices import Device

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "rms_norm", "norm.Scalar",
    "norm.ScalarOpt_dim", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Operations whose inputs CUDA's autocast casts to float32."""

FLOAT32_IF_FREE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""Operations that get `dtype=torch.float32` from CUDA's autocast unless the call sets another dtype."""

NOT_CAST_BY_CUDA = (
    "cross_entropy_loss", "ctc_loss.IntList", "ctc_loss.Tensor", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "grid_sampler_3d", "stft", "stft.center",
    "quantile", "trace", "polar", "multilabel_margin_loss_forward", "fake_quantize_per_tensor_affine",
)  # fmt: skip
"""Operations whose inputs are cast to float32 by a CPU's autocast, but not by CUDA's.

On CUDA, autocast casts inputs only for the operations that these operations call.
"""


_BFLOAT16_CAPABILITY = (8, 0)
"""First compute capability for which cuDNN has convolutions in bfloat16."""
_MAX_BLOCK_SORT = 4096
"""Longest row that a single CUDA block can sort."""
_SORTED_FROM = 3072
"""Largest number of indices that an embedding's backward on CUDA processes without sorting them."""

_OVERSIZED_ON_CUDA: dict[str, Sizes] = {
    "aten::log_sigmoid_forward": lambda args: [0, -1],
    "aten::native_layer_norm": lambda args: [0, *[args[0].numel() // prod(args[1]) * 4] * 2],
}
"""Rules for the storage sizes of results that have another size on CUDA than elsewhere, by operation.

A rule returns the minimum size in bytes for each result. 0 means that the size follows from the result's shape, and a
negative size that the result does not exist on CUDA. The statistics of a layer norm are in float32.
"""
_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm")
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
    size, rows = args[1].numel() * 8, [] if args[0].is_contiguous() else [args[0].nbytes]
    return [*rows, size, size, 2 * size] if args[1].numel() > _SORTED_FROM else rows


def _size_embedding_sums(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the scratch tensors for the partial sums in an embedding's backward.

    A partial sum covers at most ten rows, and every distinct index starts a new one. The number of sums that follows
    from this is an upper bound. If there are few indices, or far more indices than embedding rows, torch uses another
    algorithm without partial sums. The thresholds for this choice were measured.

    Args:
        args: Arguments of the backward operation.
    """
    indices, rows = args[1].numel(), args[2]
    if not rows or indices <= _SORTED_FROM or (rows < 512 and rows * 30 < indices):
        return []
    sums = indices // 10 + min(indices, rows)
    return [sums * 8, sums * args[0].shape[-1] * 4]


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
    size = 8 * max(index.numel() for index in args[1] if index is not None)
    return [*([] if args[2].is_contiguous() else [args[2].nbytes]), *[size] * 4, 2 * size]


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
    return [args[0].numel(), args[0].numel() // args[0].shape[args[1]], 4]


def _size_convolution_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the copies of weights and inputs that oneDNN makes in its own memory format.

    Inputs are copied only if their number of channels is a multiple of 8.

    Args:
        args: Arguments of the convolution.
    """
    inputs, weights = args[0], args[1]
    return [weights.nbytes, *_size_reordered(inputs)]


def _size_convolution_backward_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the copies of the gradient and the inputs that oneDNN makes in its own memory format.

    A tensor is copied only if its number of channels is a multiple of 8.

    Args:
        args: Arguments of the convolution's backward.
    """
    gradient, inputs = args[0], args[1]
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
    return [args[2].numel() * 4] * 5


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


def _size_unreduced_loss(args: tuple[Any, ...]) -> list[int]:
    """Return a list with the bytes of the elementwise losses before they are reduced to one number.

    The list is empty with `reduction="none"`.

    Args:
        args: Arguments of the loss function.
    """
    return [args[0].nbytes] if len(args) < 3 or args[2] else []


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
    return [args[6].nbytes, args[1].nbytes]


_SCRATCH_ON_ALL: dict[str, Sizes] = {
    **{f"aten::{name}": _size_mask_indices for name in ("index", "index_put", "index_put_", "_index_put_impl_")},
    "aten::_ctc_loss_backward": _size_ctc_backward,
    **{f"aten::{name}": _size_unreduced_loss for name in ("mse_loss", "smooth_l1_loss", "huber_loss")},
    # The logarithms, and the losses of all elements before they are reduced.
    "aten::binary_cross_entropy_with_logits": lambda args: [args[0].nbytes] * (1 + (len(args) < 5 or args[4] > 0)),
    "aten::logsumexp": lambda args: [args[0].nbytes],  # the exponentials of the inputs
    **dict.fromkeys(("bitsandbytes::optimizer_update_32bit", "bitsandbytes::dequantize_4bit"), _size_nothing),
    "bitsandbytes::dequantize_blockwise": _size_nothing,
    "bitsandbytes::gemm_4bit": _size_four_bit_product,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _size_chunk_logits,
}
"""Rules for the scratch memory that operations allocate before their results on every device, by operation."""

_SCRATCH_ON_CPU: dict[str, Sizes] = {
    "aten::convolution": _size_convolution_on_cpu,
    "aten::convolution_backward": _size_convolution_backward_on_cpu,
    "c10d::_allgather_base_": lambda args: [args[0].nbytes],  # gloo receives into a flat buffer
    "c10d::_reduce_scatter_base_": lambda args: [args[1].nbytes],  # gloo sums all of the input in a copy
    "_c10d_functional::all_gather_into_tensor": lambda args: [args[0].nbytes * args[1]],
    "_c10d_functional::reduce_scatter_tensor": lambda args: [args[0].nbytes],
    "bitsandbytes::optimizer_update_8bit_blockwise": _size_eight_bit_update_on_cpu,
}
"""Rules for the scratch memory that operations allocate before their results on a CPU, by operation."""

_SCRATCH_ON_CUDA: dict[str, Sizes] = {
    "aten::_scaled_dot_product_efficient_attention_backward": attention.size_grouped_gradients,
    "aten::embedding_dense_backward": _size_embedding_backward,
    "aten::_embedding_bag_backward": lambda args: _size_embedding_backward(args) if args[8] < 2 and not args[9] else [],
    "aten::_euclidean_dist": _size_distances,
    # Grid positions in homogeneous coordinates.
    "aten::affine_grid_generator": lambda args: [
        args[1][0] * prod(args[1][2:]) * args[0].shape[2] * args[0].element_size()
    ],
    "aten::_cudnn_rnn": recurrent.size_cudnn_workspace,
    "aten::_cudnn_rnn_backward": recurrent.size_cudnn_backward_workspace,
    "bitsandbytes::optimizer_update_8bit_blockwise": _size_nothing,
    **copies.COPIES_BEFORE,
}
"""Rules for the scratch memory that operations allocate before their results on CUDA, by operation."""

LATE_SCRATCH_ON_CUDA: dict[str, Sizes] = {
    **copies.COPIES_AFTER,
    "aten::_scaled_dot_product_flash_attention_backward": attention.size_flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.size_efficient_backward,
    # The result in float32, for heads wider than 128 in half precision.
    "aten::_scaled_dot_product_efficient_attention": lambda args: (
        [args[0].numel() * 4] if args[2].shape[-1] > 128 and args[2].dtype in attention.HALVES else []
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.size_flash_backward,
    "aten::_safe_softmax": _size_masked_rows,
    # The product of gradient and result, and a copy of a gradient that is not contiguous.
    "aten::_softmax_backward_data": lambda args: [args[0].nbytes] * (2 - args[0].is_contiguous()),
    "aten::embedding_dense_backward": _size_embedding_sums,
    # As for an embedding, if the gradient is dense and the bags are summed or averaged (modes 0 and 1).
    "aten::_embedding_bag_backward": lambda args: _size_embedding_sums(
        (*args[:2], args[6] if args[8] < 2 and not args[9] else 0)
    ),
    "aten::sort": _size_sorting,
    "aten::_cdist_backward": lambda args: [args[4].numel() * args[1].shape[-1] * args[1].element_size()],
    # For means: ones to count the values, the counts, and a mask of counts that are zero.
    "aten::scatter_reduce": lambda args: [args[3].nbytes, args[0].nbytes, args[0].numel()] if args[4] == "mean" else [],
    **{f"aten::{name}": _size_indexed_sums for name in ("index_put", "index_put_", "_index_put_impl_")},
}
"""Rules for the scratch memory that operations allocate after their results on CUDA, by operation.

Each rule returns the sizes in the order of the requests. A negative size denotes scratch memory that is freed before
the next request.
"""


def list_scratch_rules(device: Device) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """Return two dicts of rules for the scratch memory on a device, by operation.

    The first is for memory that is allocated before the results, the second for memory that is allocated after them.
    """
    if not device.is_cuda:
        return _SCRATCH_ON_ALL | _SCRATCH_ON_CPU, {}
    before, after = (copies.SLOW_BEFORE, copies.SLOW_AFTER) if device.capability < _BFLOAT16_CAPABILITY else ({}, {})
    late = LATE_SCRATCH_ON_CUDA | sums.make_sum_rules(device.processors, device.threads)
    return _SCRATCH_ON_ALL | _SCRATCH_ON_CUDA | before, late | after


OVERSIZED: dict[str, Sizes] = {
    **{f"aten::{name}": _size_unreduced_loss for name in ("mse_loss", "smooth_l1_loss")},
    "aten::binary_cross_entropy": lambda args: _size_unreduced_loss((*args[:2], *args[3:])),
    "aten::_cudnn_rnn": recurrent.size_cudnn_reserve,
    "aten::mkldnn_rnn_layer": recurrent.size_onednn_workspace,
}
"""Rules, for every device, for the storage sizes of results that own more memory than their shape needs, by operation.

For example, a loss is computed for all elements and then resized to one number, which frees nothing. Recurrent layers
keep values for backward.
"""


def list_storage_rules(device: Device) -> dict[str, Sizes]:
    """Return rules for the storage sizes of results, by operation.

    The rules cover the operations whose results own more or less memory on the device than their shape needs. A rule
    returns the minimum bytes of each result. 0 means no minimum, and a negative number that the result does not exist.
    """
    return OVERSIZED | _OVERSIZED_ON_CUDA if device.is_cuda else OVERSIZED


def is_cublas_operation(device: Device, name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation uses cuBLAS on a device. cuBLAS's workspace stays allocated after its first use."""
    is_product = name.removeprefix("aten::") in _MATMUL
    return device.cublas > 0 and (
        is_product or (device.capability < _BFLOAT16_CAPABILITY and copies.is_slow_convolution(name, args))
    )


@contextmanager
def substitute_kernels(device: Device, precision: str) -> Iterator[None]:
    """Return a context in which fake tensors on the CPU request the memory that the device's kernels would request.

    Args:
        device: Device that is traced for.
        precision: "no", "bf16" or "fp16". Unless it is "no", the CPU's autocast also casts the same operations as
            CUDA's.
    """
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        # Without this call, the kernels would stay registered as long as the library object exists.
        stack.callback(library._destroy)
        attention_rules = None
        if device.is_cuda:
            version = tuple(map(int, torch.__version__.split(".")[:2]))
            attention_rules = attention.AttentionRules(device.capability, version)
            recurrent.override_recurrent_layers(library)
            library.impl("dropout", _apply_dropout, "AutogradCPU")  # type: ignore[no-untyped-call]
            library.impl("linear", _apply_linear, "AutogradCPU")  # type: ignore[no-untyped-call]
            if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
                library.impl("rms_norm", copies.apply_rms_norm, "AutogradCPU")  # type: ignore[no-untyped-call]
            if precision != "no":
                for name in (*FLOAT32, *FLOAT32_IF_FREE):
                    _cast_to_float32(library, name)
                for name in NOT_CAST_BY_CUDA:
                    _keep_dtype(library, name)
        library.impl("scaled_dot_product_attention", attention.make_attention(attention_rules), "AutogradCPU")  # type: ignore[no-untyped-call]
        yield


def make_grouped_product(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the fake result of a grouped matrix product (of experts) in a dtype other than bfloat16.

    torch's own fake kernel accepts only bfloat16. Return None for bfloat16 and for other operations.

    Args:
        func: Operation that is traced.
        args: Arguments of the operation.
    """
    if func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
        return None
    if args[0].dtype is torch.bfloat16:
        return None
    bfloat16_args = [torch.empty_strided(each.shape, each.stride(), dtype=torch.bfloat16) for each in args[:2]]
    product = func(*bfloat16_args, *args[2:])
    return torch.empty_strided(product.shape, product.stride(), dtype=args[0].dtype)


def _apply_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Apply dropout to a fake tensor with a mask of one byte per element, as on CUDA.

    On a CPU, torch's mask has the tensor's dtype. Real tensors are computed as usual, and so are calls outside of
    training or with a `p` of 0 or 1.
    """
    if isinstance(tensor, FakeTensor) and train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, train)[0]  # type: ignore[no-any-return]
    return torch.ops.aten.dropout.default.decompose(tensor, p, train)  # type: ignore[no-any-return]


def _apply_linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer, which allocates as much memory for fake tensors as torch does for plain tensors.

    If inputs with more than two dimensions are not contiguous, torch adds the bias in place for plain tensors. For
    tensor subclasses such as fake tensors, torch would allocate another tensor for the sum. So this function adds the
    bias in place for such fake inputs. All other calls are computed as usual.
    """
    if isinstance(tokens, FakeTensor) and bias is not None and tokens.dim() > 2 and not tokens.is_contiguous():
        return torch.matmul(tokens, weight.t()).add_(bias)
    return torch.ops.aten.linear.default.decompose(tokens, weight, bias)  # type: ignore[no-any-return]


def _get_overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _keep_dtype(library: torch.library.Library, name: str) -> None:
    """Make autocast leave the inputs of an operation uncast, as on CUDA.

    If the operation calls other operations, autocast still applies to those.

    Args:
        library: Library to register the operation's implementation in.
        name: Name of the operation.
    """
    operation = _get_overload(name)
    is_composite = has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_composite:
            return operation.decompose(*args, **kwargs)
        with ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            return operation(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this overrides its own kernel
        library.impl(name, run, "AutocastCPU")  # type: ignore[no-untyped-call]


def _cast_to_float32(library: torch.library.Library, name: str) -> None:
    """Make autocast cast the half-precision inputs of an operation to float32, as on CUDA.

    An operation of `FLOAT32_IF_FREE` gets `dtype=torch.float32` instead, unless the call sets another dtype. Do nothing
    if the CPU's autocast already handles the operation, or if CUDA's does not.

    Args:
        library: Library to register the operation's implementation in.
        name: Name of the operation.
    """
    has_kernel = has_kernel_for_dispatch_key
    if has_kernel(f"aten::{name}", "AutocastCPU") or not has_kernel(f"aten::{name}", "AutocastCUDA"):
        return
    operation = _get_overload(name)
    is_optional = name in FLOAT32_IF_FREE
    argument_names = [argument.name for argument in operation._schema.arguments]
    dtype_index = argument_names.index("dtype") if is_optional else 0

    def cast_value(value: Any) -> Any:
        if isinstance(value, attention.TRACED) and value.dtype in attention.HALVES:
            return value.to(torch.float32)
        return [cast_value(each) for each in value] if isinstance(value, list | tuple) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        # Excludes autocast for the calls below, as torch's own autocast kernels do.
        with ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            if is_optional:
                dtype = args[dtype_index] if len(args) > dtype_index else kwargs.get("dtype")
                if dtype is None and any(isinstance(each, attention.TRACED) for each in args):
                    return operation(*args[:dtype_index], **{**kwargs, "dtype": torch.float32})
                return operation(*args, **kwargs)
            cast_kwargs = {key: cast_value(each) for key, each in kwargs.items()}
            return operation(*map(cast_value, args), **cast_kwargs)

    library.impl(name, run, "AutocastCPU")  # type: ignore[no-untyped-call]
