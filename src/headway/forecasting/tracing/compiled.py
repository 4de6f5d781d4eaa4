"""Trace models that `torch.compile` compiles, without building or running kernels.

TorchDynamo, AOTAutograd and inductor run as in training. inductor's result is generated Python code that allocates,
reuses and frees each buffer, and in a trace this code runs on tensors without values. Graphs are lowered for the CPU,
because fake tensors are on the CPU. For a CPU, inductor schedules and fuses operations much as it does for a GPU.
Attention uses the GPU's kernel.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headway.common.garbage import pause_garbage_collection
from headway.errors import UnsupportedError
from headway.forecasting._torch import TorchDispatchMode

_INDUCTOR_SETTINGS: dict[str, Any] = {
    "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "cpp.simdlen": 1, "cpp.vec_isa_ok": True,
    # Only torch's own kernels, because there is nothing to time.
    "max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN",
}  # fmt: skip
"""inductor's settings during a trace.

Graphs of a trace must not enter a cache that a later run reads. No C++ compiler is called. Only torch's own kernels are
candidates, so that inductor has nothing to time.
"""


def can_compile() -> bool:
    """Whether inductor is loaded and this version of torch can compile inside a dispatch mode."""
    return "torch._inductor.compile_fx" in sys.modules and hasattr(TorchDispatchMode, "ignore_compile_internals")


def refuse_compiled(model: nn.Module) -> None:
    """Raise UnsupportedError if the model or one of its submodules is compiled by `torch.compile`."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) is compiled by torch.compile, which headway.forecast alone can "
                "follow, on one process, in a model that its model_fn makes. Leave torch.compile out; a compiled step usually "
                "needs less memory"
            )


@contextmanager
def skip_kernels() -> Iterator[list[str]]:
    """Return a context in which the code that inductor generates allocates its buffers but skips all kernels.

    Yields:
        List of the paths of the graphs that are compiled in the context. It grows during the context. If it is not
        empty at the end, TorchDynamo's cache is reset, because code compiled for fake tensors must not run on real
        tensors.

    Raises:
        UnsupportedError: If this version of torch lacks a function that has to be replaced, or a graph is compiled with
            CUDA graphs.
    """
    import torch._functorch.config
    from torch._inductor import async_compile, codecache, config

    graphs: list[str] = []
    load = codecache.PyCodeCache.load_by_key_path

    def load_without_kernels(*args: Any, **kwargs: Any) -> Any:
        if config.triton.cudagraphs:
            raise UnsupportedError("CUDA graphs (mode='reduce-overhead') keep memory of their own, which is not known")
        module = load(*args, **kwargs)
        graphs.append(str(module.__file__))
        vars(module).update(_REPLACED_FUNCTIONS)
        return module

    with pause_garbage_collection(), ExitStack() as stack:  # `StorageTracker` collects garbage between phases
        stack.enter_context(config.patch(_INDUCTOR_SETTINGS))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(_exchange_attribute(codecache.PyCodeCache, "load_by_key_path", load_without_kernels))
        stack.enter_context(
            _exchange_attribute(async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: _do_nothing)
        )
        try:
            yield graphs
        finally:
            if graphs:
                torch._dynamo.reset()


@contextmanager
def _exchange_attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Return a context manager that temporarily replaces an attribute of a class.

    Raises:
        UnsupportedError: If the class does not have the attribute in this version of torch.
    """
    if name not in vars(owner):
        raise UnsupportedError(
            f"compiled code cannot be forecast with torch {torch.__version__}; leave torch.compile out"
        )
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _make_buffer(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor, in place of a buffer that inductor's code allocates on the device."""
    return torch.empty_strided(size, stride, dtype=dtype)


def _do_nothing(*_: Any) -> None:
    """Do nothing. This function replaces kernels, and the checks of their results."""


_REPLACED_FUNCTIONS = {
    "empty_strided_cpu": _make_buffer,
    "reinterpret_tensor": torch.as_strided,
    "assert_size_stride": _do_nothing,
    "assert_alignment": _do_nothing,
}
"""Replacements for the functions that inductor's generated code calls without the dispatcher.

Keys are the names of these functions in the generated code.
"""
