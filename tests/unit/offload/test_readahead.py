"""Test reading ahead: the learned order, and pages that are read and released in time."""

import gc
import itertools
import os
import threading
import time
from itertools import islice

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch, offload_pace
from headway.offload.readahead import (
    ReadAhead,
    ReadOrder,
    is_resident,
    measure_resident_share,
    read_pages,
    release_pages,
)


def predict(order, num, after=()):
    return list(islice(order.predict_next(after), num))


def test_order_of_registration_is_the_first_guess():
    order = ReadOrder(4)
    assert predict(order, 3) == []
    order.record_use(1)
    assert predict(order, 4) == [2, 3, 0, 1]
    assert predict(order, 2, [2]) == [3, 0]


def test_loops_skipped_units_and_second_uses():
    order = ReadOrder(5)
    steps = [0, 3, 1, 3, 4]  # 3 is used twice, and 2 never
    for unit in steps * 2:
        order.record_use(unit)
    assert predict(order, 10) == steps * 2
    order.record_use(0)
    order.record_use(3)
    assert predict(order, 3) == [1, 3, 4]
    assert predict(order, 2, [1]) == [3, 4]
    assert predict(order, 2, [1, 3]) == [4, 0]


def test_prediction_follows_the_decoding_loop_and_then_the_next_prompt():
    order = ReadOrder(4)
    for unit in [0, 1, *[2, 3] * 5]:
        order.record_use(unit)
    assert predict(order, 4) == [2, 3, 2, 3]
    for unit in [0, 1]:
        order.record_use(unit)
    # A new prompt followed the last (2, 3).
    assert predict(order, 4) == [2, 3, 0, 1]


def test_prediction_repeats_a_single_unit():
    order = ReadOrder(1)
    order.record_use(0)
    assert predict(order, 2) == [0, 0]


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="page residency is Linux's")

WIDTH = 512  # a layer is 1 MiB: 256 pages
NUM_LAYERS = 8


def build_layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


@pytest.fixture
def placed(tmp_path):
    """Whole model, model on disk, and its file."""
    return dispatch_to_disk(tmp_path)


def dispatch_to_disk(tmp_path):
    torch.manual_seed(0)
    whole = build_layers()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = build_layers()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"})
    return whole, model, tmp_path / "model.safetensors"


def drop_pages(model, file):
    """Remove the file from the page cache. Skip the test if the file system does not support it."""
    for parameter in model.parameters():
        release_pages(parameter)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shares = [measure_resident_share(parameter) for parameter in model.parameters()]
    if any(share is None or share > 0.1 for share in shares):
        pytest.skip("this file system keeps pages that are not wanted (tmpfs does)")


def measure_anonymous_memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_pages_are_read_and_released(placed):
    _, model, file = placed
    drop_pages(model, file)
    weight = model[3].weight
    assert not is_resident(weight)
    read_pages(weight)
    assert is_resident(weight)
    expected = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = 7.0  # this page no longer belongs to the file
    release_pages(weight)
    assert weight[0, 0] == 7.0
    assert torch.equal(weight[1:], expected[1:])
    assert is_resident(torch.empty(0))


def test_cold_forward_is_equal_and_reads_ahead(placed):
    whole, model, file = placed
    inputs = torch.randn(2, WIDTH)
    for _ in range(2):
        drop_pages(model, file)
        with torch.no_grad():
            assert torch.equal(model(inputs), whole(inputs))
    stream = model.headway_execution.stream
    # The kernel also reads ahead, so not all bytes of such a small model are counted.
    assert stream.traffic.num_bytes > 0
    drop_pages(model, file)
    stream.enter_unit(0)
    # The whole model is within the window, so the reader fetches the other units, too.
    deadline = time.monotonic() + 60
    while not all(is_resident(parameter) for parameter in model.parameters()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "forwards/s" in offload_pace(model).words()


def test_nothing_is_copied(placed):
    _, model, file = placed
    inputs = torch.randn(2, WIDTH)
    with torch.no_grad():
        model(inputs)
        drop_pages(model, file)
        before = measure_anonymous_memory()
        model(inputs)
    assert measure_anonymous_memory() - before < NUM_LAYERS / 2 * 4 * WIDTH * WIDTH  # less than half of the model


def test_first_units_stay_and_others_are_released_beyond_the_budget(placed):
    whole, model, file = placed
    one = WIDTH * WIDTH * 4
    old = model.headway_execution.stream
    stream = ReadAhead(old._units, window=one, budget=4 * one)
    drop_pages(model, file)
    deadline = time.monotonic() + 60
    # Releasing is advice that a kernel may ignore. Each pass over the units repeats it.
    for number in itertools.count():
        for unit in range(NUM_LAYERS):
            stream.enter_unit(unit)
            model[unit].weight.sum()
        time.sleep(0.05)
        if number >= 2 and sum(measure_resident_share(p) for p in model.parameters()) <= 5:
            break
        if time.monotonic() > deadline:
            drop_pages(model, file)  # skips the test if pages of this file are never released
            pytest.fail("used pages are still in memory")
    assert measure_resident_share(model[0].weight) == 1.0
    assert measure_resident_share(model[1].weight) == 1.0
    inputs = torch.randn(2, WIDTH)
    assert torch.equal(model(inputs), whole(inputs))


def test_reader_ends_with_its_model(tmp_path):
    _, model, file = dispatch_to_disk(tmp_path)
    drop_pages(model, file)
    threads = {thread for thread in threading.enumerate() if thread.name == "headway-read-ahead"}
    model(torch.randn(1, WIDTH))
    stream = model.headway_execution.stream
    reader = stream._thread
    assert reader not in threads
    changed = stream._changed
    del model, stream, _
    deadline = time.monotonic() + 60
    while reader.is_alive() and time.monotonic() < deadline:
        gc.collect()  # repeated because a working reader holds the stream
        with changed:
            changed.notify_all()
        reader.join(timeout=0.5)
    assert not reader.is_alive()


def test_forked_child_reads_with_its_own_thread(placed):
    _, model, file = placed
    inputs = torch.randn(1, WIDTH)
    with torch.no_grad():
        model(inputs)
    drop_pages(model, file)
    child = os.fork()
    if child == 0:
        model.headway_execution.stream.enter_unit(0)
        os._exit(0 if model.headway_execution.stream._process_id == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_changed_weights_stay_changed_when_dispatched_again(placed):
    _, model, _ = placed
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    dispatch_model(model, {"": "cpu"})
    assert bool((model[0].weight == 1.0).all())
    assert offload_pace(model) is None
