"""Tensor parallelism: a model's matrices are split across the ranks of one axis, in place.

Parameters become DTensors on that axis: cut ones, and whole ones too, so that an optimizer has one kind of tensor and
`fully_shard` can shard what is left along other axes. Forward computes on plain local tensors (`calls`), and crossings
between whole and cut activations exchange them (`crossings`).

Gradients of whole parameters must be the same on all ranks of tensor parallelism: checked once, at the first update.

A parameter that the plan leaves whole, but that acts on cut activations (a scale within an attention, a trained activation
function between two matrices), gets another gradient on each rank. The ranks would drift apart, and nothing would fail.
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import is_fake

from headway.common.optional import Later
from headway.config.parallelism import TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.parts import holders_of
from headway.strategies.tensor import automatic, calls, plans, styles
from headway.strategies.tensor.calls import GatheredInput, LocalParameters, SequenceBlock, SplitCall
from headway.strategies.tensor.crossings import SplitAxis, SplitRNG, cut_packed
from headway.strategies.tensor.plans import AdaptedCall, ModelSplit, SequenceRegion
from headway.strategies.tensor.styles import SplitModule
from headway.weights.pieces import is_dtensor

_RELATIVE = 1e-3
_NUM_NAMES = 4
_OF_LARGEST = 1e-6
"""Kernels that add in any order make small differences: of this gradient's norm, and of the largest one's."""
_BLOCK = 2**22
"""Elements that are looked at at once."""


def check(model: torch.nn.Module, axis: SplitAxis, everyone: Collectives) -> bool:
    """Compare the gradients that there are; returns whether there were any.

    Args:
        model: cut along the axis.
        axis: the ranks that must agree.
        everyone: all ranks, which hear of it: those of other groups would wait for these in the next exchange.

    Raises:
        PrepareError: ranks of some group differ, on all ranks.
    """
    named = [
        (name, dtensors.local(parameter.grad).detach())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and is_dtensor(parameter)  # not one that was added after prepare()
        and parameter.placements[-1].is_replicate()
    ]
    has_values = bool(named) and not is_fake(named[0][1])  # a plan has none
    odd = _differing(named, axis) if has_values else []
    has_any = any(parameter.grad is not None for parameter in model.parameters())
    rows = everyone.gather_numbers([float(len(odd)), float(has_any)])
    counts = [int(row[0]) for row in rows]
    if any(counts):
        names = everyone.gather_objects(odd[:_NUM_NAMES])
        ranks = [rank for rank, count in enumerate(counts) if count]
        first = ranks[0]
        more = " and others" if counts[first] > len(names[first]) else ""
        raise PrepareError(
            f"the gradients of {counts[first]} parameters that the tensor-parallel plan leaves whole differ between ranks "
            f"{', '.join(map(str, ranks))}: {', '.join(names[first])}{more}. They act on activations that are split. Give their "
            'modules the style "replicated_with_grad_allreduce", which sums their gradients; if their inputs are whole, something '
            "before them draws different random numbers on each rank, or the ranks of a group read different batches"
        )
    return any(row[1] for row in rows)  # a whole stage of a pipeline may be frozen


def _differing(named: list[tuple[str, torch.Tensor]], axis: SplitAxis) -> list[str]:
    rows = torch.stack([_digest(grad) for _, grad in named])
    found = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(found, rows, group=axis.group)
    every = torch.stack(found)
    spread = (every - every[0]).abs().amax(dim=(0, 2))
    norms = every[..., 0].abs().amax(0)
    odd = spread > _RELATIVE * norms + _OF_LARGEST * norms.max()
    return [name for (name, _), is_odd in zip(named, odd.tolist()) if is_odd]


def _digest(grad: torch.Tensor) -> torch.Tensor:
    """Its norm and one projection, in blocks: whole and in float64, an embedding's would take many times the gradient's memory."""
    flat, wide = grad.reshape(-1), dtensors.wide(grad.device)
    sums = torch.zeros(2, device=flat.device, dtype=wide)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].to(wide)
        waves = torch.arange(start, start + part.numel(), device=flat.device, dtype=wide).cos()
        sums += torch.stack([part @ part, part @ waves])
    return torch.stack([sums[0].sqrt(), sums[1]])


tensor = Later("torch.distributed.tensor")
placements = Later("torch.distributed.tensor.placement_types")
parallel = Later("torch.distributed.tensor.parallel")


class TensorParallel:
    """A model that has been cut.

    Args:
        model: it must hold the same values on all ranks of the axis, or none (meta tensors).
        mesh: a DeviceMesh of one dimension: the ranks.
        options: how.
        is_sharded: what is left is sharded along the first dimension afterwards.

    Raises:
        ConfigError: a plan that does not fit the model.
        PrepareError: a module that cannot be cut as it says.
    """

    def __init__(
        self, model: torch.nn.Module, mesh: Any, options: TensorParallelOptions, is_sharded: bool = False
    ) -> None:
        self.axis = SplitAxis.of(mesh)
        self._rng_states, self._ends = SplitRNG(self.axis), ExitStack()
        self._model, self._is_checked, self._lent = model, False, list[LocalParameters]()
        given, options = options, automatic.complete(model, options, self.axis.size, is_sharded)
        cuts = plans.read(model, self.axis, options)
        _refuse_within_attention(model, cuts)
        calls.check(model, cuts, self.axis.size, options)
        stack = plans.arrange(model, cuts) if options.sequence_parallel else SequenceRegion([])
        if options is not given:
            automatic.check_parts(model, cuts, stack)
        head = _find_head(model, cuts) if options.loss_parallel else None
        where = _dimensions(model, cuts, self.axis)
        if is_sharded:
            _refuse_packed_rows(model, where)
        # From here on the model changes; nothing is refused any more.
        calls.divide(model, cuts, self.axis.size, options)
        foreign = self._apply_foreign(model, cuts)
        _place(model, where, self.axis)
        self._hook(model, cuts, stack, foreign, head)
        self._has_head = head is not None
        self.resume()

    def check_gradients(self, everyone: Collectives) -> None:
        """At the first update: are those of whole parameters alike on the ranks of each group?

        Raises:
            PrepareError: they are not, in some group; all ranks raise it.
        """
        if not self._is_checked:
            self._is_checked = check(self._model, self.axis, everyone)

    def resume(self) -> None:
        """Do what reaches beyond the model: losses understand logits that are cut."""
        if self._has_head:
            self._ends.enter_context(parallel.loss_parallel())

    def leave(self) -> None:
        """The model's forward was left before its end."""
        for each in reversed(self._lent):
            each.after()

    def release(self) -> None:
        """Undo that."""
        self._ends.close()

    def _apply_foreign(self, model: torch.nn.Module, cuts: ModelSplit) -> set[torch.nn.Module]:
        """Apply torch's styles; the modules whose parameters they have taken."""
        for name, style in cuts.foreign.items():
            style.src_data_rank = None
            style._apply(model.get_submodule(name), self.axis.mesh)
        taken = set()
        for module in model.modules() if cuts.foreign else ():
            for parameter in module.parameters(recurse=False):
                if isinstance(parameter, tensor.DTensor):
                    taken.add(module)
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_complete)
        return taken

    def _hook(
        self,
        model: torch.nn.Module,
        cuts: ModelSplit,
        stack: SequenceRegion,
        foreign: set[torch.nn.Module],
        head: SplitModule | None,
    ) -> None:
        partial = {site.module for site in cuts.sites.values() if site.style.is_partial}
        partial |= {model.get_submodule(name) for name in stack.partial}
        sites = {site.module: site for site in cuts.sites.values()}
        for absent in [module for module in sites if any(p.is_meta for p in module.parameters())]:
            del sites[absent]  # of another stage of a pipeline
        gathered = {model.get_submodule(name) for name in stack.gathered}
        blocks = {model.get_submodule(name): (name, names) for names in stack.stacks for name in names}
        rng_states = None if blocks else self._rng_states
        adapted = {model.get_submodule(name): style for name, style in cuts.adapted.items()}
        within = {inner for outer in adapted for inner in outer.modules()}
        scopes = _scopes(model, cuts)
        for module in model.modules():
            if module in blocks:
                name, names = blocks[module]
                self._register(module, SequenceBlock(self.axis, self._rng_states, name == names[0], name == names[-1]))
            if module in gathered:
                self._register(module, GatheredInput(self.axis))
            if module in sites:
                keeps = self._keep_cut if head is not None and sites[module] is head else None
                is_known = any(module in scope.modules() for scope in scopes) and module not in within
                self._register(module, SplitCall(sites[module], rng_states if is_known else None, keeps))
            if module in adapted and rng_states is not None:
                self._register(module, AdaptedCall(adapted[module], rng_states))
            if module not in foreign and (module._parameters or isinstance(module, torch.nn.MultiheadAttention)):
                held = [*module.modules()] if isinstance(module, torch.nn.MultiheadAttention) else [module]
                self._register(module, LocalParameters(held, self.axis, module in partial))
            if module in scopes and rng_states is not None:
                module.register_forward_hook(lambda *_: self._rng_states.join(), always_call=True)
        rest = [module for module in model.modules() if module not in foreign and module not in partial]
        self._register(model, LocalParameters(rest, self.axis, only_whole=True))

    def _register(self, module: torch.nn.Module, call: Any) -> None:
        if isinstance(call, LocalParameters):
            self._lent.append(call)
        module.register_forward_pre_hook(call.before, with_kwargs=True)
        if hasattr(call, "after_any"):
            module.register_forward_hook(call.after_any, always_call=True)
        if hasattr(call, "after"):
            module.register_forward_hook(call.after, always_call=isinstance(call, LocalParameters))

    def _keep_cut(self, module: torch.nn.Module, output: torch.Tensor) -> Any:
        shape = torch.Size((*output.shape[:-1], styles.num_outputs(module)))
        return dtensors.placed(output, self.axis.mesh, [tensor.Shard(output.dim() - 1)], shape)


def _complete(parameter: Any) -> None:
    """A gradient that torch's styles leave as terms."""
    if isinstance(parameter.grad, tensor.DTensor) and parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _refuse_within_attention(model: torch.nn.Module, cuts: ModelSplit) -> None:
    for name in (*cuts.sites, *cuts.foreign, *cuts.parameters):
        for around in plans.ancestors(name):
            if isinstance(model.get_submodule(around), torch.nn.MultiheadAttention):
                raise PrepareError(
                    f"{name!r} is part of a torch.nn.MultiheadAttention, which uses the weights of its submodules but does not call "
                    "them, so it cannot be split; leave it out of the plan (it stays whole), or write attention with linear layers"
                )


def _refuse_packed_rows(model: torch.nn.Module, where: "Where") -> None:
    for name, parameter in model.named_parameters():
        if where.get(id(parameter), (1, 1))[0] == 0 and where[id(parameter)][1] > 1:
            raise PrepareError(
                f"{name!r} packs several matrices along its first dimension, along which the layout also shards it; use tensor "
                "parallelism alone or with ddp, or use 'colwise_gather_output' for it and for the next matrix 'rowwise_split_input'"
            )


def _find_head(model: torch.nn.Module, cuts: ModelSplit) -> SplitModule:
    gathered = [
        site for site in cuts.sites.values() if isinstance(site.style, styles.Colwise) and site.style.is_gathered
    ]
    own = plans.output_head(model)
    found = [site for site in gathered if own is None or site.module is own]
    if len(found) != 1:
        raise ConfigError(
            "loss_parallel=True needs one head whose plan is 'colwise_gather_output', so that its logits can stay split along the "
            f"vocabulary; the plan has {', '.join(site.name for site in found) or 'none'}"
        )
    return found[0]


def _scopes(model: torch.nn.Module, cuts: ModelSplit) -> list[torch.nn.Module]:
    """Modules within which activations are cut for a while: the nearest around a site that opens with one that closes."""
    closing = [name for name, site in cuts.sites.items() if site.style.closes]
    found: dict[str, None] = {}
    for name, site in cuts.sites.items():
        if site.style.opens:
            for around in plans.ancestors(name):
                if any(close.startswith(f"{around}." if around else "") for close in closing):
                    found[around] = None
                    break
    return [model.get_submodule(name) for name in found]


Where = dict[int, tuple[int, int]]
"""By a parameter's id: the dimension along which it is cut, and how many matrices lie packed along it."""


def _dimensions(model: torch.nn.Module, cuts: ModelSplit, axis: SplitAxis) -> Where:
    where: Where = {}
    for parameter, owners in holders_of(model).values():
        asked = {f"{name}.{key}" if name else key: _asked(cuts, name, key, parameter) for name, _, key in owners}
        wanted = {ask for ask in asked.values() if ask is not None}
        foreign = [
            name for name, *_ in owners if any(around in cuts.foreign for around in (name, *plans.ancestors(name)))
        ]
        if len(owners) > 1 and foreign:
            raise PrepareError(
                f"{' and '.join(asked)} are one parameter, which a ParallelStyle object would untie; give {foreign[0]!r} a style "
                "by name, such as 'colwise_gather_output'"
            )
        if len(wanted) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} are one parameter, but the tensor-parallel plan splits it in two ways"
            )
        if not wanted:
            continue
        (dim, factor) = where[id(parameter)] = wanted.pop()
        _check_size(next(iter(asked)), parameter, dim, factor, axis)
        for (name, _, key), ask in zip(owners, asked.values()):
            if ask is None:
                cuts.sites[name] = _tied_site(model, name, key, dim, cuts, axis)
    return where


def _asked(cuts: ModelSplit, name: str, key: str, parameter: torch.Tensor) -> tuple[int, int] | None:
    style = cuts.parameters.get(f"{name}.{key}" if name else key)
    if style is None and name in cuts.sites:
        style = cuts.sites[name].style
    if style is None or (dim := style.dim(key, parameter)) is None:
        return None
    return dim, style.factor


def _check_size(name: str, parameter: torch.Tensor, dim: int, factor: int, axis: SplitAxis) -> None:
    size = parameter.shape[dim] if dim < parameter.dim() else 0
    if factor > 1 and size % (factor * axis.size):
        raise PrepareError(
            f"{name!r} packs {factor} matrices along dimension {dim} of {tuple(parameter.shape)}, which cannot be divided among "
            f"{axis.size} ranks; use another number of ranks, or leave it out of the plan"
        )
    if size <= -(-size // axis.size) * (axis.size - 1):  # the last rank would have nothing, and draw nothing
        raise PrepareError(
            f"{name!r} of shape {tuple(parameter.shape)} cannot be split along dimension {dim} across {axis.size} ranks; use fewer "
            "ranks, or leave it out of the plan"
        )


def _tied_site(model: torch.nn.Module, name: str, key: str, dim: int, cuts: ModelSplit, axis: SplitAxis) -> SplitModule:
    """A module that shares a cut parameter and that the plan does not name is cut alike."""
    module = model.get_submodule(name)
    style: styles.SplitStyle | None = None
    if name not in cuts.sites and key == "weight" and isinstance(module, torch.nn.Embedding):
        style = styles.EmbeddingRowwise() if dim == 0 else styles.EmbeddingColwise()
    elif name not in cuts.sites and key == "weight" and isinstance(getattr(module, "out_features", None), int):
        style = styles.Colwise(is_gathered=True) if dim == 0 else styles.Rowwise(is_split=True)
    reason = "the plan keeps it whole" if style is None else style.misfit(module, axis.size)
    if style is None or reason is not None:
        raise PrepareError(
            f"{name!r} shares its {key} with a module that is split, but cannot be split so: {reason}; give both a style, or none"
        )
    return SplitModule(module, name, axis, style)


def _place(model: torch.nn.Module, where: Where, axis: SplitAxis) -> None:
    for parameter, owners in holders_of(model).values():
        if isinstance(parameter, tensor.DTensor) or parameter.is_meta:
            continue  # one of torch's styles has placed it; or it is on another stage of a pipeline
        placed = place_parameter(parameter, where.get(id(parameter)), axis)
        for _, module, key in owners:
            module._parameters[key] = placed


def place_parameter(
    parameter: torch.nn.Parameter, where: tuple[int, int] | None, axis: SplitAxis
) -> torch.nn.Parameter:
    """The DTensor in place of a parameter: cut along (a dimension, into so many packed matrices), or whole."""
    local, placement = parameter.detach(), tensor.Replicate()
    if where is not None:
        dim, factor = where
        local = cut_packed(local, axis, dim, factor)
        placement = placements._StridedShard(dim, split_factor=factor) if factor > 1 else tensor.Shard(dim)
    stride = parameter.stride() if where is None else None
    found = dtensors.placed(local, axis.mesh, [placement], parameter.shape, stride)
    placed = torch.nn.Parameter(found, requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed
