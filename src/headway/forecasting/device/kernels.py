"""What a target device computes differently from a CPU, as data: which kernels it takes, and what they ask for beside their results.

The step is traced on fake tensors that lie on the CPU. For the time of a trace the operations below get an implementation for fake
tensors that asks for what the target's kernels ask for; real tensors go on being computed as ever. It is registered in torch's
dispatcher, not in a Python function, so that calls from C++ and recomputation in backward meet it as well.

CUDA's autocast computes other operations in float32, and leaves others alone, than a CPU's. The names are those that torch
registers for AutocastCUDA (`aten/src/ATen/autocast_mode.h`); a test compares them with the torch that is installed. Those that run
in half precision are the same on both.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from headway.forecasting.device import attention, workspaces
from headway.forecasting.device.devices import Device
from headway.forecasting.device.workspaces import Sizes

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
"""Their inputs become float32."""

FLOAT32_IF_FREE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""They get `dtype=torch.float32`, unless the call says another one."""

AS_GIVEN = (
    "cross_entropy_loss", "ctc_loss.IntList", "ctc_loss.Tensor", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "grid_sampler_3d", "stft", "stft.center",
    "quantile", "trace", "polar", "multilabel_margin_loss_forward", "fake_quantize_per_tensor_affine",
)  # fmt: skip
"""A CPU's autocast makes their inputs float32; CUDA's has nothing to do with them, but with what they call."""


_WITH_BFLOAT16 = (8, 0)
"""The first capability for which cuDNN has convolutions in it."""
_SORTED_BY_BLOCK, _SORTED_FROM = 4096, 3072
"""Up to so many values a row is sorted by one block; up to so many indices an embedding's backward on CUDA needs no sorting."""


def _embedding_backward(args: tuple[Any, ...]) -> list[int]:
    """Gradients in a row; indices, sorted, with where they were, and room to sort them in."""
    size, rows = args[1].numel() * 8, [] if args[0].is_contiguous() else [args[0].nbytes]
    return [*rows, size, size, 2 * size] if args[1].numel() > _SORTED_FROM else rows


def _embedding_sums(args: tuple[Any, ...]) -> list[int]:
    """Sums of ten rows at most each, as many as there may be: every index that occurs begins one.

    Where far more indices than rows are summed up, torch takes another way; the bounds were measured.
    """
    indices, rows = args[1].numel(), args[2]
    if not rows or indices <= _SORTED_FROM or (rows < 512 and rows * 30 < indices):
        return []
    sums = indices // 10 + min(indices, rows)
    return [sums * 8, sums * args[0].shape[-1] * 4]


def _sorting(args: tuple[Any, ...]) -> list[int]:
    """Rows that no block sorts by itself: where values were, of several rows twice and the values too, and room for radix sort.

    What that takes beside the values, 0.1 to 4.5 MB by the device, is left out.
    """
    values, size = args[0], args[0].numel() * 8
    length = values.shape[args[1] if len(args) > 1 and type(args[1]) is int else -1] if values.dim() else 1
    if not size or length <= _SORTED_BY_BLOCK:
        return []
    rows = [size, values.nbytes] if length * 8 < size else []
    return [size, *rows, values.nbytes + size, *([] if values.is_contiguous() else [2 * values.nbytes + size])]


def _indexed_sums(args: tuple[Any, ...]) -> list[int]:
    """Where rows are added up by indices, these are sorted, and values that do not lie in a row are copied."""
    if len(args) < 4 or not args[3]:
        return []
    size = 8 * max(index.numel() for index in args[1] if index is not None)
    return [*([] if args[2].is_contiguous() else [args[2].nbytes]), *[size] * 4, 2 * size]


def _distances(args: tuple[Any, ...]) -> list[int]:
    """Euclidean ones by one product: of points that each have two columns more; the first were doubled in a copy before."""
    one, two = args[:2]
    wide, size = one.shape[-1] + 2, one.element_size()
    found = prod(one.shape[:-1]) * two.shape[-2] * size
    return [prod(one.shape[:-1]) * wide * size, max(prod(two.shape[:-1]) * wide * size, one.nbytes - found)]


def _where_all_is_masked(args: tuple[Any, ...]) -> list[int]:
    """What is masked, the rows in which all is, and the zero that these become."""
    return [args[0].numel(), args[0].numel() // args[0].shape[args[1]], 4]


def _convolution_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """oneDNN's copies of inputs and weights in its own order; channels in eights at least."""
    inputs, weights = args[0], args[1]
    return [weights.nbytes, *_ordered(inputs)]


def _convolution_backward_on_cpu(args: tuple[Any, ...]) -> list[int]:
    gradient, inputs = args[0], args[1]
    return [*_ordered(gradient), *_ordered(inputs)]


def _ordered(tensor: torch.Tensor) -> list[int]:
    return [tensor.nbytes] if tensor.shape[1] % 8 == 0 else []


def _eight_bit_on_cpu(args: tuple[Any, ...]) -> list[int]:
    """bitsandbytes' update of Adam in torch's operations: gradient, both moments, a root and a denominator in float32."""
    return [args[2].numel() * 4] * 5


def _four_bit_product(args: tuple[Any, ...]) -> list[int]:
    """The weight of a four-bit layer in full, and its scales, until the product is there."""
    inputs, shape = args[0], args[2]
    nested = [args[7].numel() * 4] if len(args) > 7 and args[7] is not None else []
    return [*nested, shape[0] * shape[1] * inputs.element_size()]


def _nothing(args: tuple[Any, ...]) -> list[int]:
    """The kernel works in place."""
    return []


def _before_reduction(args: tuple[Any, ...]) -> list[int]:
    """A loss of each element, until it is reduced to one number; `reduction=0` is none."""
    return [args[0].nbytes] if len(args) < 3 or args[2] else []


def _masks(args: tuple[Any, ...]) -> list[int]:
    """The indices that masks of bools become: found, and then one by one for each dimension."""
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [index.numel() * index.dim() * 8 for index in masks for _ in range(2)]


def _logits_of_a_chunk(args: tuple[Any, ...]) -> list[int]:
    tokens, weight, chunk = args[0], args[1], args[6]
    return [min(len(tokens), chunk) * len(weight) * 4]


def _ctc_backward(args: tuple[Any, ...]) -> list[int]:
    """What forward has kept, once more from the other end, and probabilities in its order."""
    return [args[6].nbytes, args[1].nbytes]


_EVERYWHERE: dict[str, Sizes] = {
    **{f"aten::{name}": _masks for name in ("index", "index_put", "index_put_", "_index_put_impl_")},
    "aten::_ctc_loss_backward": _ctc_backward,
    **{f"aten::{name}": _before_reduction for name in ("mse_loss", "smooth_l1_loss", "huber_loss")},
    # Their logarithms, and the losses until they are reduced.
    "aten::binary_cross_entropy_with_logits": lambda args: [args[0].nbytes] * (1 + (len(args) < 5 or args[4] > 0)),
    "aten::logsumexp": lambda args: [args[0].nbytes],  # their exponentials
    **dict.fromkeys(("bitsandbytes::optimizer_update_32bit", "bitsandbytes::dequantize_4bit"), _nothing),
    "bitsandbytes::dequantize_blockwise": _nothing,
    "bitsandbytes::gemm_4bit": _four_bit_product,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _logits_of_a_chunk,
}

_OF_CPU: dict[str, Sizes] = {
    "aten::convolution": _convolution_on_cpu,
    "aten::convolution_backward": _convolution_backward_on_cpu,
    "c10d::_allgather_base_": lambda args: [args[0].nbytes],  # what comes in lies in a row first
    "c10d::_reduce_scatter_base_": lambda args: [args[1].nbytes],  # all of the input is summed, in a copy
    "_c10d_functional::all_gather_into_tensor": lambda args: [args[0].nbytes * args[1]],
    "_c10d_functional::reduce_scatter_tensor": lambda args: [args[0].nbytes],
    "bitsandbytes::optimizer_update_8bit_blockwise": _eight_bit_on_cpu,
}

_OF_CUDA: dict[str, Sizes] = {
    "aten::_scaled_dot_product_efficient_attention_backward": attention.grouped_gradients,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag_backward": lambda args: _embedding_backward(args) if args[8] < 2 and not args[9] else [],
    "aten::_euclidean_dist": _distances,
    # Places in homogeneous coordinates.
    "aten::affine_grid_generator": lambda args: [
        args[1][0] * prod(args[1][2:]) * args[0].shape[2] * args[0].element_size()
    ],
    "aten::_cudnn_rnn": workspaces.asked_by_cudnn,
    "aten::_cudnn_rnn_backward": workspaces.asked_by_cudnn_backward,
    "bitsandbytes::optimizer_update_8bit_blockwise": _nothing,
    **workspaces.COPIES_BEFORE,
}

LATE_SCRATCH_OF_CUDA: dict[str, Sizes] = {
    **workspaces.COPIES_AFTER,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    # Of wide heads in half precision, the result in float32.
    "aten::_scaled_dot_product_efficient_attention": lambda args: (
        [args[0].numel() * 4] if args[2].shape[-1] > 128 and args[2].dtype in attention.HALVES else []
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.flash_backward,
    "aten::_safe_softmax": _where_all_is_masked,
    # The gradient times the result, and a copy of one that does not lie in a row.
    "aten::_softmax_backward_data": lambda args: [args[0].nbytes] * (2 - args[0].is_contiguous()),
    "aten::embedding_dense_backward": _embedding_sums,
    # As an embedding's, of sums and means that are dense.
    "aten::_embedding_bag_backward": lambda args: _embedding_sums(
        (*args[:2], args[6] if args[8] < 2 and not args[9] else 0)
    ),
    "aten::sort": _sorting,
    "aten::_cdist_backward": lambda args: [args[4].numel() * args[1].shape[-1] * args[1].element_size()],
    # How many values each mean has, from ones, and where there are none.
    "aten::scatter_reduce": lambda args: [args[3].nbytes, args[0].nbytes, args[0].numel()] if args[4] == "mean" else [],
    **{f"aten::{name}": _indexed_sums for name in ("index_put", "index_put_", "_index_put_impl_")},
}
"""On CUDA: what a kernel asks for after its results, in order; negative: what it gives back before it asks for the next."""


def scratch(device: Device) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """Bytes that a device's kernels ask torch's allocator for while they run, by operation: before their results, and after."""
    if not device.is_cuda:
        return _EVERYWHERE | _OF_CPU, {}
    before, after = (workspaces.SLOW_BEFORE, workspaces.SLOW_AFTER) if device.capability < _WITH_BFLOAT16 else ({}, {})
    late = LATE_SCRATCH_OF_CUDA | workspaces.of_sums(device.processors, device.threads)
    return _EVERYWHERE | _OF_CUDA | before, late | after


OVERSIZED: dict[str, Sizes] = {
    **{f"aten::{name}": _before_reduction for name in ("mse_loss", "smooth_l1_loss")},
    "aten::binary_cross_entropy": lambda args: _before_reduction((*args[:2], *args[3:])),
    "aten::_cudnn_rnn": workspaces.kept_by_cudnn,
    "aten::mkldnn_rnn_layer": workspaces.kept_by_onednn,
}
"""Everywhere: bytes behind each result that are more than it shows: of a loss that was made for all elements and then shrunk to one
number, which gives nothing back; of what recurrent layers keep."""

_OVERSIZED_ON_CUDA: dict[str, Sizes] = {
    "aten::log_sigmoid_forward": lambda args: [0, -1],
    "aten::native_layer_norm": lambda args: [0, *[args[0].numel() // prod(args[1]) * 4] * 2],
}
"""Statistics are kept in float32; negative: a CPU's result that CUDA's kernel does without."""


def oversized(device: Device) -> dict[str, Sizes]:
    """Bytes behind each result where a device keeps more, or less, than a fake result shows, by operation."""
    return OVERSIZED | _OVERSIZED_ON_CUDA if device.is_cuda else OVERSIZED


_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm")


def takes_cublas(device: Device, name: str, args: tuple[Any, ...]) -> bool:
    """Does an operation go to cuBLAS, whose workspace stays from the first of them on?"""
    is_product = name.removeprefix("aten::") in _MATMUL
    return device.cublas > 0 and (is_product or (device.capability < _WITH_BFLOAT16 and workspaces.is_slow(name, args)))


UNKNOWN_SCRATCH: dict[str, str] = {
    "aten::convolution": "cuDNN's workspaces for convolutions are not counted: it takes what the algorithm it chooses wants",
    "aten::convolution_backward": "cuDNN's workspaces for convolutions are not counted: it takes what the algorithm it chooses wants",
    "aten::_scaled_dot_product_cudnn_attention_backward": (
        "cuDNN's workspace for attention's backward is assumed to be as large as FlashAttention's"
    ),
    "aten::_cudnn_rnn": "what cuDNN keeps of recurrent layers is assumed: gates, cells and outputs of every step",
    "aten::_ctc_loss": "the workspace of the CTC loss is not counted",
    "aten::sort": "the workspace of sorting is not counted",
    **dict.fromkeys((f"aten::_fft_{name}" for name in ("r2c", "c2c", "c2r")), "cuFFT's workspaces are not counted"),
    **dict.fromkeys(
        (f"aten::{name}" for name in ("linalg_svd", "_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_inv_ex")),
        "cuSOLVER's workspaces are not counted",
    ),
}
"""What is known not to be known, by operation."""

NAMESPACES = (
    *("aten", "prim", "prims", "profiler", "inductor", "higher_order"),
    *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"),
)
"""Whose operations a trace understands; all others are named in its caveats."""


@contextmanager
def substituted(device: Device, precision: str) -> Iterator[None]:
    """A block in which fake tensors on the CPU ask for memory as they would on that device."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        # Registered kernels stay until this is called.
        stack.callback(library._destroy)
        choice = None
        if device.is_cuda:
            choice = attention.AttentionKernel(device.capability, tuple(map(int, torch.__version__.split(".")[:2])))
            workspaces.override(library)
            library.impl("dropout", _dropout, "AutogradCPU")  # type: ignore[no-untyped-call]
            library.impl("linear", _linear, "AutogradCPU")  # type: ignore[no-untyped-call]
            if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
                library.impl("rms_norm", workspaces.rms_norm, "AutogradCPU")  # type: ignore[no-untyped-call]
            if precision != "no":
                for name in (*FLOAT32, *FLOAT32_IF_FREE):
                    _in_float32(library, name)
                for name in AS_GIVEN:
                    _as_given(library, name)
        library.impl("scaled_dot_product_attention", attention.attention(choice), "AutogradCPU")  # type: ignore[no-untyped-call]
        yield


def grouped_products(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Products of groups of rows (experts) in float32 or float16, whose fake kernel torch has for bfloat16 alone; None: another."""
    if func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
        return None
    if args[0].dtype is torch.bfloat16:
        return None
    halves = [torch.empty_strided(each.shape, each.stride(), dtype=torch.bfloat16) for each in args[:2]]
    made = func(*halves, *args[2:])
    return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype)


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's keeps one byte an element for backward, where a CPU keeps a mask of the tensor's own dtype."""
    if isinstance(tensor, FakeTensor) and train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, train)[0]  # type: ignore[no-any-return]
    return torch.ops.aten.dropout.default.decompose(tensor, p, train)  # type: ignore[no-any-return]


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of inputs that are not in a row torch adds the bias in place, but not where it is of a subclass, as a fake one is."""
    if isinstance(tokens, FakeTensor) and bias is not None and tokens.dim() > 2 and not tokens.is_contiguous():
        return torch.matmul(tokens, weight.t()).add_(bias)
    return torch.ops.aten.linear.default.decompose(tokens, weight, bias)  # type: ignore[no-any-return]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _as_given(library: torch.library.Library, name: str) -> None:
    """Under autocast CUDA computes it in the dtype that it is given; what it calls is cast as ever."""
    operation = _overload(name)
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_composite:
            return operation.decompose(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operation(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another kernel was there
        library.impl(name, run, "AutocastCPU")  # type: ignore[no-untyped-call]


def _in_float32(library: torch.library.Library, name: str) -> None:
    """Under autocast CUDA computes it in float32; where a CPU does too, nothing is to be done."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(f"aten::{name}", "AutocastCPU") or not has_kernel(f"aten::{name}", "AutocastCUDA"):
        return
    operation = _overload(name)
    is_optional = name in FLOAT32_IF_FREE
    place = [argument.name for argument in operation._schema.arguments].index("dtype") if is_optional else 0

    def cast(value: Any) -> Any:
        if isinstance(value, attention.TRACED) and value.dtype in attention.HALVES:
            return value.to(torch.float32)
        return [cast(each) for each in value] if isinstance(value, list | tuple) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        # As torch's own kernels do it: what is called from here on is not cast again.
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if is_optional:
                said = args[place] if len(args) > place else kwargs.get("dtype")
                if said is None and any(isinstance(each, attention.TRACED) for each in args):
                    return operation(*args[:place], **{**kwargs, "dtype": torch.float32})
                return operation(*args, **kwargs)
            return operation(*(cast(each) for each in args), **{key: cast(each) for key, each in kwargs.items()})

    library.impl(name, run, "AutocastCPU")  # type: ignore[no-untyped-call]
