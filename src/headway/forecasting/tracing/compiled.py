"""Models and functions that torch.compile compiles, in a trace: inductor plans their buffers, and its kernels are left out.

TorchDynamo, AOTAutograd and inductor run as in training, down to the Python code that requests, reuses and drops each buffer, and
calls the kernels. In a trace that code runs on tensors without values. Graphs are lowered for a CPU, as the tensors are there;
inductor schedules and fuses them much as for a GPU, and attention is the GPU's.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.common.garbage import no_garbage_search
from headway.errors import UnsupportedError

_FOR_EVERY_TRACE: dict[str, Any] = {
    "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "cpp.simdlen": 1, "cpp.vec_isa_ok": True,
    # torch's own kernels alone, for which there is nothing to time.
    "max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN",
}  # fmt: skip
"""Nothing of a trace may reach a cache from which a run would be served, and nothing is built by a C++ compiler."""


def may_compile() -> bool:
    """Can anything be compiled by inductor: has torch.compile been called with it, and can this torch compile in a trace?"""
    return "torch._inductor.compile_fx" in sys.modules and hasattr(TorchDispatchMode, "ignore_compile_internals")


def refuse_compiled(model: nn.Module) -> None:
    """Raise UnsupportedError for a model with a part that torch.compile has compiled."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) is compiled by torch.compile, which headway.forecast alone can "
                "follow, on one process, in a model that its model_fn makes. Leave torch.compile out; a compiled step mostly takes "
                "less"
            )


@contextmanager
def without_kernels() -> Iterator[list[str]]:
    """A block in which inductor's kernels compute nothing, and its buffers are requested by torch's dispatcher.

    Yields:
        the files of the graphs that were compiled in the block. What TorchDynamo has compiled in this process, in the block or before
        it, is compiled anew afterwards if there are any: code for tensors without values must not meet others.
    """
    import torch._functorch.config
    from torch._inductor import async_compile, codecache, config

    graphs: list[str] = []
    load = codecache.PyCodeCache.load_by_key_path

    def loaded(*args: Any, **kwargs: Any) -> Any:
        if config.triton.cudagraphs:
            raise UnsupportedError("CUDA graphs (mode='reduce-overhead') keep memory of their own, which is not known")
        module = load(*args, **kwargs)
        graphs.append(str(module.__file__))
        vars(module).update(_IN_PLACE)
        return module

    with no_garbage_search(), ExitStack() as stack:  # a trace searches by itself, between its phases
        stack.enter_context(config.patch(_FOR_EVERY_TRACE))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(_exchanged(codecache.PyCodeCache, "load_by_key_path", loaded))
        stack.enter_context(_exchanged(async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: _nothing))
        try:
            yield graphs
        finally:
            if graphs:
                torch._dynamo.reset()


@contextmanager
def _exchanged(owner: type, name: str, value: Any) -> Iterator[None]:
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


def _buffer(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _nothing(*_: Any) -> None:
    """In place of a kernel, and of checks of what one made."""


_IN_PLACE = {
    "empty_strided_cpu": _buffer,
    "reinterpret_tensor": torch.as_strided,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
}
"""What a graph's code calls past the dispatcher, by its names for it."""
