"""Test the device of a copy stream, with stubs for torch's current device and its class of streams.

Streams and events need an accelerator: tests/gpu/test_offload.py, and simulated in tests/unit/offload/test_back_pressure.py.
"""

import pytest
import torch

from headway.core.runtime.copy_stream import CopyStream
from headway.offload import dispatch
from headway.offload.transport import HostTransport, RingTransport, make_transport


@pytest.fixture
def second_device(monkeypatch):
    """Make the second of two CUDA devices current, and return the devices that threads are bound to."""
    bound = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", bound.append)
    monkeypatch.setattr(torch, "Stream", lambda device: device)
    return bound


def test_device_without_an_index_is_the_current_one(second_device):
    lane = CopyStream(torch.device("cuda"))
    assert lane.device == torch.device("cuda", 1)
    lane.bind_device()
    assert second_device == [torch.device("cuda", 1)]
    assert CopyStream(torch.device("cuda", 0)).device == torch.device("cuda", 0)


def test_offloading_runs_on_the_device_of_this_process(second_device):
    assert dispatch._resolve_execution_device(None) == torch.device("cuda", 1)


def test_backend_without_streams_copies_synchronously(second_device, monkeypatch, caplog):
    assert isinstance(make_transport(torch.device("cuda")), RingTransport)

    def refuse(device):
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", refuse)
    transport = make_transport(torch.device("meta"))
    assert isinstance(transport, HostTransport)
    assert "meta has no streams (Backend doesn't support create a new Stream.)" in caplog.text
    source = torch.ones(3)
    copy = transport.allocate(source)
    assert copy.is_meta
    transport.finish_copy(copy, transport.start_copy(source, copy, transport.mark_progress()))
    assert transport.traffic.num_bytes == 12
