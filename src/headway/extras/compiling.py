"""Compile a model in place, as a whole or block by block. The object, its class and its names do not change.

The compiled call is stored where `Module.compile()` stores it, outside the module's state. So state dicts, pickles and
copies do not contain it. torch caches compilations by code, so blocks of one class share one compilation. A model of 32
blocks compiles as fast as a model of two.

Modules with torch's own forward (Sequential, TransformerEncoderLayer) are compiled through one of Headway's functions,
which calls the module. torch skips its own code, so `Module.compile()` would silently leave such modules uncompiled.

When a model is prepared, a check finds out whether the backend can compile on this machine. So a model never silently
runs uncompiled.
"""

import inspect
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from headway.common import env
from headway.common.optional import is_available
from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.strategies.blocks import find_blocks, get_class_name
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger

log = get_logger(__name__)

_RECOMPILE_LIMIT = 8
"""Maximum number of compilations per code object, after which torch stops compiling the code.

One code object is compiled separately for training and evaluation, static and dynamic sizes, a batch of one, and so
on.
"""


def compile_model(
    model: torch.nn.Module,
    plugin: TorchDynamoPlugin,
    device: torch.device,
    is_gathered: bool = False,
    accumulates: bool = False,
) -> torch.nn.Module:
    """Compile a model in place according to the settings. A model that is already compiled is left unchanged.

    Do nothing if the settings disable compilation.

    Args:
        model: Model to compile. Checkpointed blocks are compiled together with their checkpointing.
        plugin: Settings of the compilation.
        device: Device that the model computes on.
        is_gathered: Whether parameters will be gathered before each block, which a graph of the full model cannot
            contain. The model is then compiled block by block. Default: False.
        accumulates: Whether gradients are accumulated over several backward passes. Default: False.

    Returns:
        The object that was passed as `model`.

    Raises:
        ConfigError: If the backend is not available in this torch version or on the device.
        OptionalDependencyMissing: If a program that the backend needs is missing.
    """
    if not plugin.compiles:
        return model
    name = get_class_name(model)
    if has_compiled_regions(model):
        log.info_once(f"{name} is already compiled and is not compiled again")
        return model
    check_toolchain(plugin, device)
    if accumulates and device.type == "cuda" and plugin.has_cuda_graphs:
        # Autograd stores the first gradient without copying it. The CUDA graph of the next micro-batch reuses that
        # memory, so the gradient must be cloned.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.clone)  # type: ignore[no-untyped-call]
    has_blocks = bool(find_blocks(model))
    if has_blocks and is_gathered and not plugin.use_regional_compilation:
        log.warning_once(
            f"{name} will be sharded, so regional compilation is used: parameters are gathered before each block, which breaks the "
            "graph of the full model. TorchDynamoPlugin(use_regional_compilation=True) does the same without this warning"
        )
    if has_blocks and (plugin.use_regional_compilation or is_gathered):
        return compile_regions(model, **plugin.to_kwargs())
    if plugin.use_regional_compilation:
        log.warning_once(
            f"regional compilation: {name} has no repeated blocks (no two modules of one class, with submodules, in a "
            "ModuleList, Sequential or ModuleDict), so the full model is compiled"
        )
    _compile_modules([model], plugin.to_kwargs())
    log.info("the full model (%s) will be compiled by %s", name, plugin.name)
    return model


def check_toolchain(plugin: TorchDynamoPlugin, device: torch.device) -> None:
    """Raise an error if a compiler backend cannot work on this machine.

    Args:
        plugin: Settings with the backend. A user-defined backend is accepted without a check.
        device: Device that models compute on.

    Raises:
        ConfigError: If torch does not know the backend, or the backend does not support the device.
        OptionalDependencyMissing: If a compiler is missing; the message names what to install.
    """
    if callable(plugin.to_kwargs()["backend"]):
        return
    known_backends = torch._dynamo.list_backends(exclude_tags=())
    if plugin.name not in known_backends:
        raise ConfigError(
            f"dynamo_backend={plugin.name!r}: torch {torch.__version__} has no such backend here. It has "
            f"{', '.join(known_backends)}; choose one of them, or import the package that registers it first"
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
    """Raise `OptionalDependencyMissing` if a compiler or package that inductor needs for the device is missing."""
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
        if not is_available("triton"):
            raise OptionalDependencyMissing(
                f"torch.compile's inductor needs triton on {device.type}, which is not installed: pip install triton, or choose "
                "dynamo_backend='aot_eager', which generates no code"
            )
        if not any(map(shutil.which, ("cc", "gcc", "clang"))) and not env.get("CC"):
            raise OptionalDependencyMissing(
                "triton needs a C compiler, but none was found: install one (apt-get install gcc), or name one in the variable CC"
            )


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the module's repeated blocks in place with torch.compile, once per class and shape of block.

    The blocks are compiled at the first forward, in much less time than the whole module needs. Code between the blocks
    runs eagerly. If the module has no repeated blocks, it is compiled as a whole. It does not need an Accelerator;
    `TorchDynamoPlugin(use_regional_compilation=True)` does this in `prepare`.

    Args:
        module: Module to compile. Repeated blocks are modules of one class in a list, sequence or dict of modules.
        compile_kwargs: Keyword arguments of torch.compile, such as `backend` or `fullgraph`.

    Returns:
        The object that was passed as `module`. Its class and the names in its state dict do not change.

    Example::

        model = compile_regions(model, mode="max-autotune")
    """
    blocks = find_blocks(module)
    if not blocks:
        _compile_modules([module], compile_kwargs)
        return module
    num_kinds = len({_get_block_key(block) for block in blocks})
    if num_kinds > 1 and "recompile_limit" in inspect.signature(torch.compile).parameters:
        # Blocks of different shapes share the code of their class, and would exhaust its compilation limit.
        compile_kwargs.setdefault("recompile_limit", _RECOMPILE_LIMIT * num_kinds)
    _compile_modules(blocks, compile_kwargs)
    log.info("%d blocks of %s will be compiled, %d kinds", len(blocks), get_class_name(module), num_kinds)
    return module


def _compile_modules(modules: list[torch.nn.Module], settings: dict[str, Any]) -> None:
    """Compile each module separately, in place. Modules of one class share the compiled code.

    Args:
        modules: Modules to compile.
        settings: Keyword arguments of torch.compile.
    """
    # torch caches compilations by code object. A new one keeps these modules apart from those of other calls.
    code = _make_caller(modules[0]).__code__.replace()
    for module in modules:
        is_skipped = torch._dynamo.trace_rules.check(module.forward)  # as torch's own code is
        if not is_skipped:
            module.compile(**settings)
            continue
        call = _make_caller(module)
        function = FunctionType(code, call.__globals__, get_class_name(module), None, call.__closure__)
        module._compiled_call_impl = torch.compile(function, **settings)


def _make_caller(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a function outside of torch that calls a module, so that torch.compile does not skip it."""

    def call_uncompiled(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call_uncompiled


def _get_block_key(block: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks that can share one compilation: their class and parameter shapes."""
    return type(block), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())


def is_compiled_module(module: Any) -> bool:
    """Whether calling the module runs compiled code: it is the result of torch.compile, or was compiled in place."""
    return isinstance(module, torch.nn.Module) and (
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
    )


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Whether the module or one of its submodules is compiled by torch.compile."""
    return any(map(is_compiled_module, module.modules()))
