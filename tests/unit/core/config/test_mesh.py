"""Test layouts: parsing, resolution on a number of ranks, coordinates, groups and errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.config.mesh import Layout, describe_groups, format_sizes, parse_layout
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        ("ddp", 4, Layout(replicate=4)),
        ("fsdp", 4, Layout(shard=4)),
        ("hsdp=2", 8, Layout(replicate=4, shard=2)),
        ("FSDP + tp=2", 8, Layout(shard=4, tp=2)),
        ("ddp=2+fsdp=4+tp=2", 16, Layout(replicate=2, shard=4, tp=2)),
        ("pp=2+ddp", 4, Layout(pp=2, replicate=2)),
        ("ddp", 1, Layout()),
    ],
)
def test_layout_text_is_resolved(text, num_ranks, expected):
    assert parse_layout(text).resolve(num_ranks) == expected
    assert expected.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("text", "num_ranks", "told"),
    [
        ("fsdp=4", 8, "takes 4 ranks, but the run has 8"),
        ("fsdp+tp=3", 8, "takes 3 ranks at a time"),
        ("zero", 2, "'zero' is unknown"),
        ("fsdp+tp", 4, "omits more than one size"),
        ("hsdp", 4, "without a size shards within each machine"),
        ("hsdp+tp", 4, "omits more than one size"),
        ("fsdp=0", 2, "needs a number of ranks"),
        ("fsdp=²", 2, "needs a number of ranks"),
        ("tp=" + "9" * 5000, 2, r"\.\.\. \(5005 characters\) is too long for a layout"),
        ("tp=" + "9" * 190, 2, "needs a number of ranks after '=', 1 or more"),
        ("fsdp=2+hsdp=2", 4, "twice"),
        ("", 1, "unknown"),
    ],
)
def test_invalid_layout_is_refused(text, num_ranks, told):
    with pytest.raises(ConfigError, match=told):
        parse_layout(text).resolve(num_ranks)


def test_order_of_axes_and_number_of_data_shards():
    layout = Layout(replicate=2, shard=4, tp=2)
    assert list(layout.sizes.items()) == [("replicate", 2), ("shard", 4), ("tp", 2)]
    assert layout.num_data_shards == 8
    assert not layout.is_replicas_only
    assert Layout(replicate=3).is_replicas_only


def test_ranks_have_coordinates_and_groups_in_the_mesh():
    layout = parse_layout("pp=2+ddp=2+fsdp=2+tp=2").resolve(16)
    assert layout.find_coordinates(0) == dict.fromkeys(("pp", "replicate", "shard", "ep", "cp", "tp"), 0)
    assert layout.find_coordinates(11) == {"pp": 1, "replicate": 0, "shard": 1, "ep": 0, "cp": 0, "tp": 1}
    assert [list(group) for group in Layout(shard=2, tp=2).list_groups("shard")] == [[0, 2], [1, 3]]
    assert [list(group) for group in Layout(shard=2, tp=2).list_groups("tp")] == [[0, 1], [2, 3]]


@given(st.builds(Layout, *[st.integers(1, 4)] * 6))
def test_ranks_of_a_group_differ_along_one_axis_only(layout):
    for axis, size in layout.sizes.items():
        groups = layout.list_groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.num_ranks))
        for group in groups:
            places = [layout.find_coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(size))
            assert len({tuple(v for k, v in place.items() if k != axis) for place in places}) == 1


@given(st.builds(Layout, *[st.integers(1, 4)] * 6))
def test_formatted_sizes_are_parsed_back(layout):
    assert parse_layout(format_sizes(layout.sizes)).resolve(layout.num_ranks) == layout


def test_hsdp_without_a_size_follows_machines():
    assert parse_layout("hsdp").resolve(32, 8) == Layout(replicate=4, shard=8)
    assert parse_layout("hsdp+tp=2").resolve(32, 8) == Layout(replicate=4, shard=4, tp=2)
    assert parse_layout("hsdp").resolve(1) == Layout()
    with pytest.raises(
        ConfigError, match=r"only one; give the number of ranks that share a copy \(hsdp=2, hsdp=4\), or use fsdp"
    ):
        parse_layout("hsdp").resolve(8)
    with pytest.raises(ConfigError, match="8 ranks on a machine leave no shards for 8 parts"):
        parse_layout("hsdp+tp=8").resolve(32, 8)


@pytest.mark.parametrize(
    ("text", "num_ranks", "told"),
    [
        ("fsdp+tp=3", 8, "the nearest that fit 8: fsdp+tp=2, fsdp+tp=4; or run 6 or 9 ranks"),
        ("fsdp=4", 8, "the nearest that fit 8: fsdp=8, ddp=2+fsdp=4; or run 4 ranks"),
        ("hsdp=3", 8, "hsdp=2, hsdp=4; or run 6 or 9 ranks"),
        ("tp=16", 8, "the nearest that fit 8: tp=8; or run 16 ranks"),
        ("ddp=2+fsdp=4+tp=2", 8, "fsdp=4+tp=2, ddp=2+fsdp=2+tp=2, ddp=2+fsdp=4; or run 16 ranks"),
        ("zero", 2, "'zero' is unknown"),
        ("fspd", 2, "'fspd' is unknown; did you mean fsdp?"),
        ("pipeline=2", 2, "write pp"),
    ],
)
def test_errors_name_the_sizes_that_fit(text, num_ranks, told):
    with pytest.raises(ConfigError) as raised:
        parse_layout(text).resolve(num_ranks)
    assert told in str(raised.value)


def test_groups_are_described():
    assert list(describe_groups(Layout(shard=4, tp=2))) == [
        "shard = 4: ranks (0 2 4 6), (1 3 5 7)",
        "tp = 2: ranks (0 1), (2 3), (4 5), (6 7)",
    ]
    assert list(describe_groups(Layout(replicate=1024, shard=16)))[1] == (
        "shard = 16: ranks (0 1 .. 15), (16 17 .. 31), (32 33 .. 47), (48 49 .. 63) and 1020 more"
    )


def test_experts_divide_the_data_ranks_into_groups():
    layout = parse_layout("fsdp+ep=2").resolve(8)
    assert (layout.num_data_shards, layout.num_shards, layout.describe()) == (8, 8, "4 shards x 2 groups of experts")
    assert layout.list_groups("ep")[0] == range(2)
    assert parse_layout("ddp+pp=2+ep=2").resolve(8).sizes == {"pp": 2, "replicate": 2, "ep": 2}
    assert [parse_layout("ddp=2+ep=2+tp=2").resolve(8).find_data_index(rank) for rank in range(8)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_ranks_of_one_sequence_read_the_same_data_beside_experts():
    layout = parse_layout("fsdp=2+ep=2+cp=2").resolve(8)
    assert (layout.num_data_shards, layout.num_shards) == (4, 8)
    assert layout.list_groups("ep")[:2] == [range(2), range(2, 4)]
    assert layout.list_groups("cp")[:2] == [range(0, 4, 2), range(1, 5, 2)]
    assert [layout.find_data_index(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.data_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]
