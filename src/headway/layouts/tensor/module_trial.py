"""`ModuleTrial`: test on a copy of a module whether splitting some of its matrices keeps the module's result.

A test calls a copy with random weights, in float32 on the CPU, once with each rank's shards. The rowwise matrix then
returns one rank's term of a sum, and the forward continues with the unsplit matrix's output in place of this term. The
terms must add up to that output, and the module's result must equal the unsplit module's. A test needs no communication
between ranks, and does not change the model's own tensors or the RNG state.
"""

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.core.runtime.collectives import tree
from headway.layouts.tensor import plans, styles
from headway.layouts.tensor._torch import is_fake, unset_fake_temporarily
from headway.layouts.tensor.crossings import SplitAxis, take_packed_chunks

_TOLERANCE = 1e-4
"""Largest accepted difference between results, as a fraction of the largest value.

It is not 0, because float32 sums depend on the order of their terms.
"""
_LENGTH = 8
"""Sequence length with which a test calls a module first."""
_MAX_TOKENS = 1024
"""Largest sequence length with which a test calls a module."""
_ENCODER_ARGUMENTS = ("key_value_states", "encoder_hidden_states")
"""Names of the encoder arguments of transformers' cross attention. A test calls the module with and without them."""
Call = tuple[tuple[torch.Tensor, ...], dict[str, Any]]
"""Positional and keyword arguments with which a test calls a module."""


@dataclass
class ModuleRun:
    """Record of the tensors in one call of a `ModuleTrial`'s module.

    Attributes:
        result: First floating-point tensor of the module's output. None if there is none.
        inputs: First floating-point tensor of each submodule's input, by the submodule's name, in the order in which
            their calls end.
        outputs: First floating-point tensor of each submodule's output, by the submodule's name.
        has_repeated_calls: Whether any submodule was called more than once.
    """

    result: torch.Tensor | None = None
    inputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    has_repeated_calls: bool = False


class ModuleTrial:
    """Copy of a module with random weights, used to test whether the module can be split.

    Args:
        module: Module to copy; its parameters may be meta tensors.
        linears: Names of the module's linear layers that may be split.
        size: Number of ranks.

    Attributes:
        module: Copy of the module.
        reference_runs: Pairs of (arguments of a call, record of the call's tensors), one for each call that the unsplit
            copy accepts.
    """

    def __init__(self, module: torch.nn.Module, linears: Iterable[str], size: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(0)
        self.reference_runs: list[tuple[Call, ModuleRun]] = []
        with self._isolate_trial():
            self.module = self._copy_module(module)
            self._recorded_modules = {name: self.module.get_submodule(name) for name in linears}
            within_linears = {part for layer in self._recorded_modules.values() for part in layer.modules()}
            self._recorded_modules |= {
                name: part
                for name, part in self.module.named_modules()
                if part._parameters and part not in within_linears
            }
            for length in self._iterate_lengths():
                runs = [(call, self._run(call)) for call in self._iterate_calls(length)]
                self.reference_runs = [(call, run) for call, run in runs if run is not None and run.result is not None]
                if self.reference_runs:
                    break

    def test_split(self, plan: Mapping[str, str], divide: Iterable[str], rowwise: str) -> list[str] | None:
        """Test whether the module computes the same result when it is split.

        Args:
            plan: Style of each submodule or parameter to split, by name.
            divide: Names of attributes, such as head counts, that are divided by the number of ranks.
            rowwise: Name of the rowwise matrix, whose outputs on all ranks are added.

        Returns:
            Names of submodules that the plan does not split but whose input is sharded. None: the split module computes
            a different result, or no call of the copy reaches the rowwise matrix.
        """
        with self._isolate_trial():
            names_by_call = [
                self._list_sharded_inputs(plan, divide, rowwise, call, reference)
                for call, reference in self.reference_runs
                if rowwise in reference.outputs
            ]
        if not names_by_call or any(names is None for names in names_by_call):
            return None
        return sorted({name for names in names_by_call for name in names or ()})

    def is_tokenwise(self, stubs: Iterable[str], linears: Iterable[str]) -> bool:
        """Whether the module computes each token independently, except within submodules that get all tokens.

        Args:
            stubs: Names of submodules that get all tokens. In the test, their forwards return slices of the outputs
                that they computed for the full sequence.
            linears: Names of linear layers whose input must have the shape (rows, tokens, width).
        """
        with self._isolate_trial():
            return bool(self.reference_runs) and all(
                self._is_tokenwise_in_call(call, reference, [*stubs], [*linears])
                for call, reference in self.reference_runs
            )

    def _is_tokenwise_in_call(self, call: Call, reference: ModuleRun, stubs: list[str], linears: list[str]) -> bool:
        """Whether both halves of a sequence have the same results alone as in the full sequence.

        Args:
            call: Arguments for the full sequence.
            reference: Record of the call with these arguments.
            stubs: Names of submodules that get all tokens.
            linears: Names of linear layers whose input must have the shape (rows, tokens, width).
        """
        (hidden, *_), kwargs = call
        linear_inputs = [reference.inputs.get(name) for name in linears]
        if reference.result is None or any(x is not None and x.shape[:2] != hidden.shape[:2] for x in linear_inputs):
            return False
        stub_modules = [self.module.get_submodule(name) for name in stubs]
        full_outputs = self._record_outputs(call, stub_modules)
        middle = hidden.shape[1] // 2
        for tokens in (slice(0, middle), slice(middle, None)):

            def take_tokens(leaf: Any, tokens: slice = tokens) -> Any:
                is_states = isinstance(leaf, torch.Tensor) and leaf.dim() == 3 and leaf.shape[:2] == hidden.shape[:2]
                return leaf[:, tokens] if is_states else leaf

            for module in stub_modules:
                output = tree.map_leaves(take_tokens, full_outputs.get(module))
                module.forward = lambda *_, output=output, **__: output
            run = self._run(((take_tokens(hidden),), kwargs))
            for module in stub_modules:
                del module.forward  # the attribute that hides the method of the class
            if run is None or not _is_close(run.result, reference.result[:, tokens]):
                return False
        return True

    def _record_outputs(self, call: Call, modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, Any]:
        """Call the copy, and return the outputs of some of its submodules. Those that are not called are left out.

        Args:
            call: Positional and keyword arguments.
            modules: Submodules whose outputs are returned.
        """
        outputs: dict[torch.nn.Module, Any] = {}

        def record_output(module: torch.nn.Module, args: Any, output: Any) -> None:
            outputs[module] = output

        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(module.register_forward_hook(record_output))
            self._run(call)
        return outputs

    def _list_sharded_inputs(
        self, plan: Mapping[str, str], divide: Iterable[str], rowwise: str, call: Call, reference: ModuleRun
    ) -> list[str] | None:
        """Test a split with one call, once with each rank's shards.

        Args:
            plan: Style of each submodule or parameter to split, by name.
            divide: Names of attributes that are divided by the number of ranks.
            rowwise: Name of the rowwise matrix. All ranks' outputs of it are added.
            call: Arguments of the call.
            reference: Record of the call of the unsplit copy.

        Returns:
            Names of submodules that the plan does not split but whose input differs from the unsplit module's, in any
            order. None: the result differs.
        """
        bias = plans.get_base_layer(self.module.get_submodule(rowwise))._parameters.get("bias")
        total: Any = 0.0 if bias is None else bias  # split, a rowwise matrix omits its bias, which is added once
        names = set[str]()
        for rank in range(self._size):
            with self._imitate_rank(SplitAxis(None, None, rank, self._size), plan, divide):
                run = self._run(call, rowwise, reference.outputs[rowwise])
            if run is None or run.inputs.keys() != reference.inputs.keys():
                return None
            if not _is_close(run.result, reference.result):
                return None
            total = total + run.outputs[rowwise]
            names |= {name for name, x in reference.inputs.items() if not _is_close(run.inputs[name], x)}
        if not _is_close(total, reference.outputs[rowwise]):
            return None
        return [name for name in names if name not in plan]

    @contextmanager
    def _imitate_rank(self, axis: SplitAxis, plan: Mapping[str, str], divide: Iterable[str]) -> Iterator[None]:
        """Return a context in which the module's copy has the parameters and divided attributes of one rank.

        Args:
            axis: Rank and number of ranks to imitate.
            plan: Style of each submodule or parameter to split, by name.
            divide: Names of attributes, such as head counts, that are divided by the number of ranks.
        """
        replaced: list[tuple[dict[str, Any], str, Any]] = []

        def replace_value(values: Any, key: str, value: Any) -> None:
            replaced.append((values, key, values[key]))
            values[key] = value

        try:
            for name, style_name in plan.items():
                for module, keys in self._list_split_parameters(name, style_name):
                    style = styles.make_style(style_name, module)
                    for key in keys:
                        parameter = module._parameters[key]
                        if parameter is None:
                            continue
                        if (dim := style.find_shard_dim(key, parameter)) is not None:
                            chunks = take_packed_chunks(parameter, axis, dim, style.factor)
                            replace_value(module._parameters, key, chunks)
                        elif key == "bias":
                            replace_value(module._parameters, key, style.get_call_bias(parameter, axis))
                    # The Conv1D of transformers reshapes its output to `nf` columns.
                    if isinstance(style, styles.Colwise) and style.is_transposed:
                        replace_value(vars(module), "nf", styles.num_outputs(module) // axis.size)
            for path in divide:
                owner_name, _, key = path.rpartition(".")
                attributes = vars(self.module.get_submodule(owner_name))
                replace_value(attributes, key, attributes[key] // axis.size)
            yield
        finally:
            for values, key, value in reversed(replaced):
                values[key] = value

    def _list_split_parameters(self, name: str, style_name: str) -> list[tuple[torch.nn.Module, list[str]]]:
        """Return the modules and parameters that one entry of a plan splits.

        For a layer with LoRA adapters, the modules are the submodules that are split.

        Args:
            name: Name of a module or parameter in the copy.
            style_name: Name of the tensor-parallel style that the plan gives to the module or parameter.

        Returns:
            Pairs of (module, names of its parameters).
        """
        if name not in self._recorded_modules:
            owner, _, key = name.rpartition(".")
            return [(self.module.get_submodule(owner), [key])]
        module = self._recorded_modules[name]
        parts = plans.list_split_parts(module, styles.make_style(style_name)) if plans.is_adapted(module) else [""]
        return [(part, list(part._parameters)) for part in map(module.get_submodule, parts)]

    @contextmanager
    def _isolate_trial(self) -> Iterator[None]:
        """Return a context that disables gradients and fake-tensor mode, and preserves the CPU's RNG state.

        A test can then compute with real values even while a forecast uses fake tensors.
        """
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield

    def _copy_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of a module in evaluation mode, with random weights in float32 on the CPU and without hooks.

        Plain attributes are shared with the original, and buffers keep their values.
        """
        memo: dict[int, Any] = {}  # copies by the ID of the original, as for `copy.deepcopy`
        for parameter in module.parameters():
            # Divided by the square root of the number of inputs, so that outputs have the size of inputs.
            fan_in = parameter.numel() // parameter.shape[0] if parameter.dim() > 1 and parameter.numel() else 1
            memo[id(parameter)] = torch.nn.Parameter(self._draw_normal(*parameter.shape) / math.sqrt(fan_in), False)
        memo |= {id(buffer): _copy_values(buffer) for buffer in module.buffers()}
        for part in module.modules():
            memo |= {id(hooks): OrderedDict() for hooks in (part._forward_hooks, part._forward_pre_hooks)}
            # Share plain attributes: a model's configuration, and objects that exist on one stage of a pipeline only.
            memo |= {id(each): each for each in vars(part).values() if not isinstance(each, dict | torch.Tensor)}
        return copy.deepcopy(module, memo).eval()

    def _draw_normal(self, *shape: int) -> torch.Tensor:
        """Return a float32 tensor on the CPU with values from a standard normal distribution."""
        return torch.randn(*shape, generator=self._generator, device="cpu", dtype=torch.float32)

    def _iterate_lengths(self) -> Iterator[int]:
        """Return an iterator over the sequence lengths with which to call the copy, in the order in which to try them.

        Attention over image windows accepts only one length, which is derived from the sizes of the module's buffers.
        """
        lengths = {math.isqrt(buffer.numel()) for buffer in self.module.buffers()}  # of a table (tokens, tokens)
        return iter([_LENGTH, *sorted(length for length in lengths - {_LENGTH} if 1 < length <= _MAX_TOKENS)])

    def _iterate_calls(self, length: int) -> Iterator[Call]:
        """Yield the arguments with which to call the copy: hidden states, and then also states of an encoder.

        Other required arguments are None if they are masks or can be None. Nothing is yielded if there are others.

        Args:
            length: Sequence length of the hidden states.
        """
        width = styles.num_inputs(plans.get_base_layer(next(iter(self._recorded_modules.values()))))
        parameters = inspect.signature(self.module.forward).parameters
        required = {
            name: None for name, each in list(parameters.items())[1:]  # the first one is the hidden states
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }  # fmt: skip
        if not all("mask" in name or "None" in str(parameters[name].annotation) for name in required):
            return  # a required argument has an unknown meaning
        hidden = self._draw_normal(2, length, width)
        yield (hidden,), dict(required)
        for name in _ENCODER_ARGUMENTS:
            if name in parameters:
                # Another length than that of the hidden states, so that a confusion of the two fails.
                yield (hidden,), {**required, name: self._draw_normal(2, length + 1, width)}

    def _run(self, call: Call, replaced: str = "", replacement: torch.Tensor | None = None) -> ModuleRun | None:
        """Call the copy and return a record of its tensors, or None if the call fails or calls a submodule twice.

        Only submodules that have parameters are recorded. Parts of a linear layer, such as its adapters, are not.

        Args:
            call: Positional and keyword arguments.
            replaced: Name of a submodule whose output is replaced for the rest of the forward. The record contains the
                output that the submodule itself has computed. Default: "", no output is replaced.
            replacement: Tensor that replaces this output. None (the default) if no output is replaced.
        """
        run = ModuleRun()

        def make_watcher(name: str) -> Any:
            def record_call(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                run.has_repeated_calls |= name in run.inputs
                run.inputs[name] = _find_first_float((args, kwargs))
                run.outputs[name] = _find_first_float(output)
                return replacement if name == replaced else None  # torch keeps the output if a hook returns None

            return record_call

        try:
            with ExitStack() as stack:
                for name, part in self._recorded_modules.items():
                    stack.enter_context(part.register_forward_hook(make_watcher(name), with_kwargs=True))
                args, kwargs = call
                # Not `self.module(...)`, because transformers' layers override `__call__` for gradient checkpointing.
                run.result = _find_first_float(torch.nn.Module.__call__(self.module, *args, **kwargs))
        except Exception:  # whatever the forward raises, the module cannot be called with these arguments
            return None
        return None if run.has_repeated_calls else run


def _copy_values(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy of a buffer on the CPU, in float32 if it has floating-point values.

    A buffer without values (a meta or fake tensor) becomes ones, such as for masks and scales, or zeros if it has
    integers.
    """
    if not buffer.is_meta and not is_fake(buffer):
        values = buffer.detach().cpu().clone()
    elif buffer.is_floating_point() or buffer.dtype == torch.bool:
        values = torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")
    else:
        values = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return values.float() if values.is_floating_point() else values


def _find_first_float(values: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in a tree of containers, or None if there is none."""
    return next((tensor for tensor in tree.list_tensors(values) if tensor.is_floating_point()), None)


def _is_close(tensor: torch.Tensor | None, reference: torch.Tensor | None) -> bool:
    """Whether two tensors have equal shapes and nearly equal values, or both are None."""
    if tensor is None or reference is None or tensor.shape != reference.shape:
        return tensor is reference
    if not reference.numel():
        return True
    return bool((tensor - reference).abs().max() <= _TOLERANCE * reference.abs().max())
