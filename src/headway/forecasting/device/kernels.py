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
from typing import Any

import torch

from headway.forecasting._torch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    FakeTensor,
    has_kernel_for_dispatch_key,
)
from headway.forecasting.device import attention, recurrent, rms_norm
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
                library.impl("rms_norm", rms_norm.apply_rms_norm, "AutogradCPU")  # type: ignore[no-untyped-call]
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
    """Return an aten operation by its name, with or without an overload, such as "sum.dim_IntList"."""
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
