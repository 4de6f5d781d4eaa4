"""Test delayed reads of device values. tests/gpu and tests/synchronizations test those of a real GPU."""

import pytest
import torch

from headway.core.runtime.readback import Readback


class DeviceNumber:
    """Number on a device without events, such as one that a vendor's package adds. No such device is available here."""

    device = torch.device("privateuseone", 0)

    def detach(self):
        return self

    def to(self, device, non_blocking=False):
        return torch.tensor(float("nan") if non_blocking else 3.0)  # a copy without waiting has no value yet


def test_value_on_the_host_is_copied_at_once():
    value = torch.tensor(1.0, requires_grad=True)
    asked = Readback(value)
    value.data.fill_(2.0)
    assert (asked.is_ready, asked.read().item(), asked.read().requires_grad) == (True, 1.0, False)


@pytest.mark.parametrize("lacks", ["Event", "current_stream"])
def test_device_without_events_is_waited_for(monkeypatch, lacks):
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
    asked = Readback(DeviceNumber())
    assert (asked.is_ready, asked.read().item()) == (True, 3.0)
