"""What is installed (the `is_*_available` functions import no package) and what this machine has: GPUs and their driver."""

import subprocess
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion

from headway.common import env
from headway.compat.accelerate.constants import STR_OPERATION_TO_FUNC
from headway.errors import ConfigError
from headway.runtime.device import detect
from headway.version import __version__


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Does a version fulfil a requirement: `compare_versions("datasets", ">=", "2.0")`?

    Args:
        library_or_version: a distribution's name, whose installed version counts, or a `packaging` version.
        operation: ">", ">=", "==", "!=", "<=" or "<".
        requirement_version: the version to compare with.

    Raises:
        ConfigError: another operation.
        PackageNotFoundError: no such distribution is installed.
    """
    if not isinstance(library_or_version, str):
        return _fulfils(str(library_or_version), operation, requirement_version)
    return _fulfils(_installed(library_or_version), operation, requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Does torch's version fulfil a requirement: `is_torch_version(">=", "2.4")`?"""
    return _fulfils(str(torch.__version__), operation, version)


def _fulfils(version: str, operation: str, requirement: str) -> bool:
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(f"operation={operation!r}; allowed: {', '.join(STR_OPERATION_TO_FUNC)}")
    # torch's own class compares as packaging does, which Headway does not depend on.
    return bool(STR_OPERATION_TO_FUNC[operation](TorchVersion(version), TorchVersion(requirement)))


def _installed(distribution: str) -> str:
    return __version__ if distribution == "headway" else metadata.version(distribution)


# ---------------------------------------------------------------- packages


def _has(package: str, minimum: str | None = None, below: str | None = None) -> bool:
    """Is `package` installed, with a version in the range? A folder of that name in the working directory does not count."""
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    if found is None or found.origin is None:
        return False
    if minimum is None and below is None:
        return True
    version = _installed(package)
    return (minimum is None or _fulfils(version, ">=", minimum)) and (below is None or _fulfils(version, "<", below))


_PACKAGES = """
    amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib mlflow msamp pandas peft pynvml pytest rich
    sagemaker schedulefree swanlab timm torchdata torchvision tqdm trackio transformer_engine transformers triton wandb
"""
_PACKAGE_OF = {"lomo": "lomo_optim", "megatron_lm": "megatron", **{name: name for name in _PACKAGES.split()}}


def _probe(name: str, package: str) -> Callable[[], bool]:
    def is_available() -> bool:
        return _has(package)

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Is {package} installed?"
    return is_available


globals().update(
    {f"is_{name}_available": _probe(f"is_{name}_available", package) for name, package in _PACKAGE_OF.items()}
)


def is_aim_available() -> bool:
    """Is aim installed, below version 4?"""
    return _has("aim", below="4.0.0")


def is_tensorboard_available() -> bool:
    """Is tensorboard or tensorboardX installed?"""
    return _has("tensorboard") or _has("tensorboardX")


def is_torchao_available() -> bool:
    """Is torchao installed, 0.6.1 or later?"""
    return _has("torchao", "0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Is torchdata installed, 0.8.0 or later?"""
    return _has("torchdata", "0.8.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Is numpy installed, `min_version` or later?"""
    return _has("numpy", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Is bitsandbytes installed, `min_version` or later?"""
    return _has("bitsandbytes", min_version)


def is_8bit_bnb_available() -> bool:
    """Is bitsandbytes installed, 0.37.2 or later?"""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Is bitsandbytes installed, 0.39.0 or later?"""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Is bitsandbytes installed, with support for devices other than CUDA?"""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", set())


def is_transformer_engine_mxfp8_available() -> bool:
    """Can Transformer Engine compute in MXFP8 here?"""
    if not _has("transformer_engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_pippy_available() -> bool:
    """Can a model be split into pipeline stages? True if torch was built with `torch.distributed`."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """True: torch.load reads tensors without running code."""
    return True


# ---------------------------------------------------------------- devices


def is_cuda_available() -> bool:
    """Can this process use a CUDA device? Checked without initialising CUDA."""
    with env.patched({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Is this torch built for ROCm, with a device?"""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Can this process use an Intel GPU?"""
    return torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Can this process use Apple's GPU?"""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _plugged(package: str, kind: str) -> bool:
    """Is a device that a separate package adds to torch available?"""
    if not _has(package):
        return False
    try:
        import_module(package)
        return bool(getattr(torch, kind).is_available())
    except Exception:  # the package is there, its driver is not: each fails in its own way
        return False


def is_npu_available(check_device: bool = False) -> bool:
    """Can this process use an Ascend NPU?"""
    return _plugged("torch_npu", "npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Can this process use a Cambricon MLU?"""
    return _plugged("torch_mlu", "mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Can this process use a Moore Threads GPU?"""
    return _plugged("torch_musa", "musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Can this process use an SDAA device?"""
    return _plugged("torch_sdaa", "sdaa")


def is_neuron_available(check_device: bool = False) -> bool:
    """Can this process use an AWS Neuron device?"""
    return _plugged("torch_neuronx", "neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Can this process use a Gaudi device?"""
    return _plugged("habana_frameworks.torch", "hpu") if _has("habana_frameworks") else False


def is_habana_gaudi1() -> bool:
    """False unless a first-generation Gaudi is here."""
    if not is_hpu_available():
        return False
    experimental = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Is torch_xla installed, and if asked, for a TPU or a GPU? Headway drives neither through it."""
    if not _has("torch_xla") or env.get_bool("USE_TORCH_XLA") is False:
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return bool(kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Does bfloat16 arithmetic run on this machine's device?"""
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    if is_mps_available():
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def is_fp16_available() -> bool:
    """Does float16 arithmetic run on this machine's device?"""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Is torchao installed, which Headway uses for float8?"""
    return is_torchao_available()


def is_torch_distributed_available() -> bool:
    """Was torch built with torch.distributed?"""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Was torch built with Intel's collectives?"""
    return bool(torch.distributed.distributed_c10d.is_xccl_available())


def _ask(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi does not answer on this machine ({error}); is there an NVIDIA driver?"
        ) from error


def get_gpu_info() -> tuple[list[str], int]:
    """The names of the NVIDIA GPUs, and how many there are; does not initialise CUDA.

    Raises:
        ConfigError: there is no nvidia-smi.
    """
    names = [name.strip() for name in _ask("name")]
    return names, len(names)


def get_driver_version() -> str:
    """The NVIDIA driver's version.

    Raises:
        ConfigError: there is no nvidia-smi.
    """
    return _ask("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Can the GPUs reach one another directly? False for several GeForce RTX 40 with a driver that cannot, True elsewhere."""
    try:
        names, count = get_gpu_info()
        driver = get_driver_version()
    except ConfigError:
        return True
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    return tuple(int(part) for part in driver.split(".")[:2]) >= (550, 40)


def check_cuda_fp8_capability() -> bool:
    """Does the first NVIDIA GPU support float8 (compute capability 8.9 or later)?"""
    try:
        major, minor = _ask("compute_cap")[0].split(".")
    except ConfigError:
        return False
    return (int(major), int(minor)) >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """The kind of accelerator, and Accelerate's word for several of them: ("cuda", "MULTI_GPU"); "cuda" where there is none."""
    kind = detect().kind
    return ("cuda", "MULTI_GPU") if kind in ("cpu", "cuda") else (kind, f"MULTI_{kind.upper()}")
