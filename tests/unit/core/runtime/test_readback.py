"""Delayed reads of device values. Those of a real GPU are in tests/gpu and tests/synchronizations."""

import pytest
import torch

from headway.core.runtime.readback import Readback


class Elsewhere:
    """Number on a device without events that a vendor's package adds. No such device is available here."""

    device = torch.device("privateuseone", 0)

    def detach(self):
        return self

    def to(self, device, non_blocking=False):
        return torch.tensor(float("nan") if non_blocking else 3.0)  # what is not waited for is not there


def test_a_value_on_the_host_is_that_of_the_moment():
    value = torch.tensor(1.0, requires_grad=True)
    asked = Readback(value)
    value.data.fill_(2.0)
    assert (asked.is_ready, asked.read().item(), asked.read().requires_grad) == (True, 1.0, False)


@pytest.mark.parametrize("lacks", ["Event", "current_stream"])
def test_a_device_without_events_is_waited_for(monkeypatch, lacks):
    class Event:
        def __init__(self, device):
            if lacks == "Event":
                raise NotImplementedError("no events")

        def record(self, stream):
            pass

    def current_stream(device):
        raise RuntimeError("Backend doesn't support streams.")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    asked = Readback(Elsewhere())
    assert (asked.is_ready, asked.read().item()) == (True, 3.0)
