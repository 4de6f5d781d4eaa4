"""Sharded checkpoints of torch's own DTensors, without a strategy: loading in every other layout, memory use, and errors."""

import math
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from headway.core.checkpoint.folders import list_originals
from headway.core.checkpoint.format.chunks import ChunkGrid
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.misfits import find_misfits
from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.checkpoint.loading.restoring import restore_objects
from headway.core.checkpoint.loading.target_layout import TargetLayout
from headway.core.checkpoint.saving.job import SavePolicy
from headway.core.checkpoint.saving.saver import Saver
from headway.core.checkpoint.state import StatefulObjects, collect_state
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks

LAYOUTS = {
    4: ("fsdp", "hsdp", "tp", "fsdp+tp", "packed", "whole"),
    3: ("fsdp", "whole"),
    2: ("fsdp", "tp", "whole"),
    1: ("whole",),
}
BLOCKING = SavePolicy()


class Net(torch.nn.Module):
    """Model with uneven sizes, dims smaller than the number of ranks, a tied weight, a buffer and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 6, bias=False)
        self.norm = torch.nn.LayerNorm(6)
        self.one = torch.nn.Linear(6, 1)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.zeros(5, 2), requires_grad=False)
        self.register_buffer("count", torch.zeros(3))


def make_values(shape, salt):
    """Return a tensor of distinct values."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000.0 * salt


def shard_model(model, layout, world_size):
    """Shard a model with torch's own functions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    def cut(module, name, mesh, placement):
        cut_to = distribute_tensor(getattr(module, name).data, mesh, [placement])
        setattr(module, name, torch.nn.Parameter(cut_to, getattr(module, name).requires_grad))

    def parallel(mesh):
        cut(model.first, "weight", mesh, Shard(0))
        cut(model.first, "bias", mesh, Shard(0))
        cut(model.second, "weight", mesh, Shard(1))
        cut(model.norm, "weight", mesh, Replicate())

    if layout == "fsdp":
        fully_shard(model)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        parallel(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("shard", "tp"))
        parallel(mesh["tp"])
        fully_shard(model, mesh=mesh["shard"])
        assert isinstance(model.first.weight.placements[0], _StridedShard)
    elif layout == "packed":  # like plans for a matrix that packs a gate and an up projection: two boxes per rank
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        whole, rank = model.first.weight.data, mesh.get_rank()
        halves = [half.chunk(world_size) for half in whole.chunk(2)]
        local = torch.cat([half[rank] if rank < len(half) else half[0][:0] for half in halves])
        packed = DTensor.from_local(
            local, mesh, [_StridedShard(0, split_factor=2)], shape=whole.shape, stride=whole.stride()
        )
        model.first.weight = torch.nn.Parameter(packed)


def is_cut(tensor):
    return hasattr(tensor, "full_tensor")


def fill(tensor, expected):
    """Copy this rank's part of `expected` into a tensor, which may be sharded."""
    from headway.core.weights.dtensor_boxes import list_own_boxes

    for offsets, memory in list_own_boxes(tensor.detach()):
        memory.copy_(expected[tuple(slice(start, start + size) for start, size in zip(offsets, memory.shape))])


def get_own_part(tensor, expected):
    """Return the part of `expected` that belongs on this rank, computed with torch's placements."""
    if not is_cut(tensor):
        return expected
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = tensor.placements[0]
    if tensor.device_mesh.ndim == 1 and isinstance(placement, _StridedShard):
        world, rank = tensor.device_mesh.size(), tensor.device_mesh.get_rank()
        parts = [half.chunk(world) for half in expected.chunk(placement.split_factor)]
        return torch.cat([part[rank] if rank < len(part) else part[0][:0] for part in parts])
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [Replicate() if isinstance(each, _StridedShard) else each for each in tensor.placements]
    local = distribute_tensor(expected, tensor.device_mesh, placements, src_data_rank=None).to_local()
    for axis, each in enumerate(tensor.placements):
        if isinstance(
            each, _StridedShard
        ):  # already split along the other axis, and FSDP splits what remains on a rank
            parts = local.chunk(tensor.device_mesh.size(axis), each.dim)
            coordinate = tensor.device_mesh.get_coordinate()[axis]
            local = parts[coordinate] if coordinate < len(parts) else parts[0][:0]
    return local


def number_tensors(model):
    """Return a model's tensors with distinct numbers. Tied names share one number."""
    named = model.state_dict()
    order = {name: number for number, name in enumerate(named)} | {"head.weight": list(named).index("embedding.weight")}
    return [(order[name], tensor) for name, tensor in named.items()]


def make_parts(layout, world_size, salt):
    """Return a sharded model, its optimizer and their `StatefulObjects`. With salt 0, there is no optimizer state."""
    model = Net()
    shard_model(model, layout, world_size)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, foreach=False)
    if salt:
        for number, tensor in number_tensors(model):
            fill(tensor, make_values(tensor.shape, number + salt))
        for number, parameter in enumerate(learning):
            state = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            fill(state["exp_avg"], make_values(parameter.shape, number + salt + 100))
            fill(state["exp_avg_sq"], make_values(parameter.shape, number + salt + 200))
            optimizer.state[parameter] = {key: value.detach() for key, value in state.items()}
    registered = Average(model.first.weight.detach().clone())
    if salt:
        fill(registered.value, make_values(registered.value.shape, salt + 300))
    else:
        registered.value.zero_()
    return (
        model,
        optimizer,
        StatefulObjects([model], [optimizer], {"custom": [registered]}, lambda each: each.state_dict().items()),
    )


class Average:
    """Registered object with a tensor that is sharded like a parameter."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "name": "average"}

    def load_state_dict(self, state):
        assert is_cut(state["value"]) == is_cut(self.value)
        self.value = state["value"]


def check_restored(model, optimizer, salt):
    """Check that this rank holds its part of the saved values, sharded like its parameters."""
    for number, tensor in number_tensors(model):
        expected = get_own_part(tensor, make_values(tensor.shape, number + salt))
        assert torch.equal(tensor.to_local() if is_cut(tensor) else tensor, expected), number
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        state = optimizer.state[parameter]
        assert state["step"].item() == 3
        for key, more in (("exp_avg", 100), ("exp_avg_sq", 200)):
            assert is_cut(state[key]) == is_cut(parameter)
            expected = get_own_part(parameter, make_values(parameter.shape, number + salt + more))
            assert torch.equal(state[key].to_local() if is_cut(parameter) else state[key], expected), (number, key)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # torch must accept the loaded state


def make_saver_and_reader():
    from headway import Accelerator

    accelerator = Accelerator(cpu=True)
    given = accelerator.runtime, accelerator.strategy.everyone
    return Saver(*given), CheckpointReader(*given), accelerator.runtime.world_size


def save_all(folder):
    saver, _, world_size = make_saver_and_reader()
    for layout in LAYOUTS[world_size]:
        model, _, parts = make_parts(layout, world_size, 1)
        saver.save(Path(folder, f"{layout}-blocking"), collect_state(parts), {}, BLOCKING)
        saver.save(Path(folder, layout), collect_state(parts), {}, SavePolicy(is_blocking=False))
        with torch.no_grad():
            for parameter in model.parameters():  # the training loop changes the weights during the write
                parameter.zero_()
        saver.wait()


def load_all(folder):
    _, reader, world_size = make_saver_and_reader()
    count = 0
    for source in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        for layout in LAYOUTS[world_size]:
            model, optimizer, parts = make_parts(layout, world_size, 0)
            _, found = reader.read(source, TargetLayout(parts))
            assert find_misfits(parts, found) == []
            restore_objects(parts, found, None, lambda failure: [failure] if failure else [])
            check_restored(model, optimizer, 1)
            average = parts.others["custom"][0].value
            expected = get_own_part(model.first.weight, make_values(average.shape, 301))
            assert torch.equal(average.to_local() if is_cut(average) else average, expected)
            count += 1
    return count


@pytest.mark.slow
def test_every_layout_loads_in_every_other(tmp_path):
    run_ranks(save_all, 4, str(tmp_path))
    for layout in LAYOUTS[4]:
        blocking, behind = (read_manifest(tmp_path / name) for name in (f"{layout}-blocking", layout))
        assert blocking.tensors == behind.tensors
        assert blocking.files == behind.files  # compares hashes of the bytes
        has_grids = any(isinstance(entry.chunks, ChunkGrid) for entry in behind.tensors.values())
        assert has_grids == (layout not in ("whole", "packed")), layout
        assert behind.aliases == {"model/0/head.weight": "model/0/embedding.weight"}
    written = [0] * 4
    for entry in read_manifest(tmp_path / "hsdp").tensors.values():
        for chunk in entry.chunks:
            written[int(chunk.file[-17:-12])] += 4 * math.prod(chunk.shape)
    assert max(written) < 1.5 * min(written), written  # ranks with copies share the writing
    for world_size in (4, 3, 2, 1):
        found = run_ranks(load_all, world_size, str(tmp_path))
        assert set(found) == {12 * len(LAYOUTS[world_size])}


# -------------------------------------------------------------------- memory


class AnonymousMemoryPeak:
    """Context manager that measures the peak growth of this process's anonymous memory in bytes. Mapped files do not count."""

    def __enter__(self):
        self._is_on, self.most, self._first = True, 0, self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _now(self):
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * 4096

    def _watch(self):
        while self._is_on:
            self.most = max(self.most, self._now() - self._first)
            time.sleep(0.0005)

    def __exit__(self, *_):
        self.most = max(self.most, self._now() - self._first)
        self._is_on = False
        self._thread.join()


ROWS = 4096
MB = 2**20


def measure_peaks(folder, layouts):
    """Return the peak memory of saving and of loading two matrices of 64 MB and an optimizer state, for each layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    saver, reader, world_size = make_saver_and_reader()
    found = []
    for number, dim in enumerate(layouts):
        mesh = init_device_mesh("cpu", (world_size,))
        model = torch.nn.Module()
        whole = make_values((ROWS, ROWS), 0)
        for name in "ab":
            model.register_parameter(
                name, torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))
            )
        del whole
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter).detach()}
        parts = StatefulObjects([model], [optimizer], {}, lambda each: each.state_dict().items())
        with AnonymousMemoryPeak() as saving:
            saver.save(Path(folder, str(number)), collect_state(parts), {}, BLOCKING)
        loading = AnonymousMemoryPeak()
        if number:
            with loading:  # sharded along the other dim than the saved tensors
                _, read = reader.read(Path(folder, str(number - 1)), TargetLayout(parts))
                restore_objects(parts, read, None, lambda failure: [failure] if failure else [])
            local = model.a.to_local()
            begin = mesh.get_rank() * ROWS // world_size
            expected = begin if dim else begin * ROWS
            assert local[0, 0].item() == expected
            assert optimizer.state[model.b]["momentum_buffer"].to_local()[0, 0].item() == 1
        found.append((saving.most, loading.most if number else 0))
    return found


def test_no_rank_needs_more_memory_than_its_part_and_a_buffer(tmp_path):
    part = 2 * ROWS * ROWS * 4 // 2  # of one kind of tensors, on one of two ranks
    for rank, (first, second, third) in enumerate(run_ranks(measure_peaks, 2, str(tmp_path), (0, 1, 0))):
        for saved, loaded in (first, second, third):
            assert saved < 24 * MB, (rank, saved)
            # The new optimizer state exists beside the old one. Weights are loaded in place.
            assert loaded < part + 24 * MB, (rank, loaded)
        assert second[1] > part / 2  # shows that the measurement works


# -------------------------------------------------------------------- errors


def save_wrongly(folder, what):
    saver, _, world_size = make_saver_and_reader()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    model, _, parts = make_parts("fsdp", world_size, 1)
    if what == "alone":
        if saver._runtime.rank == 0:
            saver.save(Path(folder, "a"), collect_state(parts), {}, SavePolicy(is_alone=True))
        return
    if what == "partial":
        mesh = init_device_mesh("cpu", (world_size,))
        model.register_buffer("sums", DTensor.from_local(torch.ones(3), mesh, [Partial()]))
        saver.save(Path(folder, "a"), collect_state(parts), {}, BLOCKING)
    if what == "differing" and saver._runtime.rank == 1:
        other = init_device_mesh("cpu", (world_size,))
        model.one.bias = torch.nn.Parameter(
            DTensor.from_local(torch.ones(2), other, [Shard(0)], shape=(4,), stride=(1,))
        )
    if what == "differing":
        saver.save(Path(folder, "a"), collect_state(parts), {}, BLOCKING)
    if what == "own disks":
        saver._find_share = partial(report_own_disk, saver._runtime.rank)
        saver.save(Path(folder, "a"), collect_state(parts), {}, BLOCKING)
    return


def report_own_disk(rank, *_):
    from headway.core.checkpoint.saving.job import DiskShare

    return DiskShare(0, 1, True, is_own_disk=True)


def get_save_error(folder, what):
    try:
        save_wrongly(folder, what)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("alone", "Call save_state on every rank"),
        ("partial", "not reduced yet"),
        ("differing", "has different sharded tensors or placements than rank 0"),
        ("own disks", "storage that all machines share"),
    ],
)
def test_unsupported_saves_raise_errors(tmp_path, what, expected):
    found = run_ranks(get_save_error, 2, str(tmp_path), what)
    assert expected in found[0]
    assert what == "alone" or expected in found[1]
    assert not any(path.name == "a" for path in tmp_path.iterdir())


def load_damaged_shard(folder):
    """Load after one byte of one rank's shard has changed, and return the errors."""
    saver, reader, world_size = make_saver_and_reader()
    _, _, parts = make_parts("fsdp", world_size, 1)
    path = Path(folder, "checkpoint_1")
    saver.save(path, collect_state(parts), {}, BLOCKING)
    shard = path / "optimizer-00001.safetensors"
    saver._collectives.barrier()
    if saver._runtime.rank == 0:
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
    saver._collectives.barrier()
    messages = []
    try:
        reader.read(path, TargetLayout(parts))
    except CheckpointError as error:
        messages.append(str(error))
    newest, reasons = reader.find_first_complete(Path(folder), list_originals(Path(folder)))
    assert newest is None
    return [*messages, *reasons]


def test_all_ranks_reject_a_damaged_shard(tmp_path):
    for messages in run_ranks(load_damaged_shard, 2, str(tmp_path)):
        assert len(messages) == 2
        for message in messages:
            assert "optimizer-00001.safetensors is damaged" in message
