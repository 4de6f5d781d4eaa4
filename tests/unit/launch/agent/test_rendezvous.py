"""Test the rendezvous handlers of the launcher's agent."""

import pytest

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime.network import find_free_port
from headway.errors import LaunchError
from headway.launch.agent.rendezvous import create_handler_for
from headway.launch.order import AgentOrder, Program


@pytest.mark.parametrize("conf", [{"backend": "x"}, {"join_timeout": "soon"}, {"last_call_timeout": "-1"}])
def test_options_that_torch_refuses_are_named(conf):
    endpoint = f"127.0.0.1:{find_free_port()}"
    order = AgentOrder(Program("train.py"), 1, 2, backend="c10d", endpoint=endpoint, conf=conf)
    (name, value), *_ = conf.items()
    with pytest.raises(LaunchError, match=f"--rdzv_conf {name}={value} is refused by torch's rendezvous"):
        create_handler_for(order, print, Seal(b"", UnsealedCounter(print)))
