"""Functions `is_*_available` and others that check for packages, devices and drivers. Most import no package."""

import subprocess
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion

from headway.common import env
from headway.compat.accelerate.constants import STR_OPERATION_TO_FUNC
from headway.core.runtime.device import detect_hardware
from headway.errors import ConfigError
from headway.version import __version__


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Whether a version meets a requirement, as in `compare_versions("datasets", ">=", "2.0")`.

    Args:
        library_or_version: Name of a distribution, whose installed version is compared, or a `packaging` version.
        operation: ">", ">=", "==", "!=", "<=" or "<".
        requirement_version: Version to compare with.

    Raises:
        ConfigError: If the operation is unknown.
        PackageNotFoundError: If the distribution is not installed.
    """
    if not isinstance(library_or_version, str):
        return _meets_requirement(str(library_or_version), operation, requirement_version)
    return _meets_requirement(_read_version(library_or_version), operation, requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version meets a requirement, as in `is_torch_version(">=", "2.4")`.

    Raises:
        ConfigError: If the operation is none of ">", ">=", "==", "!=", "<=" and "<".
    """
    return _meets_requirement(str(torch.__version__), operation, version)


def _meets_requirement(version: str, operation: str, requirement: str) -> bool:
    """Whether a version meets a requirement. See `compare_versions` for the operations.

    Raises:
        ConfigError: If the operation is unknown.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(f"operation={operation!r}; allowed: {', '.join(STR_OPERATION_TO_FUNC)}")
    # torch's class compares versions as `packaging` does, which is not a dependency of Headway.
    return bool(STR_OPERATION_TO_FUNC[operation](TorchVersion(version), TorchVersion(requirement)))


def _read_version(distribution: str) -> str:
    return __version__ if distribution == "headway" else metadata.version(distribution)


# ---------------------------------------------------------------- packages


def _has_package(package: str, minimum: str | None = None, below: str | None = None) -> bool:
    """Whether a package is installed in a version within a range.

    A directory with the package's name on `sys.path` does not count as installed.

    Args:
        package: Name of the package.
        minimum: Lowest accepted version. None: no limit.
        below: Lowest version that is too new. None: no limit.
    """
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    if minimum is None and below is None:
        return True
    version = _read_version(package)
    return (minimum is None or _meets_requirement(version, ">=", minimum)) and (
        below is None or _meets_requirement(version, "<", below)
    )


_PACKAGES = """
    amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib mlflow msamp pandas peft pynvml pytest rich
    sagemaker schedulefree swanlab timm torchdata torchvision tqdm trackio transformer_engine transformers triton wandb
"""
_PACKAGE_BY_NAME = {"lomo": "lomo_optim", "megatron_lm": "megatron", **{name: name for name in _PACKAGES.split()}}


def _make_package_check(name: str, package: str) -> Callable[[], bool]:
    """Return a function without arguments that returns whether a package is installed.

    Args:
        name: Name of the function.
        package: Name of the package.
    """

    def is_available() -> bool:
        return _has_package(package)

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Whether {package} is installed."
    return is_available


# These functions of Accelerate differ only in the package that must be installed.
globals().update(
    {
        f"is_{name}_available": _make_package_check(f"is_{name}_available", package)
        for name, package in _PACKAGE_BY_NAME.items()
    }
)


def is_aim_available() -> bool:
    """Whether aim is installed in a version below 4."""
    return _has_package("aim", below="4.0.0")


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _has_package("tensorboard") or _has_package("tensorboardX")


def is_torchao_available() -> bool:
    """Whether torchao 0.6.1 or later is installed."""
    return _has_package("torchao", "0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata 0.8.0 or later is installed."""
    return _has_package("torchdata", "0.8.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed in version `min_version` or later."""
    return _has_package("numpy", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed in version `min_version` or later."""
    return _has_package("bitsandbytes", min_version)


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes 0.37.2 or later is installed."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes 0.39.0 or later is installed."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes is installed with support for devices other than CUDA."""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", set())


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed and can compute in MXFP8 on this machine."""
    if not _has_package("transformer_engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_pippy_available() -> bool:
    """Whether torch was built with `torch.distributed`, so that a model can be split into pipeline stages."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """Whether torch can load tensors without executing code. Always True for the supported versions of torch."""
    return True


# ---------------------------------------------------------------- devices


def is_cuda_available() -> bool:
    """Whether this process can use a CUDA device. The check does not initialize CUDA."""
    with env.patch_variables({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether torch was built for ROCm and a device is available."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether this process can use an Intel GPU.

    Args:
        check_device: Ignored, because the result depends on the device in any case. Default: False.
    """
    return torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether this process can use Apple's GPU.

    Args:
        min_version: Minimum version of torch. Default: "1.12".
    """
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _has_plugin_device(package: str, device_type: str) -> bool:
    """Whether this process can use a device that a separate package supports instead of torch itself.

    Args:
        package: Name of the package.
        device_type: Device type, such as "npu". The package adds a module with this name to torch.
    """
    if not _has_package(package):
        return False
    try:
        import_module(package)
        return bool(getattr(torch, device_type).is_available())
    except Exception:  # each package raises a different error if there is no driver
        return False


def is_npu_available(check_device: bool = False) -> bool:
    """Whether this process can use an Ascend NPU.

    Args:
        check_device: Ignored. Whether the device can be used is always checked.
    """
    return _has_plugin_device("torch_npu", "npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether this process can use a Cambricon MLU.

    Args:
        check_device: Ignored. Whether the device can be used is always checked.
    """
    return _has_plugin_device("torch_mlu", "mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Whether this process can use a Moore Threads GPU.

    Args:
        check_device: Ignored. Whether the device can be used is always checked.
    """
    return _has_plugin_device("torch_musa", "musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether this process can use an SDAA device.

    Args:
        check_device: Ignored. Whether the device can be used is always checked.
    """
    return _has_plugin_device("torch_sdaa", "sdaa")


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether this process can use an AWS Neuron device.

    Args:
        check_device: Ignored. Whether the device can be used is always checked.
    """
    return _has_plugin_device("torch_neuronx", "neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether this process can use a Gaudi device.

    Args:
        init_hccl: Ignored.
    """
    return _has_plugin_device("habana_frameworks.torch", "hpu") if _has_package("habana_frameworks") else False


def is_habana_gaudi1() -> bool:
    """Whether the available Gaudi device is of the first generation."""
    if not is_hpu_available():
        return False
    experimental = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed. Headway does not use it.

    False if the environment variable USE_TORCH_XLA is false.

    Args:
        check_is_tpu: Whether torch_xla's device must also be a TPU. Default: False.
        check_is_gpu: Whether torch_xla's device must also be a GPU. Default: False.
    """
    if not _has_package("torch_xla") or env.get_bool("USE_TORCH_XLA") is False:
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return bool(kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device supports bfloat16 arithmetic.

    Args:
        ignore_tpu: Ignored.
    """
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    if is_mps_available():
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def is_fp16_available() -> bool:
    """Whether this machine's device supports float16 arithmetic."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Whether float8 is available, which requires torchao 0.6.1 or later."""
    return is_torchao_available()


def is_torch_distributed_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with Intel's collectives library (XCCL)."""
    return bool(torch.distributed.distributed_c10d.is_xccl_available())


def _query_nvidia_smi(field: str) -> list[str]:
    """Return the value of a field of nvidia-smi for each GPU.

    Raises:
        ConfigError: If nvidia-smi is missing, fails, or does not answer within 30 seconds.
    """
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi does not answer on this machine ({error}); is there an NVIDIA driver?"
        ) from error


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's NVIDIA GPUs and their number, without initializing CUDA.

    Raises:
        ConfigError: If nvidia-smi is missing or fails.
    """
    names = [name.strip() for name in _query_nvidia_smi("name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver.

    Raises:
        ConfigError: If nvidia-smi is missing or fails.
    """
    return _query_nvidia_smi("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Whether the NVIDIA GPUs of this machine support direct peer-to-peer transfers.

    False only if there are several GPUs, at least one is a GeForce RTX 40, and the driver is older than 550.40. True if
    nvidia-smi fails.
    """
    try:
        names, count = get_gpu_info()
        driver = get_driver_version()
    except ConfigError:
        return True
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    return tuple(int(part) for part in driver.split(".")[:2]) >= (550, 40)


def check_cuda_fp8_capability() -> bool:
    """Whether the first NVIDIA GPU supports float8 (compute capability 8.9 or later). False if nvidia-smi fails."""
    try:
        major, minor = _query_nvidia_smi("compute_cap")[0].split(".")
    except ConfigError:
        return False
    return (int(major), int(minor)) >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """Return the accelerator type and its `DistributedType` in Accelerate, such as ("cuda", "MULTI_GPU").

    Without an accelerator, the result is the same as with CUDA.
    """
    kind = detect_hardware().kind
    return ("cuda", "MULTI_GPU") if kind in ("cpu", "cuda") else (kind, f"MULTI_{kind.upper()}")
