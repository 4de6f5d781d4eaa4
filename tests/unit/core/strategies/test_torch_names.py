"""Test that the attributes of torch's objects that `headway.core.strategies` reads exist."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from headway.core.strategies import _torch


def test_fully_shard_keeps_its_records_under_the_known_names():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2))
        (group,) = _torch.list_param_groups(model._get_fsdp_state())
        assert [name for name in _torch.GROUP_ATTRIBUTES if not hasattr(group, name)] == []
        for record in group.fsdp_params:
            assert [name for name in _torch.PARAMETER_ATTRIBUTES if not hasattr(record, name)] == []
    finally:
        dist.destroy_process_group()
