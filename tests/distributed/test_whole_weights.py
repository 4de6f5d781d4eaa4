"""Whole weights of sharded models are gathered to rank 0 one tensor at a time; failures are errors on all ranks."""

from pathlib import Path

import pytest
import torch

from headway.core.training.gathered_tensors import GatheredTensor, gather_and_save, gather_state_dict
from headway.core.weights.files import open_checkpoint
from headway.errors import HeadwayError
from headway.layouts.deepspeed.zero_state import make_piece
from tests.distributed.ranks import run_ranks
from tests.distributed.test_boxes import (
    MB,
    ROWS,
    AnonymousMemoryPeak,
    make_parts,
    make_saver_and_reader,
    make_values,
    number_tensors,
)


def make_collectives():
    saver, _, world_size = make_saver_and_reader()
    return saver._collectives, world_size


def save_whole_weights(folder):
    collectives, world_size = make_collectives()
    for layout in ("fsdp", "hsdp", "tp", "fsdp+tp", "packed"):
        model, _, _ = make_parts(layout, world_size, 1)
        for number, tensor in number_tensors(model):  # tensors that the strategy does not shard must be equal
            assert tensor.shape, number
        gather_and_save(model.state_dict().items(), Path(folder, layout), "300B", collectives)
        found = gather_state_dict(model.state_dict().items(), collectives)
        if collectives.rank:
            assert found == {}
            continue
        assert list(found) == list(model.state_dict())
        for (number, tensor), whole in zip(number_tensors(model), found.values()):
            assert type(whole) is torch.Tensor
            assert torch.equal(whole, make_values(tensor.shape, number + 1)), (layout, number)
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    return [(number, tuple(tensor.shape)) for number, tensor in number_tensors(model)], list(model.state_dict())


def test_whole_weights_of_every_layout_are_saved_and_gathered(tmp_path):
    numbers, names = run_ranks(save_whole_weights, 4, str(tmp_path))[0]
    for layout in ("fsdp", "hsdp", "tp", "fsdp+tp", "packed"):
        folder = tmp_path / layout
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
        found = open_checkpoint(folder)
        for (number, shape), name in zip(numbers, names):
            tensor = found.tensors[found.ties.get(name, name)].tensor()
            assert torch.equal(tensor, make_values(shape, number + 1)), (layout, name)
        assert found.ties == {"head.weight": "embedding.weight"}


def raise_memory_error(self):
    raise MemoryError("no more of it")


def collect_errors(folder):
    collectives, world_size = make_collectives()
    model, _, _ = make_parts("fsdp", world_size, 1)
    path = Path(folder, "taken")
    if collectives.rank == 0:
        path.write_text("a file")
    collectives.barrier()
    messages = []
    for tensors in (model.state_dict(), {**model.state_dict(), "complex": torch.ones(1, dtype=torch.complex128)}):
        try:
            gather_and_save(tensors.items(), path if len(messages) == 0 else Path(folder, "new"), "300B", collectives)
        except HeadwayError as error:
            messages.append(str(error))
    gather_and_save(
        model.state_dict().items(), Path(folder, "good"), "300B", collectives
    )  # the ranks are still in step
    if collectives.rank:
        model.register_buffer("more", torch.ones(1))
    own = {"one": model.first.weight} if collectives.rank else {"other": model.first.weight}
    try:
        gather_state_dict(own.items(), collectives)
    except HeadwayError as error:
        messages.append(str(error))
    part = make_piece((4,), torch.ones(1), collectives.rank, True)
    try:
        gather_state_dict([("half", part)], collectives)  # no rank has the last two values
    except HeadwayError as error:
        messages.append(str(error))
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank == 0:
            patch.setattr(GatheredTensor, "assemble", raise_memory_error)
        try:
            gather_state_dict(model.state_dict().items(), collectives)
        except (HeadwayError, MemoryError) as error:
            messages.append(str(error))
    found = gather_state_dict([("weight", model.first.weight), ("first._extra_state", {"count": 3})], collectives)
    assert found.get("first._extra_state") == (None if collectives.rank else {"count": 3})
    return messages


def test_failure_on_rank_0_is_an_error_on_every_rank(tmp_path):
    for messages in run_ranks(collect_errors, 2, str(tmp_path)):
        assert len(messages) == 5
        assert "is a file" in messages[0]
        assert "complex128" in messages[1]
        assert "different sharded tensors" in messages[2]
        assert "half has 4 values, but the ranks' parts of it have 2 in total" in messages[3]
        assert "no more of it" in messages[4]
    assert open_checkpoint(tmp_path / "good").tensors
    assert not list((tmp_path / "new").glob("*.safetensors"))


def measure_peak(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    collectives, world_size = make_collectives()
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {}
    for number, dim in enumerate((0, 0, 1, 0)):  # four tensors of 64 MB
        tensors[f"{number}"] = distribute_tensor(
            make_values((ROWS, ROWS), number), mesh, [Shard(dim)], src_data_rank=None
        )
    with AnonymousMemoryPeak() as memory:
        gather_and_save(tensors.items(), folder, "10GB", collectives)
    return memory.most


def test_gathering_needs_memory_for_one_whole_tensor(tmp_path):
    first, second = run_ranks(measure_peak, 2, str(tmp_path))
    whole = ROWS * ROWS * 4
    # Rank 0 holds one whole tensor, and a box of a tensor sharded along its second dim. The other rank holds only
    # buffers.
    assert whole / 2 < first < 1.5 * whole + 32 * MB
    assert second < 48 * MB
