"""Test how blocks are found, and named in messages, after `fully_shard` or Headway has replaced their classes."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway.core.strategies.blocks import extend_class, find_blocks, get_class_name, get_original_class


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_a_sharded_block_has_the_class_of_its_siblings(tmp_path):
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])})
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model["blocks"][0], mesh=init_device_mesh("cpu", (1,)))
        assert type(model["blocks"][0]) is not Block
        assert get_original_class(model["blocks"][0]) is Block
        # `fully_shard` may have changed only some blocks, as in a stage of a pipeline.
        assert find_blocks(model) == list(model["blocks"])
        assert find_blocks(model, ("Block",)) == list(model["blocks"])
    finally:
        torch.distributed.destroy_process_group()


class FirstMixin:
    pass


class SecondMixin:
    pass


def test_the_original_class_is_found_below_several_subclasses(tmp_path):
    model = Block()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        extend_class(model, FirstMixin)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        extend_class(model, SecondMixin)
    finally:
        torch.distributed.destroy_process_group()
    assert type(model).__name__ == "FSDPBlock"
    assert get_original_class(model) is Block
    assert get_class_name(model) == "Block"
