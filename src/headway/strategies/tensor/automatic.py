"""A plan for a model that has none: derived from its structure, and verified before anything is split.

Within each module, innermost first, linear layers are taken in the order of their calls: some that are cut by columns, and the next
one cut by rows. A trial (`trial`) decides: such a group is split if the module then computes the same, with heads counted as they are
or divided, and with tables of a column for each head (relative positions) cut or whole. What is not proved stays whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from headway.config.parallelism import TensorParallelOptions
from headway.errors import PrepareError
from headway.log import get_logger
from headway.strategies.parts import holders_of
from headway.strategies.tensor import plans, styles
from headway.strategies.tensor.calls import COUNTS
from headway.strategies.tensor.styles import BoundaryLayout
from headway.strategies.tensor.trial import ModuleRun, ModuleTrial

_MOST_LINEARS, _MOST_CHOICES = 16, 6
_PACKED = {1: "colwise", 2: "packed_colwise", 3: "packed_qkv_colwise"}
log = get_logger(__name__)


@dataclass
class SplitGroups:
    """Parts of a plan.

    Attributes:
        plan: names and styles.
        divide, keep: attributes that count heads, as in the options.
    """

    plan: dict[str, str] = field(default_factory=dict)
    divide: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def add(self, other: "SplitGroups", prefix: str = "") -> None:
        """Those of a module of this name."""
        self.plan |= {prefix + name: style for name, style in other.plan.items()}
        self.divide += [name for each in other.divide if (name := prefix + each) not in self.divide]
        self.keep += [name for each in other.keep if (name := prefix + each) not in self.keep]


def complete(
    model: torch.nn.Module, options: TensorParallelOptions, size: int, is_sharded: bool = False
) -> TensorParallelOptions:
    """The options with a plan for a model that has none; as they are, if too little of it could be split.

    Args:
        model: it may be without values.
        options: the user's.
        size: the number of ranks.
        is_sharded: parameters are sharded along their first dimension afterwards.
    """
    if options.plan is not None or plans.own(model):
        return options
    linears = dict(_linears(model))
    found, known = SplitGroups(), dict[str, SplitGroups]()
    for name, inside in _scopes(model, linears, found.plan):
        module = model.get_submodule(name)
        if (alike := _likeness(module, inside)) not in known:
            known[alike] = _groups(module, inside, size, is_sharded)
        found.add(known[alike], f"{name}." if name else "")
    if not _is_enough(model, linears, found.plan):
        return options
    if (head := _head(model)) is not None:
        found.plan[head] = "colwise_gather_output"
    names = [*dict(model.named_modules()), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    counts = [f"{name}.{key}" if name else key for name, module in model.named_modules() for key in vars(module)]
    plan, keep = _starred(found.plan, names), {name: "" for name in found.keep if name not in found.divide}
    rest = ", ".join(_starred({name: "" for name in linears if name not in found.plan}, names))
    log.info_once(
        "%s has no tensor-parallel plan of its own; the one derived from its structure splits (tp=%d) %s. The rest stays whole%s",
        type(model).__name__, size, ", ".join(plan), f", including {rest}" if rest else "",
    )  # fmt: skip
    divide = _starred(dict.fromkeys(found.divide, ""), counts)
    return replace(options, plan=plan, divide=(*options.divide, *divide), keep=(*options.keep, *_starred(keep, counts)))


def check_parts(model: torch.nn.Module, cuts: plans.ModelSplit, region: plans.SequenceRegion) -> None:
    """Does each block compute tokens by themselves, but for modules that are given all of them? Asked of plans found here.

    Raises:
        PrepareError: some block does not, or it cannot be tried.
    """
    known = set[str]()
    for name in (name for stack in region.stacks for name in stack):
        block, prefix = model.get_submodule(name), f"{name}."
        sites = {path: site for path, site in cuts.sites.items() if path.startswith(prefix)}
        layers = [path.removeprefix(prefix) for path, site in sites.items() if isinstance(site.style, styles.Colwise)]
        alone = [path.removeprefix(prefix) for path, site in sites.items() if site.crossing is BoundaryLayout.SEQUENCE]
        if (alike := _likeness(block, layers)) in known:
            continue
        known.add(alike)
        gathered = [path.removeprefix(prefix) for path in region.gathered if path.startswith(prefix)]
        if not ModuleTrial(block, dict.fromkeys([*layers, *alone]), 1).acts_on_tokens(gathered, alone):
            raise PrepareError(
                f"sequence_parallel=True: {name!r} ({type(block).__name__}) could not be shown to compute each token by itself "
                "outside its split attention and MLPs; leave the option out, or give a plan"
            )


def _starred(found: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """The same with `*` for numbers in names, where all known names that fit have the same value."""
    made: dict[str, str] = {}
    patterns = {name: re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in found}
    fitting = {pattern: {n for n in known if plans.fits(pattern, n)} for pattern in dict.fromkeys(patterns.values())}
    for name, value in found.items():
        is_alike = all(found.get(each) == value for each in fitting[patterns[name]])
        made[patterns[name] if is_alike else name] = value
    return made


def _likeness(module: torch.nn.Module, inside: list[str]) -> str:
    """The same for modules that compute alike, but for their values and their place in the model."""
    shapes = [(name, tuple(each.shape)) for name, each in (*module.named_parameters(), *module.named_buffers())]
    settings = [
        (name, key, value) for name, part in module.named_modules() for key, value in vars(part).items()
        if isinstance(value, int | float | str | tuple) and not key.endswith(("idx", "index", "_id"))
    ]  # fmt: skip
    return repr((type(module), inside, shapes, settings, [type(part) for part in module.modules()]))


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers that share no parameter, by name; of those with adapters, the layer around."""
    shared = {id(p) for p, owners in holders_of(model).values() if len(owners) > 1}
    closed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{around}.") for around in closed):
            continue
        layer, is_adapted = plans.layer_of(module), plans.is_adapted(module)
        if isinstance(module, torch.nn.MultiheadAttention) or _is_linear(layer) or is_adapted:
            closed.append(name)
        weight = layer._parameters.get("weight")
        is_plain = type(weight) is torch.nn.Parameter or (weight is not None and is_fake(weight))  # not quantized
        is_own = is_plain and weight.is_floating_point() and id(weight) not in shared
        if is_own and _is_linear(layer) and (not is_adapted or plans.misfit(module, styles.Colwise()) is None):
            yield name, module


def _scopes(
    model: torch.nn.Module, linears: Mapping[str, torch.nn.Module], taken: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Modules with linear layers that no group has taken yet, innermost first, and these layers' names in them."""
    for name, module in reversed(list(model.named_modules())):
        prefix = f"{name}." if name else ""
        inside = [path for path in linears if path.startswith(prefix) and path not in taken and path != name]
        is_stack = any(isinstance(part, torch.nn.ModuleList) and len(part) for part in module.modules())
        if not is_stack and 2 <= len(inside) <= _MOST_LINEARS:
            yield name, [path.removeprefix(prefix) for path in inside]


def _groups(module: torch.nn.Module, inside: list[str], size: int, is_sharded: bool) -> SplitGroups:
    found, trial = SplitGroups(), ModuleTrial(module, inside, size)
    if not trial.wholes:
        return found
    whole = trial.wholes[0][1]
    called = [name for name in whole.outputs if name in inside]
    start = 0
    while start < len(called) - 1:
        for end in range(start + 1, len(called)):
            group = _group(trial, whole, called[start:end], called[end], size, is_sharded)
            if group is not None:
                found.add(group)
                start = end
                break
        start += 1
    return found


def _group(
    trial: ModuleTrial, whole: ModuleRun, columns: list[str], row: str, size: int, is_sharded: bool
) -> SplitGroups | None:
    """The first way to cut these matrices that is proved."""
    layers = {name: plans.layer_of(trial.module.get_submodule(name)) for name in (*columns, row)}
    inner, widths = styles.num_inputs(layers[row]), [styles.num_outputs(layers[name]) for name in columns]
    packed = [width // inner if width in (inner, 2 * inner, 3 * inner) else 0 for width in widths]
    is_fed_alike = any(whole.inputs[row] is whole.inputs[name] for name in columns)
    if is_fed_alike or not any(packed) or any(width % size for width in (inner, *widths)):
        return None
    counts, tables, others = _choices(trial.module, inner, size)
    divisible = [name for name, count in counts.items() if count % size == 0]
    for factors in product(*([factor, 1] if factor > 1 else [1] for factor in packed)):
        plan = {name: _PACKED[factor] for name, factor in zip(columns, factors)} | {row: "rowwise"}
        for chosen in _subsets([*divisible, *tables], others):
            divide = [name for name in chosen if name not in tables]
            cut = dict.fromkeys((name for name in chosen if name in tables), "rowwise")
            if (partial := trial.proves(plan | cut, divide, row)) is None:
                continue
            if is_sharded and max(factors) > 1 and not styles.is_transposed(layers[columns[0]]):
                # What is packed along the dimension that is sharded too is cut in memory alone.
                gathered = dict.fromkeys(columns, "colwise_gather_output")
                return SplitGroups({**gathered, row: "rowwise_split_input"}, [], [*counts])
            return SplitGroups(plan | cut | dict.fromkeys(partial, "replicated_with_grad_allreduce"), divide, [*counts])
    return None


def _choices(module: torch.nn.Module, inner: int, size: int) -> tuple[dict[str, int], list[str], list[str]]:
    """Attributes that count heads, parameters with a column for each head, and attributes that are the width of all heads."""
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


def _subsets(first: list[str], others: list[str]) -> Iterator[tuple[str, ...]]:
    """All that concerns heads, alone; then small choices of everything."""
    yield tuple(first)
    every = [*first, *others][:_MOST_CHOICES]
    for number in range(len(every) + 1):
        yield from (chosen for chosen in combinations(every, number) if chosen != tuple(first))


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or styles.is_transposed(module)


def _is_enough(model: torch.nn.Module, linears: Mapping[str, Any], plan: Mapping[str, str]) -> bool:
    """Is half of the model's matrices split, embeddings and what shares their weights apart?"""
    tables = {
        id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()
    }
    total = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    cut = sum(p.numel() for name, layer in linears.items() if name in plan for p in layer.parameters() if p.dim() > 1)
    return bool(cut) and 2 * cut >= total


def _head(model: torch.nn.Module) -> str | None:
    """The output head, if it is a linear layer that shares its weight with plain embeddings at most."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if not isinstance(head, torch.nn.Linear):
        return None
    owned = [{module for _, module, _ in owners} for _, owners in holders_of(model).values()]
    around = set().union(*(modules for modules in owned if head in modules))
    if any(isinstance(each, torch.nn.Embedding) and (each.max_norm or each.sparse) for each in around):
        return None
    is_own = all(each is head or isinstance(each, torch.nn.Embedding) for each in around)
    return next(name for name, module in model.named_modules() if module is head) if is_own else None
