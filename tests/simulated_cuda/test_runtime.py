"""The simulated runtime: streams that lag behind the host, waits for streams and events, and counts of copies and waits."""

import threading

import pytest
import torch

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

LONG = 6 * 10**8  # cycles: 0.3 s


def count_new_calls(before: dict[str, int]) -> dict[str, int]:
    now = simulated_cuda.counts()
    return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}


def test_event_is_reached_after_earlier_work() -> None:
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_stream_waits_only_for_the_stream_it_was_told_to() -> None:
    one, other, free = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(LONG)
    other.wait_stream(one)
    assert not other.query()
    assert free.query()
    other.synchronize()
    assert one.query()


def test_operations_run_in_stream_order() -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda._sleep(LONG)
    x.add_(1)
    x.mul_(3)
    early = torch.empty(4).copy_(x, non_blocking=False)
    assert early.tolist() == [3.0] * 4


def test_unsynchronized_streams_race() -> None:
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    x.add_(1)
    with torch.cuda.stream(side):
        seen = x.clone()
    side.synchronize()
    assert seen.tolist() == [0.0] * 4
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4


def test_pageable_memory_is_read_at_once_and_pinned_memory_in_stream_order() -> None:
    pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
    torch.cuda._sleep(LONG)
    of_pageable, of_pinned = (source.to("cuda", non_blocking=True) for source in (pageable, pinned))
    pageable.fill_(2)
    pinned.fill_(2)
    assert of_pageable.tolist() == [1.0] * 4
    assert of_pinned.tolist() == [2.0] * 4


def test_copies_and_waits_are_counted_by_kind() -> None:
    device, pinned = torch.ones(1024, device="cuda"), torch.ones(1024).pin_memory()
    before = simulated_cuda.counts()
    pinned.to("cuda", non_blocking=True)
    torch.ones(1024).to("cuda")
    device.cpu()
    found = count_new_calls(before)
    assert {name: number for name, number in found.items() if name.startswith("copy")} == {
        "copy: pinned host to device": 1, "copy: pageable host to device": 1, "copy: device to pageable host": 1,
    }  # fmt: skip
    assert found["bytes: device to pageable host"] == 4096
    assert found["cudaStreamSynchronize"] == 2


def test_pinned_bytes_are_counted() -> None:
    before = simulated_cuda.pinned_bytes()
    held = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)
    assert simulated_cuda.pinned_bytes() - before >= held.nbytes


def test_each_thread_has_its_own_current_stream() -> None:
    found = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append((torch.arange(4.0, device="cuda") * 2).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[0.0, 2.0, 4.0, 6.0]]


def test_a_captured_graph_is_replayed() -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    assert x.tolist() == [0.0] * 4
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3.0] * 4
