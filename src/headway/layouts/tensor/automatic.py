"""Derive a tensor-parallel plan from a model's structure, and test it before anything is split.

Modules are visited innermost first, and their linear layers in the order in which they are called. A group consists of
some layers that are split by columns, followed by one that is split by rows. A group is used only if a test on a copy
of the module (`ModuleTrial`) shows that the split module computes the same result. The tests also determine whether
head counts must be divided, and whether tables with a column per head (relative positions) must be split. Layers for
which no test succeeds are not split.

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
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import torch

from headway.core.config.parallelism import TensorParallelOptions
from headway.core.runtime.collectives import tree
from headway.core.strategies.blocks import find_parameter_owners
from headway.errors import PrepareError
from headway.layouts.tensor import plans, styles
from headway.layouts.tensor._torch import is_fake, unset_fake_temporarily
from headway.layouts.tensor.calls import COUNTS
from headway.layouts.tensor.crossings import SplitAxis, take_packed_chunks
from headway.layouts.tensor.styles import BoundaryLayout
from headway.log import get_logger

_MAX_LINEARS = 16
"""Largest number of linear layers in a module in which groups are searched."""
_MAX_CHOICES = 6
"""Largest number of attributes and parameters of which all combinations are tested."""
_COLUMN_STYLES = {1: "colwise", 2: "packed_colwise", 3: "packed_qkv_colwise"}
"""Style for a layer that is split by columns. The key is the number of matrices that are packed in the layer."""
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
log = get_logger(__name__)


@dataclass
class ModuleRun:
    """Record of the tensors in one call of a `ModuleTrial`'s module.

    Attributes:
        out: First floating-point tensor of the module's output.
        inputs: First floating-point tensor of each submodule's input, by the submodule's name, in the order in which
            their calls end.
        outputs: First floating-point tensor of each submodule's output, by the submodule's name.
        is_once: Whether no submodule was called twice.
    """

    out: torch.Tensor | None = None
    inputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    is_once: bool = True


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
                self.reference_runs = [(call, run) for call, run in runs if run is not None and run.out is not None]
                if self.reference_runs:
                    break

    def test_split(self, plan: Mapping[str, str], divide: Iterable[str], row: str) -> list[str] | None:
        """Test whether the module computes the same result when it is split.

        Args:
            plan: Style of each submodule or parameter to split, by name.
            divide: Names of attributes, such as head counts, that are divided by the number of ranks.
            row: Name of the rowwise matrix, whose outputs on all ranks are added.

        Returns:
            Names of submodules that the plan does not split but whose input is sharded. None: the split module computes
            a different result, or no call of the copy reaches the rowwise matrix.
        """
        with self._isolate_trial():
            names_by_call = [
                self._list_sharded_inputs(plan, divide, row, call, reference)
                for call, reference in self.reference_runs
                if row in reference.outputs
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
        if reference.out is None or any(x is not None and x.shape[:2] != hidden.shape[:2] for x in linear_inputs):
            return False
        outputs, modules = dict[str, Any](), {name: self.module.get_submodule(name) for name in stubs}

        def make_recorder(name: str) -> Any:
            return lambda module, args, output: outputs.update({name: output})

        with ExitStack() as stack:
            for name, module in modules.items():
                stack.enter_context(module.register_forward_hook(make_recorder(name)))
            self._run(call)
        middle = hidden.shape[1] // 2
        for tokens in (slice(0, middle), slice(middle, None)):

            def cut_tokens(leaf: Any, tokens: slice = tokens) -> Any:
                is_states = isinstance(leaf, torch.Tensor) and leaf.dim() == 3 and leaf.shape[:2] == hidden.shape[:2]
                return leaf[:, tokens] if is_states else leaf

            for name, module in modules.items():
                output = tree.map_leaves(cut_tokens, outputs.get(name))
                module.forward = lambda *_, output=output, **__: output
            run = self._run(((cut_tokens(hidden),), kwargs))
            for module in modules.values():
                del module.forward  # the attribute that hides the method of the class
            if run is None or not _is_close(run.out, reference.out[:, tokens]):
                return False
        return True

    def _list_sharded_inputs(
        self, plan: Mapping[str, str], divide: Iterable[str], row: str, call: Call, reference: ModuleRun
    ) -> list[str] | None:
        """Test a split with one call, once with each rank's shards.

        Args:
            plan: Style of each submodule or parameter to split, by name.
            divide: Names of attributes that are divided by the number of ranks.
            row: Name of the rowwise matrix. All ranks' outputs of it are added.
            call: Arguments of the call.
            reference: Record of the call of the unsplit copy.

        Returns:
            Names of submodules that the plan does not split but whose input differs from the unsplit module's, in any
                order. None: the result differs.
        """
        bias = plans.get_base_layer(self.module.get_submodule(row))._parameters.get("bias")
        total: Any = 0.0 if bias is None else bias  # a split matrix leaves its bias out
        names = set[str]()
        for rank in range(self._size):
            with self._imitate_rank(SplitAxis(None, None, rank, self._size), plan, divide):
                run = self._run(call, row, reference.outputs[row])
            if run is None or run.inputs.keys() != reference.inputs.keys() or not _is_close(run.out, reference.out):
                return None
            total = total + run.outputs[row]
            names |= {name for name, x in reference.inputs.items() if not _is_close(run.inputs[name], x)}
        if not _is_close(total, reference.outputs[row]):
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
        return torch.randn(*shape, generator=self._generator, device="cpu", dtype=torch.float32)

    def _iterate_lengths(self) -> Iterator[int]:
        """Yield the sequence lengths with which to call the copy, in the order in which to try them.

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
            name: None for name, each in list(parameters.items())[1:]
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }  # fmt: skip
        if not all("mask" in name or "None" in str(parameters[name].annotation) for name in required):
            return  # a required argument has an unknown meaning
        hidden = self._draw_normal(2, length, width)
        yield (hidden,), dict(required)
        for name in _ENCODER_ARGUMENTS:
            if name in parameters:
                yield (hidden,), {**required, name: self._draw_normal(2, length + 1, width)}

    def _run(self, call: Call, row: str = "", result: torch.Tensor | None = None) -> ModuleRun | None:
        """Call the copy and return a record of its tensors, or None if the call fails or calls a submodule twice.

        Only submodules that have parameters are recorded. Parts of a linear layer, such as its adapters, are not.

        Args:
            call: Positional and keyword arguments.
            row: Name of a submodule whose output is replaced for the rest of the forward. The record contains the
                output that the submodule itself has computed. Default: "", no output is replaced.
            result: Tensor that replaces the output of `row`. None (the default): only without `row`.
        """
        run = ModuleRun()

        def make_watcher(name: str) -> Any:
            def record_call(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                run.is_once = run.is_once and name not in run.inputs
                run.inputs[name], run.outputs[name] = _find_first_float((args, kwargs)), _find_first_float(output)
                return result if name == row else None

            return record_call

        try:
            with ExitStack() as stack:
                for name, part in self._recorded_modules.items():
                    stack.enter_context(part.register_forward_hook(make_watcher(name), with_kwargs=True))
                run.out = _find_first_float(torch.nn.Module.__call__(self.module, *call[0], **call[1]))
        except Exception:  # whatever the forward raises, the module cannot be called with these arguments
            return None
        return run if run.is_once else None


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


@dataclass
class SplitGroups:
    """Part of a tensor-parallel plan that covers one or more groups of matrices.

    A group consists of matrices that are split by columns and the matrix after them, which is split by rows.

    Attributes:
        plan: Style of each module or parameter to split, by name.
        divide: Names of attributes, such as head counts, that must be divided by the number of ranks.
        keep: Names of attributes that count heads. Those that are not in `divide` keep their value.
    """

    plan: dict[str, str] = field(default_factory=dict)
    divide: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def add(self, other: "SplitGroups", prefix: str = "") -> None:
        """Add other groups, with a prefix before all of their names.

        Args:
            other: Groups to add, such as those of a submodule.
            prefix: Prefix of the names, such as "attn." for the groups of the submodule `attn`. Default: "".
        """
        self.plan |= {prefix + name: style for name, style in other.plan.items()}
        self.divide += [name for each in other.divide if (name := prefix + each) not in self.divide]
        self.keep += [name for each in other.keep if (name := prefix + each) not in self.keep]


def complete_plan(
    model: torch.nn.Module, options: TensorParallelOptions, size: int, is_sharded: bool = False
) -> TensorParallelOptions:
    """Return tensor-parallel options with a plan, which is derived from the model's structure if there is none.

    The options are returned unchanged if they or the model have a plan. They are also returned unchanged if a derived
    plan would split less than half of the elements of the model's matrices.

    Args:
        model: Model to split; its parameters may be meta tensors.
        options: User's options.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension. Default: False.
    """
    if options.plan is not None or plans.get_model_plan(model):
        return options
    linears = dict(_iterate_linears(model))
    groups, groups_by_key = SplitGroups(), dict[str, SplitGroups]()
    # `_iterate_scopes` reads the plan while it grows, so a layer is only in one group.
    for name, linear_names in _iterate_scopes(model, linears, groups.plan):
        module = model.get_submodule(name)
        if (key := _make_likeness_key(module, linear_names)) not in groups_by_key:
            groups_by_key[key] = _find_groups(module, linear_names, size, is_sharded)
        groups.add(groups_by_key[key], f"{name}." if name else "")
    if not _splits_most_elements(model, linears, groups.plan):
        return options
    if (head := _find_head(model)) is not None:
        groups.plan[head] = "colwise_gather_output"
    names = [*dict(model.named_modules()), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    attributes = [f"{name}.{key}" if name else key for name, module in model.named_modules() for key in vars(module)]
    plan = plans.generalize_names(groups.plan, names)
    divide = plans.generalize_names(dict.fromkeys(groups.divide, ""), attributes)
    keep = plans.generalize_names({name: "" for name in groups.keep if name not in groups.divide}, attributes)
    rest = ", ".join(plans.generalize_names({name: "" for name in linears if name not in groups.plan}, names))
    log.info_once(
        "%s has no tensor-parallel plan of its own; the one derived from its structure splits (tp=%d) %s. The rest stays whole%s",
        type(model).__name__, size, ", ".join(plan), f", including {rest}" if rest else "",
    )  # fmt: skip
    return replace(options, plan=plan, divide=(*options.divide, *divide), keep=(*options.keep, *keep))


def check_blocks(model: torch.nn.Module, model_split: plans.ModelSplit, region: plans.SequenceRegion) -> None:
    """Raise an error if a block mixes tokens outside of the modules that get the full sequence.

    This function is called only for plans that `complete_plan` has derived.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        region: Stacks of blocks whose activations are sharded along the sequence.

    Raises:
        PrepareError: If a block mixes tokens outside of these modules, or if a copy of the block cannot be called to
            test this.
    """
    tested_keys = set[str]()
    for name in (name for stack in region.stacks for name in stack):
        block, prefix = model.get_submodule(name), f"{name}."
        split_modules = {
            path: split_module for path, split_module in model_split.split_modules.items() if path.startswith(prefix)
        }
        layers = [
            path.removeprefix(prefix)
            for path, split_module in split_modules.items()
            if isinstance(split_module.style, styles.Colwise)
        ]
        alone = [
            path.removeprefix(prefix)
            for path, split_module in split_modules.items()
            if split_module.boundary is BoundaryLayout.SEQUENCE
        ]
        if (key := _make_likeness_key(block, layers)) in tested_keys:
            continue
        tested_keys.add(key)
        gathered = [path.removeprefix(prefix) for path in region.gathered if path.startswith(prefix)]
        if not ModuleTrial(block, dict.fromkeys([*layers, *alone]), 1).is_tokenwise(gathered, alone):
            raise PrepareError(
                f"sequence_parallel=True: {name!r} ({type(block).__name__}) could not be shown to compute each token by itself "
                "outside its split attention and MLPs; leave the option out, or give a plan"
            )


def _make_likeness_key(module: torch.nn.Module, linear_names: list[str]) -> str:
    """Return a key that is equal for two modules if they differ only in the values of their weights and buffers.

    The positions of the two modules in the model do not matter.

    Args:
        module: Module to describe.
        linear_names: Names of the module's linear layers.
    """
    shapes = [(name, tuple(each.shape)) for name, each in (*module.named_parameters(), *module.named_buffers())]
    settings = [
        (name, key, value) for name, part in module.named_modules() for key, value in vars(part).items()
        if isinstance(value, int | float | str | tuple) and not key.endswith(("idx", "index", "_id"))
    ]  # fmt: skip
    return repr((type(module), linear_names, shapes, settings, [type(part) for part in module.modules()]))


def _iterate_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module) for each linear layer that tensor parallelism can split.

    Linear layers are `torch.nn.Linear` and transformers' `Conv1D`. For a layer with adapters, the module is the wrapper
    that contains the adapters. These layers are left out: those whose weight is quantized, not floating-point, or shared
    with other modules, those with adapters that cannot be split, and those within a `torch.nn.MultiheadAttention`.
    """
    shared_ids = {id(p) for p, owners in find_parameter_owners(model).values() if len(owners) > 1}
    closed_names: list[str] = []  # modules whose submodules are not visited
    for name, module in model.named_modules():
        if any(name.startswith(f"{closed}.") for closed in closed_names):
            continue
        layer, is_adapted = plans.get_base_layer(module), plans.is_adapted(module)
        # MultiheadAttention reads the weights of its submodules without calling them, so they cannot be split.
        if isinstance(module, torch.nn.MultiheadAttention) or _is_linear(layer) or is_adapted:
            closed_names.append(name)
        if not _is_linear(layer) or (is_adapted and plans.describe_misfit(module, styles.Colwise()) is not None):
            continue
        weight = layer._parameters.get("weight")
        is_plain = type(weight) is torch.nn.Parameter or (weight is not None and is_fake(weight))  # not quantized
        if is_plain and weight.is_floating_point() and id(weight) not in shared_ids:
            yield name, module


def _iterate_scopes(
    model: torch.nn.Module, linears: Mapping[str, torch.nn.Module], plan: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield modules whose linear layers might form a group, innermost modules first.

    A group consists of layers that are split by columns and the layer after them, which is split by rows. The modules
    have 2 to 16 linear layers that belong to no group yet. Modules that contain a non-empty `ModuleList` are skipped.

    Args:
        model: Model to split.
        linears: Linear layers by name.
        plan: Plan derived so far, which may grow meanwhile. The layers that it names already belong to a group.

    Yields:
        Pairs of (name of the module, names of its linear layers relative to it).
    """
    for name, module in reversed(list(model.named_modules())):
        prefix = f"{name}." if name else ""
        linear_names = [path for path in linears if path.startswith(prefix) and path not in plan and path != name]
        is_stack = any(isinstance(part, torch.nn.ModuleList) and len(part) for part in module.modules())
        if not is_stack and 2 <= len(linear_names) <= _MAX_LINEARS:
            yield name, [path.removeprefix(prefix) for path in linear_names]


def _find_groups(module: torch.nn.Module, linear_names: list[str], size: int, is_sharded: bool) -> SplitGroups:
    """Return the groups of a module's linear layers that can be split. Names are relative to the module.

    Args:
        module: Module whose layers are tried, in the order in which they are called.
        linear_names: Names of the linear layers.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension.
    """
    groups, trial = SplitGroups(), ModuleTrial(module, linear_names, size)
    if not trial.reference_runs:
        return groups
    _, reference = trial.reference_runs[0]
    called_names = [name for name in reference.outputs if name in linear_names]
    start = 0
    while start < len(called_names) - 1:
        for end in range(start + 1, len(called_names)):
            group = _try_group(trial, reference, called_names[start:end], called_names[end], size, is_sharded)
            if group is not None:
                groups.add(group)
                start = end  # the next group begins after this one
                break
        start += 1
    return groups


def _try_group(
    trial: ModuleTrial, reference: ModuleRun, columns: list[str], row: str, size: int, is_sharded: bool
) -> SplitGroups | None:
    """Return a plan that splits a group of matrices without changing the module's result, or None if there is none.

    Args:
        trial: Copy of the module on which splits are tested.
        reference: Record of a call of the unsplit copy.
        columns: Names of the matrices to split by columns.
        row: Name of the matrix to split by rows.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension.
    """
    layers = {name: plans.get_base_layer(trial.module.get_submodule(name)) for name in (*columns, row)}
    inner = styles.num_inputs(layers[row])
    widths = [styles.num_outputs(layers[name]) for name in columns]
    # Number of matrices that each column-split layer packs: 1, 2 or 3, or 0 if its width is no such multiple.
    nums_packed = [width // inner if width in (inner, 2 * inner, 3 * inner) else 0 for width in widths]
    has_same_input = any(reference.inputs[row] is reference.inputs[name] for name in columns)
    if has_same_input or not any(nums_packed) or any(width % size for width in (inner, *widths)):
        return None
    counts, tables, others = _list_choices(trial.module, inner, size)
    divisible = [name for name, count in counts.items() if count % size == 0]
    for factors in product(*([num_packed, 1] if num_packed > 1 else [1] for num_packed in nums_packed)):
        plan = {name: _COLUMN_STYLES[factor] for name, factor in zip(columns, factors)} | {row: "rowwise"}
        for chosen in _iterate_subsets([*divisible, *tables], others):
            divide = [name for name in chosen if name not in tables]
            table_plan = dict.fromkeys((name for name in chosen if name in tables), "rowwise")
            if (with_sharded_input := trial.test_split(plan | table_plan, divide, row)) is None:
                continue
            if is_sharded and max(factors) > 1 and not styles.is_transposed(layers[columns[0]]):
                # A packed matrix cannot be split along a dimension that is also sharded. So its outputs are gathered instead.
                gathered = dict.fromkeys(columns, "colwise_gather_output")
                return SplitGroups({**gathered, row: "rowwise_split_input"}, [], [*counts])
            summed = dict.fromkeys(with_sharded_input, "replicated_with_grad_allreduce")
            return SplitGroups(plan | table_plan | summed, divide, [*counts])
    return None


def _list_choices(module: torch.nn.Module, inner: int, size: int) -> tuple[dict[str, int], list[str], list[str]]:
    """Return a module's attributes and parameters that might have to be divided by the tensor-parallel size.

    Args:
        module: Module with column-parallel linear layers that are followed by a row-parallel one.
        inner: Number of features between the column-parallel layers and the row-parallel layer.
        size: Number of ranks.

    Returns:
        Tuple of three collections. The first has the values of attributes that count heads, by name. The second has the
        names of parameters with one column per head. The third has the names of other attributes with the value
        `inner`.
    """
    owners = dict(module.named_modules())
    linears = {name for name, part in owners.items() if _is_linear(part)}
    numbers = {
        (f"{name}.{key}" if name else key): (key, value)
        for name, part in owners.items() if name not in linears and not type(part).__module__.startswith("torch.nn.")
        for key, value in vars(part).items() if isinstance(value, int) and value > 1
    }  # fmt: skip
    counts = {path: value for path, (key, value) in numbers.items() if COUNTS.fullmatch(key)}
    others = [path for path, (_, value) in numbers.items() if value == inner and path not in counts]
    heads = {count for count in counts.values() if count % size == 0}
    tables = [
        name for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and parameter.shape[1] in heads and name.rpartition(".")[0] not in linears
    ]  # fmt: skip
    return counts, tables, others


def _iterate_subsets(first: list[str], others: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield combinations of names to divide by the number of ranks, in the order in which to test them.

    Each name belongs to an attribute or a parameter. The first combination contains all names that refer to attention
    heads. The others are all combinations of the first six names in `[*first, *others]`, smallest first.

    Args:
        first: Names that refer to attention heads.
        others: Other names.
    """
    yield tuple(first)
    names = [*first, *others][:_MAX_CHOICES]
    for number in range(len(names) + 1):
        yield from (chosen for chosen in combinations(names, number) if chosen != tuple(first))


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a `torch.nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, torch.nn.Linear) or styles.is_transposed(module)


def _splits_most_elements(model: torch.nn.Module, linears: Mapping[str, Any], plan: Mapping[str, str]) -> bool:
    """Whether a plan splits at least half of the elements of the model's matrices.

    Embeddings and matrices tied to them are not counted.

    Args:
        model: Model to split.
        linears: Linear layers by name.
        plan: Style of each linear layer to split, by name.
    """
    embedding_ids = {
        id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()
    }
    num_all = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in embedding_ids)
    num_split = sum(
        p.numel() for name, layer in linears.items() if name in plan for p in layer.parameters() if p.dim() > 1
    )
    return bool(num_split) and 2 * num_split >= num_all


def _find_head(model: torch.nn.Module) -> str | None:
    """Return the name of the model's output head, or None if tensor parallelism cannot split the head.

    The head must be a linear layer whose weight is shared with nothing but plain embeddings.
    """
    head = plans.find_output_head(model)
    if not isinstance(head, torch.nn.Linear):
        return None
    owners_by_parameter = [{module for _, module, _ in owners} for _, owners in find_parameter_owners(model).values()]
    owners_of_head = set().union(*(owners for owners in owners_by_parameter if head in owners))
    for module in owners_of_head - {head}:
        is_plain_embedding = isinstance(module, torch.nn.Embedding) and not module.max_norm and not module.sparse
        if not is_plain_embedding:
            return None
    return next(str(name) for name, module in model.named_modules() if module is head)
