"""Test the options of tensor parallelism, and the groups of ranks that read different data."""

import pytest

from headway import TensorParallelOptions
from headway.core.config.engines import collect_options
from headway.core.config.mesh import Layout
from headway.errors import ConfigError


def test_options_are_given_as_a_handler() -> None:
    options = TensorParallelOptions({"up": "colwise"})
    assert collect_options([options]).tensor is options
    assert collect_options([]).tensor is None


@pytest.mark.parametrize(
    ("style", "said"),
    [("colwize", "not supported; allowed: colwise"), ("ep_dispatch_experts", "expert parallelism"), ("grouped_gemm", "grouped_gemm")],
)  # fmt: skip
def test_unknown_styles_are_refused_by_name(style: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TensorParallelOptions({"up": style})


def test_empty_plan_and_plain_string_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would be split"):
        TensorParallelOptions({})
    with pytest.raises(ConfigError, match="tuple"):
        TensorParallelOptions(divide="blocks.*.heads")  # type: ignore[arg-type]


def test_data_groups_hold_one_rank_per_data_shard_in_order() -> None:
    assert Layout(shard=2, tp=2).data_groups == [[0, 2], [1, 3]]
    assert Layout(tp=2).data_groups == [[0], [1]]
    assert Layout(replicate=2, shard=2).data_groups == [[0, 1, 2, 3]]
    assert Layout(pp=2, replicate=2, tp=2).data_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
