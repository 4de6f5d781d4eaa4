"""Checked collectives on real ranks: results for many kinds of input, and errors on all ranks if ranks disagree."""

import collections
import os
import time
import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headway import Accelerator
from headway.core.runtime import process
from headway.core.runtime.collective_log import RecordedCollective
from headway.errors import CollectiveError, ConfigError, PrepareError
from tests.distributed.ranks import run_ranks

Pair = collections.namedtuple("Pair", "left right")

PLAIN_TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
               torch.float32, torch.float64, torch.complex64, torch.uint16, torch.uint32, torch.uint64]  # fmt: skip
NARROW_TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@dataclass
class Boxed:
    made: torch.Tensor = field(init=False, default_factory=lambda: torch.tensor([7.0]))
    held: torch.Tensor = field(default_factory=lambda: torch.zeros(1))


def make_accelerator():
    return Accelerator(cpu=True)


# -------------------------------------------------------------------- gather


def gather_many_types():
    from transformers import BatchEncoding
    from transformers.utils import ModelOutput

    acc = make_accelerator()
    rank, mine = acc.process_index, torch.arange(acc.process_index + 1) + 10 * acc.process_index
    out = {"ragged": acc.gather(mine), "scalar": acc.gather(torch.tensor(rank))}
    out["empty here"] = acc.gather(torch.ones(0 if rank == 1 else 2, 3))
    out["empty everywhere"] = acc.gather(torch.ones(0, 3))
    out["no columns"] = acc.gather(torch.ones(2, 0))
    out["transposed"] = acc.gather((torch.arange(6).reshape(2, 3) + 10 * rank).T)
    out["strided"] = acc.gather((torch.arange(6) + 10 * rank)[::2])
    out["conjugate"] = acc.gather(torch.tensor([complex(rank, 1)]).conj())
    out["expanded"] = acc.gather(torch.tensor([rank]).expand(3))
    out["narrow, strided"] = acc.gather(torch.arange(8.0).reshape(2, 4).T.to(torch.float8_e5m2)).float()
    out["wants grad"] = acc.gather(torch.ones(2, requires_grad=True) * rank)
    for dtype in PLAIN_TYPES + NARROW_TYPES:
        got = acc.gather(torch.tensor([0.0, 1.0, float(rank)]).to(dtype))
        assert got.dtype is dtype
        out[str(dtype)] = got.to(torch.float32).tolist()
    tree = {"a": [mine, (mine.float(), None)], "b": Pair(mine, None), "n": None}
    out["tree"] = acc.gather(tree)
    counted = collections.defaultdict(list, x=mine)
    counted = acc.gather(counted)
    out["defaultdict"] = (type(counted), counted.default_factory, counted["x"])
    encoded = acc.gather(BatchEncoding({"input_ids": mine}))
    out["encoding"] = (type(encoded).__name__, encoded["input_ids"], encoded.input_ids)

    given = ModelOutput(logits=mine)
    shown = acc.gather(given)
    out["output"] = (type(shown).__name__, shown["logits"], given["logits"].shape[0])
    out["dataclass"] = acc.gather(Boxed(held=mine)).held
    out["many"] = acc.gather([torch.full((rank + 1,), i) for i in range(70)])
    return out


def test_gather_joins_every_supported_type():
    ranks = run_ranks(gather_many_types, 2)
    for out in ranks:
        assert out["ragged"].tolist() == [0, 10, 11]
        assert out["scalar"].tolist() == [0, 1]
        assert out["empty here"].shape == (2, 3)
        assert out["empty everywhere"].shape == (0, 3)
        assert out["no columns"].shape == (4, 0)
        assert out["transposed"].tolist() == [[0, 3], [1, 4], [2, 5], [10, 13], [11, 14], [12, 15]]
        assert out["strided"].tolist() == [0, 2, 4, 10, 12, 14]
        assert out["conjugate"].tolist() == [-1j, 1 - 1j]
        assert out["expanded"].tolist() == [0, 0, 0, 1, 1, 1]
        assert out["narrow, strided"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
        assert out["wants grad"].tolist() == [0, 0, 1, 1]
        for dtype in PLAIN_TYPES + NARROW_TYPES:
            assert out[str(dtype)] == [0, 1, 0, 0, 1, 1], dtype
        joined = [0, 10, 11]
        tree = out["tree"]
        assert tree["a"][0].tolist() == joined
        assert tree["a"][1][0].tolist() == joined
        assert tree["a"][1][1] is None
        assert isinstance(tree["b"], Pair)
        assert tree["b"].left.tolist() == joined
        assert tree["b"].right is None
        assert tree["n"] is None
        kind, factory, values = out["defaultdict"]
        assert kind is collections.defaultdict
        assert factory is list
        assert values.tolist() == joined
        assert out["encoding"][0] == "BatchEncoding"
        assert out["encoding"][1].tolist() == out["encoding"][2].tolist() == joined
        assert out["output"][0] == "ModelOutput"
        assert out["output"][1].tolist() == joined
        assert out["dataclass"].tolist() == joined
        assert [t.tolist() for t in out["many"]] == [[i, i, i] for i in range(70)]
    assert [out["output"][2] for out in ranks] == [1, 2]  # the input is unchanged


# -------------------------------------------------------------------- reduce, pad, broadcast, objects


def reduce_pad_broadcast():
    acc = make_accelerator()
    rank = acc.process_index
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    out = {op: acc.reduce(x, op).tolist() for op in ("sum", "mean", "max", "min")}
    out["scaled"] = acc.reduce(x, "sum", scale=0.5).tolist()
    out["scaled max"] = acc.reduce(x, "max", scale=2.0).tolist()
    assert x.tolist() == [rank + 1.0, 2 * (rank + 1.0)]  # the reduction is not in place
    whole = acc.reduce(torch.tensor([1, 2]) + rank, "mean")
    out["mean of integers"] = (whole.dtype, whole.tolist())
    out["bf16"] = acc.reduce(x.bfloat16()).tolist()
    out["scalar"] = acc.reduce(torch.tensor(3.0), "sum")
    out["strided"] = acc.reduce((torch.arange(6.0).reshape(2, 3) * (rank + 1)).T).tolist()
    out["nested"] = acc.reduce({"a": x, "b": [x]}, "max")
    out["flags"] = [acc.reduce(torch.tensor([rank == 1, False]), op).tolist() for op in ("sum", "max", "min", "mean")]
    try:
        acc.reduce(x, "avg")
    except ConfigError as error:
        out["error"] = str(error)
    rows = torch.full((rank + 1, 3 - rank), rank + 1)
    out["pad 0"] = acc.pad_across_processes(rows[:, :2]).tolist()
    out["pad -1"] = acc.pad_across_processes(rows[:1], dim=-1, pad_index=-7).tolist()
    out["pad first"] = acc.pad_across_processes(rows[:, :2], pad_first=True, pad_index=9).tolist()
    out["pad tree"] = acc.pad_across_processes({"x": rows[:, :2], "y": [torch.tensor(rank), None]})
    out["pad no such dim"] = acc.pad_across_processes(rows[:, 0], dim=3).tolist()
    out["broadcast"] = acc.collectives.broadcast({"x": x, "e": torch.ones(0)})["x"].tolist()
    out["broadcast 1"] = acc.collectives.broadcast((torch.tensor([rank, 5]).to(torch.float8_e5m2),), src=1)[0].tolist()
    out["objects"] = acc.collectives.gather_objects("text" if rank else {"a": 1})
    out["object"] = acc.collectives.broadcast_object(f"from {rank}", src=1)
    out["numbers"] = acc.collectives.reduce_numbers([rank, 2**53 - 1 - rank, 0.5], "max")
    out["reduce_mean"] = float(acc.reduce_mean(torch.tensor(3.0) * (rank + 1), rank))
    out["no weight"] = float(acc.reduce_mean(1.0, 0))
    return out


def test_collectives_reduce_pad_and_broadcast_values_of_all_kinds():
    for rank, out in enumerate(run_ranks(reduce_pad_broadcast, 2)):
        assert (out["sum"], out["mean"], out["max"], out["min"]) == ([3, 6], [1.5, 3], [2, 4], [1, 2])
        assert out["scaled"] == [1.5, 3]
        assert out["scaled max"] == [4, 8]
        assert out["mean of integers"] == (torch.float32, [1.5, 2.5])
        assert out["bf16"] == [3, 6]
        assert out["scalar"].shape == ()
        assert out["scalar"] == 6
        assert out["strided"] == [[0, 9], [3, 12], [6, 15]]
        assert out["nested"]["b"][0].tolist() == [2, 4]
        assert out["flags"] == [[1, 0], [1, 0], [0, 0], [0.5, 0]]
        assert "'avg'" in out["error"]
        assert "sum, mean, max, min" in out["error"]
        assert out["pad 0"] == ([[1, 1], [0, 0]] if rank == 0 else [[2, 2], [2, 2]])
        assert out["pad -1"] == ([[1, 1, 1]] if rank == 0 else [[2, 2, -7]])
        assert out["pad first"] == ([[9, 9], [1, 1]] if rank == 0 else [[2, 2], [2, 2]])
        assert out["pad tree"]["x"].shape == (2, 2)
        assert out["pad tree"]["y"][0] == rank
        assert out["pad no such dim"] == [rank + 1] * (rank + 1)
        assert out["broadcast"] == [1, 2]
        assert out["broadcast 1"] == [1, 5]
        assert out["objects"] == [{"a": 1}, "text"]
        assert out["object"] == "from 1"
        assert out["numbers"] == [1, 2**53 - 1, 0.5]
        assert out["reduce_mean"] == 9.0
        assert out["no weight"] != out["no weight"]


class ClonePeak(TorchDispatchMode):
    """Mode that measures the peak bytes of cloned tensors that exist at the same time."""

    def __init__(self):
        super().__init__()
        self.held = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.held += out.nbytes
            self.most = max(self.most, self.held)
            weakref.finalize(out, self.drop, out.nbytes)
        return out

    def drop(self, num_bytes):
        self.held -= num_bytes


def replicate_model_of_many_types():
    """Prepare a model with other values on each rank. Return whether all ranks have rank 0's values, and peak bytes."""
    acc = Accelerator(cpu=True, microbatching="auto")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    model.register_buffer("halves", torch.full((64, 64), acc.process_index, dtype=torch.bfloat16))
    model.register_buffer("odd", torch.full((9,), acc.process_index, dtype=torch.int16))
    model.register_buffer("nothing", torch.empty(0, 3))
    model[0].weight.data = torch.randn(64, 64).t()
    model[1] = torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(acc.process_index)
    kept = [(id(tensor), tensor.stride()) for tensor in model.parameters()]
    with ClonePeak() as counted:
        acc.prepare(model)
    assert [(id(tensor), tensor.stride()) for tensor in model.parameters()] == kept
    state = {name: acc.gather(tensor.flatten()[None]) for name, tensor in model.state_dict().items()}
    are_alike = {name: bool((rows == rows[0]).all()) for name, rows in state.items()}
    try:
        acc.free_memory()
        acc.prepare(torch.nn.Linear(3, 3 + acc.process_index))
    except PrepareError as error:
        return are_alike, counted.most, str(error)


def test_model_is_replicated_in_place():
    for are_alike, most, error in run_ranks(replicate_model_of_many_types, 2):
        assert all(are_alike.values()), are_alike
        # Of 120 kB, only non-contiguous tensors are copied, one after another. gloo's thread frees the last a moment
        # later.
        assert most <= (64 * 64 + 8 * 8 * 9) * 4
        assert "ranks have built different models: weight of Linear" in error
        assert "(4, 3)" in error


def replicate_conjugates():
    """Update a model with a lazy conjugate as a buffer under several strategies, and return the buffers."""
    found = {}
    for strategy, microbatching in (("ddp", None), ("ddp", "auto"), ("fsdp", None)):
        acc = Accelerator(cpu=True, strategy=strategy, microbatching=microbatching)
        model = torch.nn.Linear(4, 4)
        model.register_buffer("phases", torch.full((2,), complex(1, 1 + acc.process_index)).conj())
        prepared, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        acc.forward_backward(torch.ones(2, 4), lambda rows: prepared(rows).mean())
        optimizer.step()
        found[strategy, microbatching] = model.phases.tolist()
        acc.free_memory()
    return found


@pytest.mark.slow
def test_lazy_conjugates_are_replicated():
    for found in run_ranks(replicate_conjugates, 2):
        assert found == {key: [1 - 1j, 1 - 1j] for key in found}


def replicate_other_memory_order():
    """Prepare models whose memory formats differ between ranks, as with `load_state_dict(assign=True)` on rank 0 only."""
    acc = Accelerator(cpu=True, microbatching="auto")
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(8, 4, 3), torch.nn.Linear(5, 7))
    if acc.process_index == 0:
        model[0].to(memory_format=torch.channels_last)
        model[2].weight.data = torch.randn(5, 7).t()
    else:
        model[1].to(memory_format=torch.channels_last)
    acc.prepare(model)
    rows = [acc.gather(tensor.detach().flatten()[None]) for tensor in model.parameters()]
    return [bool((each == each[0]).all()) for each in rows]


def test_models_with_different_memory_formats_are_replicated():
    for alike in run_ranks(replicate_other_memory_order, 2):
        assert all(alike), alike


# -------------------------------------------------------------------- disagreement


def call_differently():
    acc = make_accelerator()
    rank, last = acc.process_index, acc.num_processes - 1
    odd = rank == last
    x = torch.ones(2, 3)
    cases = {
        "operation": lambda: acc.gather(x) if odd else acc.reduce(x),
        "barrier": lambda: acc.wait_for_everyone() if odd else acc.gather(x),
        "structure": lambda: acc.gather([x] if odd else {"a": x}),
        "leaves": lambda: acc.gather([x] * (40 if odd else 2)),
        "keys": lambda: acc.gather({"a" if odd else "b": x}),
        "dtype": lambda: acc.gather(x.to(torch.float64 if odd else torch.float32)),
        "columns": lambda: acc.gather(torch.ones(2, 4 if odd else 3)),
        "ndim": lambda: acc.gather(torch.ones(2, 3, 1) if odd else x),
        "reduce shape": lambda: acc.reduce(torch.ones(3 if odd else 2)),
        "reduce op": lambda: acc.reduce(x, "max" if odd else "min"),
        "pad ndim": lambda: acc.pad_across_processes(torch.ones(2, 3, 1) if odd else x, dim=2),
        "broadcast": lambda: acc.collectives.broadcast(x if odd else x[:1]),
        "src": lambda: acc.collectives.broadcast_object(1, src=1 if odd else 0),
        "numbers": lambda: acc.collectives.gather_numbers([1.0] * (2 if odd else 3)),
        "objects": lambda: acc.collectives.gather_objects(1) if odd else acc.check_trigger(),
    }
    errors, start = {}, time.monotonic()
    for name, case in cases.items():
        try:
            case()
            errors[name] = None
        except CollectiveError as error:
            errors[name] = str(error)
    # Collectives still work after each error.
    assert acc.gather(torch.tensor([rank])).tolist() == list(range(acc.num_processes))
    return errors, time.monotonic() - start


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_get_an_error_if_calls_differ(world_size):
    for errors, seconds in run_ranks(call_differently, world_size):
        assert seconds < 60  # no rank waited for the timeout
        for name, message in errors.items():
            assert message is not None, name
            for rank in range(world_size):
                assert f"rank {rank}:" in message, name
            assert message.count("test_collectives.py:") == world_size, name


def check_one_process():
    x = torch.ones(2, 3)
    acc = make_accelerator()
    assert acc.gather(x) is x
    assert acc.gather({"a": torch.tensor(4)})["a"].tolist() == [4]
    assert acc.reduce(x, "sum", scale=2.0).tolist() == [[2, 2, 2]] * 2
    assert acc.reduce(torch.tensor([1, 3]), "mean").dtype is torch.float32
    assert acc.pad_across_processes(x, dim=1) is x
    assert acc.collectives.gather_objects("text") == ["text"]
    with pytest.raises(ConfigError, match="avg"):
        acc.reduce(x, "avg")


def test_one_process_returns_its_input():
    process.reset()
    check_one_process()


def use_gpu_only_group():
    """Call collectives with a process group for GPUs only, as `init_process_group("nccl")` creates. Uses torch's fake backend."""
    from torch.testing._internal.distributed import fake_pg

    from headway import Accelerator

    assert fake_pg
    dist.init_process_group("cuda:fake")
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    gathered = accelerator.gather(torch.full((1 + rank,), rank))
    mean = accelerator.reduce(torch.tensor([float(rank)]), "mean")
    (received,) = accelerator.collectives.broadcast(torch.tensor([rank + 5]), src=1).tolist()
    padded = accelerator.pad_across_processes(torch.ones(2 + rank)).tolist()
    words = accelerator.collectives.gather_objects(f"rank {rank}")
    word = accelerator.collectives.broadcast_object(f"rank {rank}", src=1)
    flags = torch.tensor([1.0 + rank])
    accelerator.collectives.sum_in_place([flags])
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return gathered.tolist(), mean.tolist(), received, padded, words, word, flags.tolist(), dist.is_initialized()


def test_cpu_tensors_get_a_group_beside_a_gpu_only_one():
    for rank, found in enumerate(run_ranks(use_gpu_only_group, 2)):
        assert found[:3] == ([0, 1, 1], [0.5], 6)
        assert found[3] == ([1.0, 1.0, 0.0], [1.0, 1.0, 1.0])[rank]
        assert found[4:] == (["rank 0", "rank 1"], "rank 1", [3.0], True)


def find_local_ranks():
    """Return this rank's properties in a group that the script has created without LOCAL_RANK, as after `mp.spawn`."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    dist.init_process_group("gloo")
    acc = Accelerator(cpu=True)
    return acc.local_process_index, acc.is_local_main_process, acc.runtime.local_world_size


def test_local_rank_is_found_for_a_group_of_the_script():
    assert run_ranks(find_local_ranks, 2) == [(0, True, 2), (1, False, 2)]


def sum_coalesced():
    """Sum tensors with gloo's coalesced operation. Headway does not choose it for gloo, so `can_coalesce` is stubbed."""
    from headway.core.runtime import group

    group.can_coalesce = lambda group, device: True
    acc = make_accelerator()
    found = [torch.full((size,), float(acc.process_index + size)) for size in (1, 5, 300)]
    whole = torch.full((2,), acc.process_index)
    acc.collectives.sum_in_place([*found, whole])
    acc.end_training()
    return [tensor.tolist() for tensor in found], whole.tolist()


def test_coalesced_tensors_are_summed_one_by_one():
    for found, whole in run_ranks(sum_coalesced, 2):
        assert found == [[2 * size + 1.0] * size for size in (1, 5, 300)]
        assert whole == [1, 1]


def join_exchanges_of_others():
    """On rank 1, stand in for each collective that rank 0 makes. Return what rank 0 receives."""
    acc = make_accelerator()
    collectives = acc.collectives
    if acc.process_index == 0:
        return collectives.gather_objects({"unused": ["a", "b"]}), collectives.gather_numbers([5.0, 6.0])
    collectives.join_with_neutral_values(RecordedCollective("all", "handshake", ["objects", "", 1]))
    collectives.join_with_neutral_values(RecordedCollective("all", "handshake", ["numbers", "", 2]))
    return None


def test_rank_that_left_a_batch_joins_exchanges_of_objects():
    found, _ = run_ranks(join_exchanges_of_others, 2)
    assert found == ([{"unused": ["a", "b"]}, None], [[5.0, 6.0], [0.0, 0.0]])
