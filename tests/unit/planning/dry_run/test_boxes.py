"""Test boxes of sharded tensors on each rank against boxes computed by hand."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from headway.core.config.mesh import parse_layout
from headway.planning.dry_run.boxes import RankBoxes, list_coordinates
from headway.planning.dry_run.fake_group import join_fake_group


def test_rows_are_split_like_torch_chunks_them():
    layout = parse_layout("fsdp").resolve(4)
    with join_fake_group(4, 0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], shape=torch.Size((5, 3)), stride=(3, 1))
        found = RankBoxes(layout).list_boxes(tensor)
    assert found == [[((0, 0), (2, 3))], [((2, 0), (2, 3))], [((4, 0), (1, 3))], []]


def test_replicas_have_equal_boxes():
    layout = parse_layout("hsdp=2").resolve(4)
    with join_fake_group(4, 0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate(), Shard(0)])
        found = RankBoxes(layout).list_boxes(tensor)
    assert found == [[((0, 0), (2, 3))], [((2, 0), (2, 3))]] * 2


def test_matrix_is_split_along_both_dimensions():
    layout = parse_layout("fsdp+tp=2").resolve(4)
    with join_fake_group(4, 0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0), Shard(1)])
        found = RankBoxes(layout).list_boxes(tensor)
    assert found == [[((0, 0), (2, 3))], [((0, 3), (2, 3))], [((2, 0), (2, 3))], [((2, 3), (2, 3))]]


def test_plain_tensor_is_one_box_on_every_rank():
    assert RankBoxes(parse_layout("tp").resolve(2)).list_boxes(torch.zeros(4, 6)) == [[((0, 0), (4, 6))]] * 2


def test_joint_axes_number_the_ranks_of_shards_and_sequence_parts():
    found = list_coordinates(parse_layout("fsdp=2+cp=2").resolve(4))
    assert [place["shard_cp"] for place in found] == [0, 1, 2, 3]
