"""`find_executable_batch_size` on real processes: an out-of-memory error on any rank gives all ranks the same next size."""

import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import launch, read_reports

START, FITS = 16, 8


class FailingBackward(torch.autograd.Function):
    """Identity function whose backward pass runs out of memory if `when` is true."""

    @staticmethod
    def forward(ctx, inputs, when):
        ctx.when = when
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.when:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradient, None


def make_accelerator(timeout=60):
    from headway import Accelerator, InitProcessGroupKwargs

    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))])


def train(accelerator, batch_size, fail_at, num_updates=5):
    """Make a few updates of a model with dropout. `fail_at(place, update)` says whether this rank fails there."""

    def check(place, update=0):
        if fail_at(place, update):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    accelerator.free_memory()
    check("build")
    model = nn.Sequential(nn.Linear(3, 600), nn.Dropout(0.2), nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(600, 3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check("prepared")
    for update, (x, y) in enumerate(loader):
        check("forward", update)
        out = model(x)
        loss = nn.functional.mse_loss(FailingBackward.apply(out, fail_at("backward", update)), y)
        if fail_at("late backward", update):  # most gradients are complete at that point
            model[0].weight.register_hook(lambda gradient: check("late backward", update))
        accelerator.backward(loss)
        check("step", update)
        optimizer.step()
        optimizer.zero_grad()
        check("own", update)
        total = accelerator.reduce(loss.detach())  # a collective of the user's code
        dist.all_reduce(total)
        if update + 1 == num_updates:
            break
    check("end")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


PLACES = [("build", 0), ("prepared", 0), ("forward", 0), ("backward", 0), ("late backward", 0), ("step", 0), ("own", 0),
          ("forward", 1), ("backward", 2), ("backward", 4), ("own", 4), ("end", 0)]  # fmt: skip
VOTE_PLACES = {("forward", 0), ("backward", 0), ("late backward", 0)}
"""Places at which the other rank is in no collective, and learns of the failure from a vote."""


def fail_at_each_place(places, failing):
    """Return for each place the sizes tried, the errors seen inside the function, the final weights, and the seconds taken."""
    import headway

    accelerator = make_accelerator()
    rank = accelerator.process_index
    out = []
    for place, update in places:
        headway.set_seed(7)
        tried, seen = [], []

        @headway.find_executable_batch_size(starting_batch_size=START)
        def inner(batch_size):
            tried.append(batch_size)
            fails = batch_size > FITS and rank in failing
            try:
                return train(accelerator, batch_size, lambda p, u: fails and (p, u) == (place, update))
            except Exception as error:
                seen.append(type(error).__name__)
                raise

        began = time.monotonic()
        weights = inner()
        out.append((tried, seen, weights, time.monotonic() - began))
    headway.set_seed(7)
    plain = train(accelerator, FITS, lambda *_: False)
    accelerator.end_training()
    return out, plain


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
def test_out_of_memory_at_any_place_gives_all_ranks_the_same_size_and_weights(failing):
    places = PLACES if failing == (0,) else PLACES[3:9:2]
    ranks = run_ranks(fail_at_each_place, 2, places, failing, timeout=120)
    plain = ranks[0][1]
    assert torch.equal(plain, ranks[1][1])
    for rank, (found, _) in enumerate(ranks):
        for place, (tried, seen, weights, seconds) in zip(places, found):
            assert tried == [START, FITS], place
            assert torch.equal(weights, plain), f"{place}: differs from a run that starts with the final size"
            assert seconds < 60, f"{place}: rank {rank} waited for the timeout"
            if rank in failing:
                assert seen == ["OutOfMemoryError"], place
            elif place in VOTE_PLACES:
                assert seen == ["PeerOutOfMemory"], place


def check_other_cases():
    """Run several cases one after another in one pair of processes, and return their results by name."""
    import headway
    from headway.errors import PrepareError, StateError

    accelerator = make_accelerator()
    rank, out = accelerator.process_index, {}

    # Objects prepared outside the function belong to the old group. Headway forgets them and rejects a step with them.
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def update(model, optimizer):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()

    update(model, optimizer)

    @headway.find_executable_batch_size(starting_batch_size=2)
    def uses_outside(batch_size):
        if batch_size == 2 and rank == 1:
            raise MemoryError
        update(model, optimizer)

    try:
        uses_outside()
    except PrepareError as error:
        out["outside"] = str(error)
    accelerator.free_memory()

    # Ranks that start with different sizes get an error.
    try:
        headway.find_executable_batch_size(lambda batch_size: None, starting_batch_size=4 + rank)()
    except StateError as error:
        out["unequal"] = str(error)

    # The search must return the largest size that fits on every rank.
    sizes = []

    @headway.find_executable_batch_size(starting_batch_size=4, search="largest")
    def probe(batch_size):
        sizes.append(batch_size)
        if batch_size > 5 + rank:
            raise MemoryError
        return batch_size

    out["largest"] = probe()
    out["sizes"] = sizes
    accelerator.end_training()
    return out


def test_search_refuses_outside_objects_and_unequal_sizes_and_finds_the_largest():
    first, second = run_ranks(check_other_cases, 2, timeout=120)
    for out in (first, second):
        assert "belong to no prepared model" in out["outside"]
        assert "batch sizes from 4 to 5" in out["unequal"]
        assert out["largest"] == 5
        assert out["sizes"] == [4, 5, 10, 7, 6, 5]


ROW = 3 * 2**20


def fail_to_allocate():
    """Cause real allocation failures on rank 1 only, by limiting its address space."""
    import psutil

    import headway

    accelerator = make_accelerator()
    process, tried = psutil.Process(), []

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, rows):
            for _ in range(3):
                rows = torch.tanh(rows * self.scale)
            return rows.mean()

    @headway.find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda size: size // 8)
    def inner(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(model(torch.ones(batch_size, ROW)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.process_index == 0 and batch_size > 2:
            return dist.all_reduce(torch.ones(1))
        return batch_size

    if accelerator.process_index == 1:
        limit = process.memory_info().vms + 1100 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    inner()
    accelerator.end_training()
    return tried


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs RLIMIT_AS")
def test_allocation_failure_of_one_rank_shrinks_the_batch_of_all():
    assert run_ranks(fail_to_allocate, 2) == [[16, 2], [16, 2]]


def fail_twenty_one_times():
    import psutil

    import headway

    accelerator = make_accelerator()
    process, held = psutil.Process(), []

    @headway.find_executable_batch_size(starting_batch_size=22, reduce_batch_size_fn=lambda size: size - 1)
    def inner(batch_size):
        held.append((process.memory_info().rss >> 20, process.num_fds(), process.num_threads()))
        if batch_size == 1:
            return
        model = nn.Linear(2000, 2000)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(500, 2000)).sum())
        optimizer.step()
        activations = torch.ones(50 * 2**20, dtype=torch.uint8) + 0
        if accelerator.process_index == 1:
            raise MemoryError
        dist.all_reduce(activations[:1])

    inner()
    accelerator.end_training()
    return held


@pytest.mark.slow
def test_memory_files_and_threads_do_not_grow_over_twenty_one_failures():
    for held in run_ranks(fail_twenty_one_times, 2, timeout=240):
        assert len(held) == 22
        memory, files, threads = zip(*held)
        assert max(memory[3:]) - memory[2] < 40, f"{memory} MiB; each attempt held over 100"
        assert max(files[11:]) <= max(files[:11]), files  # the first attempts open files that stay open
        assert max(threads[11:]) <= max(threads[:11]), threads


HELD_GROUP = """
import json, time
from datetime import timedelta
import torch, torch.distributed as dist
import headway
from headway import Accelerator, InitProcessGroupKwargs

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
tried, groups = [], []

@headway.find_executable_batch_size(starting_batch_size=4)
def inner(batch_size):
    tried.append(batch_size)
    groups.append(dist.group.WORLD)  # its connections stay open while the script holds it
    if batch_size == 4 and accelerator.process_index == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    total = torch.ones(1)
    began = time.monotonic()
    try:
        dist.all_reduce(total)
    finally:
        if batch_size == 4:
            groups.append(time.monotonic() - began)
            time.sleep(3)  # rank 1 has now waited longer than the timeout for a rank that is in no collective
    time.sleep(6)  # the remains of the old group must not look like a hang
    dist.all_reduce(total)
    return total.item()

print(json.dumps({"rank": accelerator.process_index, "result": inner(), "tried": tried,
                  "waited": [each for each in groups if isinstance(each, float)], "is_new": groups[0] is not groups[-1]}))
accelerator.end_training()
"""


@pytest.mark.slow
def test_timeout_ends_the_wait_in_a_group_that_the_script_keeps(tmp_path):
    ran = launch(tmp_path, HELD_GROUP, "--cpu", "-n", "2")
    assert ran.returncode == 0, ran.stderr
    ranks = read_reports(ran)
    assert [(each["tried"], each["result"], each["is_new"]) for each in ranks] == [([4, 2], 4.0, True)] * 2
    assert ranks[0]["waited"][0] > 3.5, "rank 1's connections closed early, so the timeout was not tested"
    assert ranks[1]["waited"] == []


class Arguments:
    batch_size = 64


def run_documented_example():
    """Run the example of Accelerate's documentation with only its import changed. Rank 1 cannot hold more than 16 samples."""
    from headway import Accelerator, find_executable_batch_size, set_seed

    num_epochs, used = 2, []

    def get_model():
        return nn.Linear(3, 1)

    def get_optimizer():
        return torch.optim.SGD(model_in_use[-1].parameters(), lr=0.1)

    def get_dataloaders(accelerator, batch_size):
        inputs = torch.randn(64, 3)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DataLoader(dataset, batch_size=batch_size, shuffle=True), DataLoader(dataset, batch_size=batch_size)

    def get_scheduler(optimizer, num_training_steps):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_training_steps)

    def train(model, optimizer, train_dataloader, lr_scheduler):
        for inputs, targets in train_dataloader:
            if len(inputs) > 16 and accelerator_in_use[-1].process_index == accelerator_in_use[-1].num_processes - 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator_in_use[-1].backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    def validate(model, eval_dataloader):
        seen = [len(accelerator_in_use[-1].gather_for_metrics(inputs)) for inputs, _ in eval_dataloader]
        used.append((eval_dataloader.total_batch_size, sum(seen), model.weight.detach().clone()))

    model_in_use, accelerator_in_use = [], []
    make = get_model

    def get_model():
        model_in_use.append(make())
        return model_in_use[-1]

    class Accelerator(Accelerator):
        def __init__(self):
            super().__init__()
            accelerator_in_use.append(self)

    # fmt: off
    def training_function(args):
        accelerator = Accelerator()

        @find_executable_batch_size(starting_batch_size=args.batch_size)
        def inner_training_loop(batch_size):
            nonlocal accelerator # Ensure they can be used in our context
            accelerator.free_memory() # Free all lingering references
            model = get_model()
            model.to(accelerator.device)
            optimizer = get_optimizer()
            train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
            lr_scheduler = get_scheduler(
                optimizer,
                num_training_steps=len(train_dataloader)*num_epochs
            )
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
                model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
            )
            train(model, optimizer, train_dataloader, lr_scheduler)
            validate(model, eval_dataloader)
        inner_training_loop()
    # fmt: on

    set_seed(1)
    training_function(Arguments())
    accelerator_in_use[-1].end_training()
    return used


@pytest.mark.parametrize("num_processes", [1, 2])
def test_documented_example_of_accelerate_trains_all_ranks_alike(num_processes):
    ranks = run_ranks(run_documented_example, num_processes)
    for ((total_batch_size, num_seen, weights),) in ranks:
        assert total_batch_size == 16 * num_processes
        assert num_seen == 64
        assert torch.equal(weights, ranks[0][0][2])


def fail_on_simulated_gpu(place, failing=1):
    """Fail with gloo in place of NCCL, and a simulated kernel that waits until this rank aborts the group, as NCCL's does."""
    import threading

    from torch._C._distributed_c10d import ProcessGroupGloo

    import headway
    from headway import Accelerator, InitProcessGroupKwargs
    from headway.core.runtime import group

    dist.Backend.register_backend(
        "card", lambda store, rank, size, timeout: ProcessGroupGloo(store, rank, size, timeout), devices=["cuda"]
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:card")])
    rank, aborted, tried, freed = accelerator.process_index, [], [], threading.Event()
    abort = group.abort_groups

    def record_abort():
        if dist.is_initialized():
            aborted.append((time.monotonic(), threading.current_thread() is threading.main_thread()))
        abort()
        freed.set()

    group.abort_groups = record_abort

    @headway.find_executable_batch_size(starting_batch_size=START)
    def inner(batch_size):
        tried.append(batch_size)
        accelerator.wait_for_everyone()
        if batch_size > FITS and rank == failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if batch_size > FITS and place == "kernel":
            if not freed.wait(90):
                raise AssertionError("the group of the rank that waits in a kernel was not aborted")
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        return accelerator.gather(torch.ones(1) * batch_size)

    began = time.monotonic()
    total = inner()
    accelerator.end_training()
    return tried, total.tolist(), aborted, time.monotonic() - began


@pytest.mark.parametrize(
    ("place", "failing"), [("kernel", 1), pytest.param("kernel", 0, marks=pytest.mark.matrix), ("handshake", 1)]
)
def test_all_ranks_abort_at_once_on_a_gpu(place, failing):
    """Without a launcher, ranks other than 0 connect to the control plane only when they first need it."""
    ranks = run_ranks(fail_on_simulated_gpu, 2, place, failing, timeout=150)
    for tried, total, aborted, seconds in ranks:
        assert (tried, total) == ([START, FITS], [FITS, FITS])
        assert [is_main for _, is_main in aborted] == [False]
        assert seconds < 60
    assert abs(ranks[0][2][0][0] - ranks[1][2][0][0]) < 2


def test_rank_aborts_on_a_gpu_under_the_launcher(tmp_path):
    """Under the launcher, the ranks have not connected to the control plane before the failure."""
    body = (
        f"import sys\nsys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests.distributed.test_batch_size import fail_on_simulated_gpu\n"
        "tried, _, aborted, seconds = fail_on_simulated_gpu('kernel')\n"
        "print('tried', tried, [is_main for _, is_main in aborted], seconds < 60, flush=True)\n"
    )
    ran = launch(tmp_path, body, "-n", "2", "--cpu")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(f"tried {[START, FITS]} [False] True") == 2, ran.stdout


def search_with_settings_of_the_rank(search):
    """Search with sizes or a limit that depend on the rank. Return the sizes that were tried, and the final size."""
    from headway import find_executable_batch_size

    accelerator = make_accelerator()
    rank = accelerator.process_index
    if search == "first":
        smaller = iter([[96, 48, 24], [64, 32, 16]][rank])
        settings, limit = {"starting_batch_size": 128, "reduce_batch_size_fn": smaller.__next__}, 64
    else:
        settings, limit = {"starting_batch_size": 16, "search": search, "max_batch_size": [100, 60][rank]}, 40
    tried = []

    @find_executable_batch_size(**settings)
    def run(batch_size):
        tried.append(batch_size)
        train(accelerator, batch_size, lambda *_: batch_size > limit, num_updates=1)
        return batch_size

    return tried, run()


@pytest.mark.parametrize(("search", "expected"), [("first", 64), ("largest", 40)])
def test_ranks_that_choose_different_sizes_try_the_smallest_one(search, expected):
    results = run_ranks(search_with_settings_of_the_rank, 2, search, timeout=120)
    assert results[0] == results[1]
    assert results[0][1] == results[0][0][-1] == expected
