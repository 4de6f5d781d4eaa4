"""Which operations CUDA's autocast computes in float32, and which it leaves alone; a CPU's lists are others.

The names are those that torch registers for AutocastCUDA (`aten/src/ATen/autocast_mode.h`); a test compares them with the torch
that is installed. Those that run in half precision are the same on both.
"""

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "rms_norm", "norm.Scalar",
    "norm.ScalarOpt_dim",
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
