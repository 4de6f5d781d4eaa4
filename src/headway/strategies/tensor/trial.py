"""Checks that a module computes the same when its matrices are split, with a copy that has random weights.

The matrix that is cut by rows is called with each rank's part, and gives the rank's term; what follows goes on with the whole's
result. So the terms must add up to that result, and all else must be as in the whole module. No rank asks another, the model's own
tensors and random numbers stay as they are, and the copy computes in float32 on the CPU.
"""

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily

from headway.runtime.collectives import tree
from headway.strategies.tensor import plans, styles
from headway.strategies.tensor.crossings import SplitAxis, cut_packed

_CLOSE = 1e-4
"""How far results may lie apart, as a share of the largest: of float32, added in another order."""
_LENGTH, _MOST_TOKENS = 8, 1024
_STATES = ("key_value_states", "encoder_hidden_states")
"""Arguments of transformers' cross attention, which is tried with and without."""
Call = tuple[tuple[torch.Tensor, ...], dict[str, Any]]


@dataclass
class ModuleRun:
    """One call of the copy.

    Attributes:
        out: the first tensor of its output.
        inputs: the first tensor of each module's input, by its name, in the order of the calls' ends.
        outputs: the first tensor of its output.
        is_once: no module was called twice.
    """

    out: torch.Tensor | None = None
    inputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    is_once: bool = True


class ModuleTrial:
    """Calls of a copy.

    Args:
        module: what is copied; it may be without values.
        linears: names of the linear layers in it that may be split.
        size: the number of ranks.

    Attributes:
        module: the copy.
        wholes: calls that the whole copy accepts, with what came of them.
    """

    def __init__(self, module: torch.nn.Module, linears: Iterable[str], size: int) -> None:
        self._size, self._drawn = size, torch.Generator().manual_seed(0)
        self.wholes: list[tuple[Call, ModuleRun]] = []
        with self._apart():
            self.module = self._copied(module)
            self._watched = {name: self.module.get_submodule(name) for name in linears}
            inner = {part for layer in self._watched.values() for part in layer.modules()}
            others = ((name, part) for name, part in self.module.named_modules() if part._parameters)
            self._watched |= {name: part for name, part in others if part not in inner}
            for length in self._lengths():
                tried = [(call, self._run(call)) for call in self._calls(length)]
                self.wholes = [(call, run) for call, run in tried if run is not None and run.out is not None]
                if self.wholes:
                    break

    def proves(self, plan: Mapping[str, str], divide: Iterable[str], row: str) -> list[str] | None:
        """Does the module compute the same when it is split so?

        Args:
            plan: names of modules and parameters in it, and their styles.
            divide: names of attributes that count what a rank has.
            row: the matrix whose terms are added up.

        Returns:
            Names of whole modules that are given a part; None: it computes something else.
        """
        with self._apart():
            found = [self._parts_seen(plan, divide, row, *each) for each in self.wholes if row in each[1].outputs]
        if not found or any(names is None for names in found):
            return None
        return sorted({name for names in found for name in names or ()})

    def acts_on_tokens(self, stubs: Iterable[str], linears: Iterable[str]) -> bool:
        """Does the module compute each token by itself, but for what some of its modules do, which are given all tokens?

        Args:
            stubs: those modules' names; in the trial they give what they gave for the whole sequence.
            linears: names of linear layers that must be given (rows, tokens, width).
        """
        with self._apart():
            return bool(self.wholes) and all(self._is_by_tokens(*each, [*stubs], [*linears]) for each in self.wholes)

    def _is_by_tokens(self, call: Call, whole: ModuleRun, stubs: list[str], linears: list[str]) -> bool:
        hidden, given = call[0][0], [whole.inputs.get(name) for name in linears]
        if whole.out is None or any(x is not None and x.shape[:2] != hidden.shape[:2] for x in given):
            return False
        outputs, modules = dict[str, Any](), {name: self.module.get_submodule(name) for name in stubs}

        def note(name: str) -> Any:
            return lambda module, args, output: outputs.update({name: output})

        handles = [module.register_forward_hook(note(name)) for name, module in modules.items()]
        self._run(call)
        for handle in handles:
            handle.remove()
        middle = hidden.shape[1] // 2
        for tokens in (slice(0, middle), slice(middle, None)):

            def part(leaf: Any, tokens: slice = tokens) -> Any:
                is_states = isinstance(leaf, torch.Tensor) and leaf.dim() == 3 and leaf.shape[:2] == hidden.shape[:2]
                return leaf[:, tokens] if is_states else leaf

            for name, module in modules.items():
                found = tree.map_leaves(part, outputs.get(name))
                module.forward = lambda *_, found=found, **__: found
            run = self._run(((part(hidden),), call[1]))
            for module in modules.values():
                del module.forward
            if run is None or not _is_close(run.out, whole.out[:, tokens]):
                return False
        return True

    def _parts_seen(
        self, plan: Mapping[str, str], divide: Iterable[str], row: str, call: Call, whole: ModuleRun
    ) -> list[str] | None:
        total, names = self._bias(row), set[str]()
        for rank in range(self._size):
            with self._as_rank(SplitAxis(None, None, rank, self._size), plan, divide, row):
                run = self._run(call, row, whole.outputs[row])
            if run is None or run.inputs.keys() != whole.inputs.keys() or not _is_close(run.out, whole.out):
                return None
            total = total + run.outputs[row]
            names |= {name for name, x in whole.inputs.items() if not _is_close(run.inputs[name], x)}
        return [name for name in names if name not in plan] if _is_close(total, whole.outputs[row]) else None

    def _bias(self, row: str) -> Any:
        found = plans.layer_of(self.module.get_submodule(row))._parameters.get("bias")
        return 0.0 if found is None else found

    @contextmanager
    def _as_rank(self, axis: SplitAxis, plan: Mapping[str, str], divide: Iterable[str], row: str) -> Iterator[None]:
        """A block in which the copy is one rank's."""
        before: list[tuple[dict[str, Any], str, Any]] = []

        def put(where: Any, key: str, value: Any) -> None:
            before.append((where, key, where[key]))
            where[key] = value

        try:
            for name, style_name in plan.items():
                for module, keys in self._holders(name, style_name):
                    style = styles.make(style_name, module)
                    for key in keys:
                        whole = module._parameters[key]
                        if whole is not None and (dim := style.dim(key, whole)) is not None:
                            put(module._parameters, key, cut_packed(whole, axis, dim, style.factor))
                        elif whole is not None and key == "bias":
                            put(module._parameters, key, style.bias_within(whole, axis))
                    if isinstance(style, styles.Colwise) and style.is_transposed:
                        put(vars(module), "nf", styles.num_outputs(module) // axis.size)
            for path in divide:
                holder, _, key = path.rpartition(".")
                counted = vars(self.module.get_submodule(holder))
                put(counted, key, counted[key] // axis.size)
            yield
        finally:
            for where, key, value in reversed(before):
                where[key] = value

    def _holders(self, name: str, style_name: str) -> list[tuple[torch.nn.Module, list[str]]]:
        """The modules, and which of their parameters, that an entry of a plan names."""
        if name not in self._watched:
            owner, _, key = name.rpartition(".")
            return [(self.module.get_submodule(owner), [key])]
        module = self._watched[name]
        parts = plans.parts(module, styles.make(style_name)) if plans.is_adapted(module) else [""]
        return [(part, list(part._parameters)) for part in map(module.get_submodule, parts)]

    # ------------------------------------------------------------ the copy and its calls

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A block that leaves the process's random numbers alone, and computes in a forecast too."""
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield

    def _copied(self, module: torch.nn.Module) -> torch.nn.Module:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            fan = parameter.numel() // parameter.shape[0] if parameter.dim() > 1 and parameter.numel() else 1
            memo[id(parameter)] = torch.nn.Parameter(self._normal(*parameter.shape) / math.sqrt(fan), False)
        memo |= {id(buffer): _values(buffer) for buffer in module.buffers()}
        for part in module.modules():
            memo |= {id(hooks): OrderedDict() for hooks in (part._forward_hooks, part._forward_pre_hooks)}
            # Not a configuration, nor what a call goes through that is on one stage of a pipeline.
            memo |= {id(each): each for each in vars(part).values() if not isinstance(each, dict | torch.Tensor)}
        return copy.deepcopy(module, memo).eval()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._drawn, device="cpu", dtype=torch.float32)

    def _lengths(self) -> Iterator[int]:
        """Of sequences; windows of a picture have as many tokens as their table of relative positions says."""
        known = {math.isqrt(buffer.numel()) for buffer in self.module.buffers()}
        return iter([_LENGTH, *sorted(length for length in known if 1 < length <= _MOST_TOKENS and length != _LENGTH)])

    def _calls(self, length: int) -> Iterator[Call]:
        width = styles.num_inputs(plans.layer_of(next(iter(self._watched.values()))))
        asked = inspect.signature(self.module.forward).parameters
        needed = {
            name: None for name, each in list(asked.items())[1:]
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }  # fmt: skip
        if not all("mask" in name or "None" in str(asked[name].annotation) for name in needed):
            return  # what it is called with is not known
        hidden = self._normal(2, length, width)
        yield (hidden,), dict(needed)
        for name in _STATES:
            if name in asked:
                yield (hidden,), {**needed, name: self._normal(2, length + 1, width)}

    def _run(self, call: Call, row: str = "", result: torch.Tensor | None = None) -> ModuleRun | None:
        """Call the copy; None: it cannot be called so."""
        run, handles = ModuleRun(), []

        def watch(name: str) -> Any:
            def note(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                run.is_once = run.is_once and name not in run.inputs
                run.inputs[name], run.outputs[name] = _first((args, kwargs)), _first(output)
                return result if name == row else None

            return note

        try:
            for name, part in self._watched.items():
                handles.append(part.register_forward_hook(watch(name), with_kwargs=True))
            run.out = _first(torch.nn.Module.__call__(self.module, *call[0], **call[1]))
        except Exception:  # whatever a forward may raise, it is no call of this module
            return None
        finally:
            for handle in handles:
                handle.remove()
        return run if run.is_once else None


def _values(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_meta and not is_fake(buffer):
        found = buffer.detach().cpu().clone()
    else:
        like = {"dtype": buffer.dtype, "device": "cpu"}
        is_number = buffer.is_floating_point() or buffer.dtype == torch.bool
        found = torch.ones(buffer.shape, **like) if is_number else torch.zeros(buffer.shape, **like)  # type: ignore[call-overload]
    return found.float() if found.is_floating_point() else found


def _first(found: Any) -> torch.Tensor | None:
    return next((each for each in tree.tensors(found) if each.is_floating_point()), None)


def _is_close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    return bool(((one - other).abs().max() <= _CLOSE * other.abs().max()) if other.numel() else True)
