"""Whole weights of sharded models: brought to rank 0 one tensor at a time, on all ranks or with an error on all."""

from pathlib import Path

import pytest
import torch

from headway.core.training.weights import GatheredTensor, gather_state, save_gathered
from headway.core.weights.files import open_checkpoint
from headway.errors import HeadwayError
from headway.layouts.deepspeed.optimizer import make_piece
from tests.distributed.ranks import run_ranks
from tests.distributed.test_boxes import MB, ROWS, Anonymous, door, made, numbered, values


def collectives():
    saver, _, world_size = door()
    return saver._collectives, world_size


def written(folder):
    door_to_all, world_size = collectives()
    for layout in ("fsdp", "hsdp", "tp", "fsdp+tp", "packed"):
        model, _, _ = made(layout, world_size, 1)
        for number, tensor in numbered(model):  # what no strategy cuts must be alike
            assert tensor.shape, number
        save_gathered(model.state_dict().items(), Path(folder, layout), "300B", door_to_all)
        found = gather_state(model.state_dict().items(), door_to_all)
        if door_to_all.rank:
            assert found == {}
            continue
        assert list(found) == list(model.state_dict())
        for (number, tensor), whole in zip(numbered(model), found.values()):
            assert type(whole) is torch.Tensor
            assert torch.equal(whole, values(tensor.shape, number + 1)), (layout, number)
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    return [(number, tuple(tensor.shape)) for number, tensor in numbered(model)], list(model.state_dict())


def test_whole_weights_of_every_layout(tmp_path):
    numbers, names = run_ranks(written, 4, str(tmp_path))[0]
    for layout in ("fsdp", "hsdp", "tp", "fsdp+tp", "packed"):
        folder = tmp_path / layout
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
        found = open_checkpoint(folder)
        for (number, shape), name in zip(numbers, names):
            tensor = found.tensors[found.ties.get(name, name)].tensor()
            assert torch.equal(tensor, values(shape, number + 1)), (layout, name)
        assert found.ties == {"head.weight": "embedding.weight"}


def out_of_memory(self):
    raise MemoryError("no more of it")


def failing(folder):
    door_to_all, world_size = collectives()
    model, _, _ = made("fsdp", world_size, 1)
    path = Path(folder, "taken")
    if door_to_all.rank == 0:
        path.write_text("a file")
    door_to_all.barrier()
    messages = []
    for tensors in (model.state_dict(), {**model.state_dict(), "complex": torch.ones(1, dtype=torch.complex128)}):
        try:
            save_gathered(tensors.items(), path if len(messages) == 0 else Path(folder, "new"), "300B", door_to_all)
        except HeadwayError as error:
            messages.append(str(error))
    save_gathered(model.state_dict().items(), Path(folder, "good"), "300B", door_to_all)  # they are still together
    if door_to_all.rank:
        model.register_buffer("more", torch.ones(1))
    own = {"one": model.first.weight} if door_to_all.rank else {"other": model.first.weight}
    try:
        gather_state(own.items(), door_to_all)
    except HeadwayError as error:
        messages.append(str(error))
    part = make_piece((4,), torch.ones(1), door_to_all.rank, True)
    try:
        gather_state([("half", part)], door_to_all)  # nobody brings the last two values
    except HeadwayError as error:
        messages.append(str(error))
    with pytest.MonkeyPatch.context() as patch:
        if door_to_all.rank == 0:
            patch.setattr(GatheredTensor, "whole", out_of_memory)
        try:
            gather_state(model.state_dict().items(), door_to_all)
        except (HeadwayError, MemoryError) as error:
            messages.append(str(error))
    found = gather_state([("weight", model.first.weight), ("first._extra_state", {"count": 3})], door_to_all)
    assert found.get("first._extra_state") == (None if door_to_all.rank else {"count": 3})
    return messages


def test_a_failure_on_rank_0_is_one_on_every_rank(tmp_path):
    for messages in run_ranks(failing, 2, str(tmp_path)):
        assert len(messages) == 5
        assert "is a file" in messages[0]
        assert "complex128" in messages[1]
        assert "different sharded tensors" in messages[2]
        assert "half has 4 values, but the ranks' parts of it have 2 in total" in messages[3]
        assert "no more of it" in messages[4]
    assert open_checkpoint(tmp_path / "good").tensors
    assert not list((tmp_path / "new").glob("*.safetensors"))


def peak(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    door_to_all, world_size = collectives()
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {}
    for number, dim in enumerate((0, 0, 1, 0)):  # four of 64 MB
        tensors[f"{number}"] = distribute_tensor(values((ROWS, ROWS), number), mesh, [Shard(dim)], src_data_rank=None)
    with Anonymous() as memory:
        save_gathered(tensors.items(), folder, "10GB", door_to_all)
    return memory.most


def test_one_whole_tensor_is_in_memory_at_a_time(tmp_path):
    first, second = run_ranks(peak, 2, str(tmp_path))
    whole = ROWS * ROWS * 4
    # Rank 0: the tensor, and a box of one that is cut along its second dim; the other ranks: nothing but buffers.
    assert whole / 2 < first < 1.5 * whole + 32 * MB
    assert second < 48 * MB
