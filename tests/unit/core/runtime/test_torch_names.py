"""Test that the methods of torch's groups and agents that `headway.core.runtime` and `headway.launch` use exist."""

import pytest
import torch.distributed as dist

from headway.core.runtime import _torch
from headway.launch.agent import _torch as agent_torch


@pytest.mark.parametrize("name", _torch.GROUP_METHODS)
def test_process_group_has_the_method(name):
    assert hasattr(dist.ProcessGroup, name)


@pytest.mark.parametrize("name", _torch.BACKEND_METHODS)
def test_backend_has_the_method(name):
    assert hasattr(dist.distributed_c10d.Backend, name) or hasattr(dist.ProcessGroupGloo, name)


@pytest.mark.parametrize("name", agent_torch.OVERRIDDEN)
def test_elastic_agent_has_the_method_that_headway_overrides_or_calls(name):
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    assert hasattr(LocalElasticAgent, name)
