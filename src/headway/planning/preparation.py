"""A model without memory, spread over ranks as a run would spread it."""

import torch
from torch import nn

from headway.config.mesh import Layout
from headway.errors import UnsupportedError
from headway.planning.pretence import OneOfEach
from headway.recompute.checkpointing import find_blocks


def spread(model: nn.Module, layout: Layout, precision: str) -> None:
    """Shard the model in place, on the process group that there is, as `prepare` does.

    Args:
        model: on the meta device, or with values.
        layout: of all ranks of the group.
        precision: "no", "bf16" or "fp16".

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if layout.is_replicas_only:
        return
    if layout.sizes.keys() - {"replicate", "shard"}:
        raise UnsupportedError(f"the layout {layout} is not there yet")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = [name for name in ("replicate", "shard") if name == "shard" or layout.replicate > 1]
    mesh = init_device_mesh("cpu", tuple(getattr(layout, name) for name in names), mesh_dim_names=tuple(names))
    policy = MixedPrecisionPolicy()
    if precision != "no":
        policy = MixedPrecisionPolicy({"bf16": torch.bfloat16, "fp16": torch.float16}[precision], torch.float32)
    with OneOfEach():
        for block in find_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
