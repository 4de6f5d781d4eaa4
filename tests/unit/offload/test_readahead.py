"""Reading ahead: the learned order, and pages that are read and released in time."""

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


def ahead(order, num, after=()):
    return list(islice(order.predict_next(after), num))


def test_before_anything_was_seen_the_order_of_registration_is_the_guess():
    order = ReadOrder(4)
    assert ahead(order, 3) == []
    order.note_use(1)
    assert ahead(order, 4) == [2, 3, 0, 1]
    assert ahead(order, 2, [2]) == [3, 0]


def test_loops_skips_and_second_uses():
    order = ReadOrder(5)
    steps = [0, 3, 1, 3, 4]  # 3 is used twice, 2 never
    for unit in steps * 2:
        order.note_use(unit)
    assert ahead(order, 10) == steps * 2
    order.note_use(0)
    order.note_use(3)
    assert ahead(order, 3) == [1, 3, 4]
    assert ahead(order, 2, [1]) == [3, 4]
    assert ahead(order, 2, [1, 3]) == [4, 0]


def test_an_encoder_and_then_a_decoding_loop():
    order = ReadOrder(4)
    for unit in [0, 1, *[2, 3] * 5]:
        order.note_use(unit)
    assert ahead(order, 4) == [2, 3, 2, 3]
    for unit in [0, 1]:
        order.note_use(unit)
    # What came last after (2, 3) was a new prompt.
    assert ahead(order, 4) == [2, 3, 0, 1]


def test_one_unit():
    order = ReadOrder(1)
    order.note_use(0)
    assert ahead(order, 2) == [0, 0]


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="page residency is Linux's")

WIDTH = 512  # a layer is 1 MiB: 256 pages
NUM_LAYERS = 8


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


@pytest.fixture
def placed(tmp_path):
    return place(tmp_path)


def place(tmp_path):
    torch.manual_seed(0)
    whole = build()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = build()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"})
    return whole, model, tmp_path / "model.safetensors"


def drop(model, file):
    """Drop the file from the page cache. Return whether the file system supports it."""
    for parameter in model.parameters():
        release_pages(parameter)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shares = [measure_resident_share(parameter) for parameter in model.parameters()]
    if any(share is None or share > 0.1 for share in shares):
        pytest.skip("this file system keeps pages that are not wanted (tmpfs does)")


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_pages(placed):
    _, model, file = placed
    drop(model, file)
    weight = model[3].weight
    assert not is_resident(weight)
    read_pages(weight)
    assert is_resident(weight)
    wanted = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = 7.0  # this page is no longer the file's
    release_pages(weight)
    assert weight[0, 0] == 7.0
    assert torch.equal(weight[1:], wanted[1:])
    assert is_resident(torch.empty(0))


def test_a_cold_forward_gives_the_same_and_reads_ahead(placed):
    whole, model, file = placed
    inputs = torch.randn(2, WIDTH)
    for _ in range(2):
        drop(model, file)
        with torch.no_grad():
            assert torch.equal(model(inputs), whole(inputs))
    stream = model.headway_execution.stream
    # The kernel reads on by itself as well, so that not all of it is counted for so small a model.
    assert stream.traffic.num_bytes > 0
    drop(model, file)
    stream.enter_unit(0)
    # All of the model is within the window: the reader fetches what was not asked for yet.
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
        drop(model, file)
        before = anonymous()
        model(inputs)
    assert anonymous() - before < NUM_LAYERS / 2 * 4 * WIDTH * WIDTH  # half of the model


def test_beyond_the_budget_the_first_stay_and_the_others_go_back(placed):
    whole, model, file = placed
    one = WIDTH * WIDTH * 4
    old = model.headway_execution.stream
    stream = ReadAhead(old._units, window=one, budget=4 * one)
    drop(model, file)
    deadline = time.monotonic() + 60
    # Giving back is advice, which a kernel may pass over now and then; each pass over the units gives it again.
    for number in itertools.count():
        for unit in range(NUM_LAYERS):
            stream.enter_unit(unit)
            model[unit].weight.sum()
        time.sleep(0.05)
        if number >= 2 and sum(measure_resident_share(p) for p in model.parameters()) <= 5:
            break
        if time.monotonic() > deadline:
            drop(model, file)  # skips where nothing of this file ever goes
            pytest.fail("what was used is still in memory")
    assert measure_resident_share(model[0].weight) == 1.0
    assert measure_resident_share(model[1].weight) == 1.0
    inputs = torch.randn(2, WIDTH)
    assert torch.equal(model(inputs), whole(inputs))


def test_the_reader_ends_with_its_model(tmp_path):
    _, model, file = place(tmp_path)
    drop(model, file)
    threads = {thread for thread in threading.enumerate() if thread.name == "headway-read-ahead"}
    model(torch.randn(1, WIDTH))
    stream = model.headway_execution.stream
    reader = stream._thread
    assert reader not in threads
    changed = stream._changed
    del model, stream, _
    deadline = time.monotonic() + 60
    while reader.is_alive() and time.monotonic() < deadline:
        gc.collect()  # again where the reader was at work and held the stream
        with changed:
            changed.notify_all()
        reader.join(timeout=0.5)
    assert not reader.is_alive()


def test_a_forked_child_reads_with_a_thread_of_its_own(placed):
    _, model, file = placed
    inputs = torch.randn(1, WIDTH)
    with torch.no_grad():
        model(inputs)
    drop(model, file)
    child = os.fork()
    if child == 0:
        model.headway_execution.stream.enter_unit(0)
        os._exit(0 if model.headway_execution.stream._process == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_changed_weights_stay_changed_when_placed_again(placed):
    _, model, _ = placed
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    dispatch_model(model, {"": "cpu"})
    assert bool((model[0].weight == 1.0).all())
    assert offload_pace(model) is None
