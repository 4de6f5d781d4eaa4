"""Sequence parallelism: between the matrices of a stack of blocks, each rank computes its part of the sequence.

The first block cuts the sequence and the last one joins it. Within a block, what holds cut matrices gets the whole
sequence and gives back a part of the sum; norms and dropouts between work on parts.
"""

from dataclasses import dataclass, field

import torch

from headway.errors import PrepareError
from headway.strategies.tensor.plans import ModelSplit
from headway.strategies.tensor.styles import BoundaryLayout, Colwise, PartialGradients, Rowwise, SplitModule


@dataclass
class SequenceRegion:
    """Where the sequence is cut.

    Attributes:
        blocks: their names, in order.
        gathered: modules within them that get the whole sequence.
        partial: modules whose parameters see a part of it.
    """

    blocks: list[str]
    gathered: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)


def arrange(model: torch.nn.Module, cuts: ModelSplit) -> SequenceRegion:
    """Find the stack of blocks, and tell its sites what they are given.

    Raises:
        PrepareError: there is not exactly one stack, or it holds something that cannot compute so.
    """
    if cuts.foreign:
        raise PrepareError(
            "sequence_parallel=True works with styles given by name; a plan of ParallelStyle objects says itself where "
            "sequences are split (torch's SequenceParallel and PrepareModuleInput): leave the option out"
        )
    stack = SequenceRegion(_blocks(model, cuts))
    for name in stack.blocks:
        block = model.get_submodule(name)
        stack.partial.add(name)
        for child_name, child in block.named_children():
            _arrange_child(f"{name}.{child_name}", child, cuts, stack)
    return stack


def _blocks(model: torch.nn.Module, cuts: ModelSplit) -> list[str]:
    rows = [name for name, site in cuts.sites.items() if isinstance(site.style, Rowwise)]
    found: list[list[str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) == 0:
            continue
        blocks = [f"{name}.{index}" for index in range(len(module))]
        is_within = any(block.startswith(f"{outer}.") for outers in found for outer in outers for block in blocks)
        if not is_within and all(any(row.startswith(f"{block}.") for row in rows) for block in blocks):
            found.append(blocks)
    if len(found) != 1:
        raise PrepareError(
            f"sequence_parallel=True needs one ModuleList of blocks that each have a rowwise matrix, but {type(model).__name__} "
            f"has {len(found)} under this plan; leave the option out, or give torch's ParallelStyle objects"
        )
    return found[0]


def _arrange_child(name: str, child: torch.nn.Module, cuts: ModelSplit, stack: SequenceRegion) -> None:
    inside = {path: site for path, site in cuts.sites.items() if path == name or path.startswith(f"{name}.")}
    named = [path for path in cuts.parameters if path.startswith(f"{name}.")]
    if named or any(not _is_known(site) for site in inside.values()):
        odd = named or [path for path, site in inside.items() if not _is_known(site)]
        raise PrepareError(
            f"sequence_parallel=True supports the styles colwise, packed_colwise, rowwise and replicated_with_grad_allreduce within "
            f"blocks, but the plan gives {odd[0]!r} another; leave the option out"
        )
    cutting = {path: site for path, site in inside.items() if not isinstance(site.style, PartialGradients)}
    if name in cutting:
        cutting[name].crossing = BoundaryLayout.SEQUENCE
        return
    if not cutting:
        stack.partial.update(f"{name}.{path}" if path else name for path, _ in child.named_modules())
        return
    for path, module in child.named_modules():
        full = f"{name}.{path}" if path else name
        if full not in inside and any(True for _ in module.parameters(recurse=False)):
            raise PrepareError(
                f"sequence_parallel=True: {full!r} ({type(module).__name__}) stays whole among split matrices of {name!r}, where its "
                "gradient would be counted once for each rank; split it, or leave the option out"
            )
    if not any(isinstance(site.style, Rowwise) for site in cutting.values()):
        raise PrepareError(f"sequence_parallel=True: {name!r} has colwise matrices, but no rowwise matrix after them")
    stack.gathered.append(name)
    for site in cutting.values():
        site.crossing = BoundaryLayout.SEQUENCE if isinstance(site.style, Rowwise) else BoundaryLayout.GATHERED


def _is_known(site: SplitModule) -> bool:
    style = site.style
    if isinstance(style, Colwise):
        return not style.is_gathered
    return isinstance(style, PartialGradients) or (isinstance(style, Rowwise) and not style.is_split)
