"""Can this machine compile with that backend? Asked when a model is prepared, so that nothing falls back in silence."""

import shutil

import torch

from headway.common import env
from headway.common.optional import available
from headway.config.engines import TorchDynamoPlugin
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger

log = get_logger(__name__)


def check_toolchain(plugin: TorchDynamoPlugin, device: torch.device) -> None:
    """Refuse a backend that cannot work here.

    Args:
        plugin: the settings; a backend of the user's own is taken as it is.
        device: what models compute on.

    Raises:
        ConfigError: torch does not know the backend, or it is for other devices.
        OptionalDependencyMissing: a compiler is missing; the message says what to install.
    """
    if callable(plugin.to_kwargs()["backend"]):
        return
    known = torch._dynamo.list_backends(exclude_tags=())
    if plugin.name not in known:
        raise ConfigError(
            f"dynamo_backend={plugin.name!r}: torch {torch.__version__} has no such backend here. It has {', '.join(known)}; "
            "choose one of them, or import the package that registers it first"
        )
    if plugin.name == "cudagraphs" and device.type != "cuda":
        raise ConfigError(
            f"dynamo_backend='cudagraphs' needs a CUDA device, not {device}; choose inductor or aot_eager"
        )
    if plugin.name == "inductor":
        _check_inductor(device)
        if plugin.mode == "reduce-overhead" and device.type == "cpu":
            log.warning_once(
                "mode='reduce-overhead' uses CUDA graphs, which do not exist on a CPU: it has no effect here"
            )


def _check_inductor(device: torch.device) -> None:
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except (exc.InvalidCxxCompiler, RuntimeError) as error:
            raise OptionalDependencyMissing(
                "torch.compile's inductor needs a C++ compiler on a CPU, but none was found: install one (apt-get install g++, dnf "
                "install gcc-c++, xcode-select --install), or name one in the variable CXX, or choose dynamo_backend='aot_eager', "
                "which generates no code"
            ) from error
        return
    if device.type in ("cuda", "xpu"):
        if not available("triton"):
            raise OptionalDependencyMissing(
                f"torch.compile's inductor needs triton on {device.type}, which is not installed: pip install triton, or choose "
                "dynamo_backend='aot_eager', which generates no code"
            )
        if not any(map(shutil.which, ("cc", "gcc", "clang"))) and not env.get("CC"):
            raise OptionalDependencyMissing(
                "triton needs a C compiler, but none was found: install one (apt-get install gcc), or name one in the variable CC"
            )
