"""Test the parts of sharded layouts that need no ranks."""

import pytest
import torch
from torch import nn

from headway.core.config.float8 import Float8Options
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import ShardingOptions, TensorParallelOptions
from headway.core.strategies.build import _check_automatic_microbatching
from headway.core.strategies.fully_sharded.model_sharder import move_unsharded
from headway.errors import PrepareError, UnsupportedError
from headway.layouts.context.context_parallel import check_options
from headway.layouts.tensor import gradient_agreement
from headway.layouts.tensor.crossings import SplitAxis
from headway.layouts.tensor.parameter_splits import ParameterSplit, _check_size


class OtherParameter(nn.Parameter):
    """Parameter of a class that another package might define."""


def test_move_unsharded_keeps_parameter_objects() -> None:
    model = nn.BatchNorm1d(2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.other = OtherParameter(torch.ones(2))
    parameters = dict(model.named_parameters())
    move_unsharded(model, torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert {name for name, parameter in parameters.items() if not parameter.is_meta} == {"other"}
    assert [parameter.requires_grad for parameter in (model.scale, model.frozen)] == [True, False]


@pytest.mark.parametrize(
    ("size", "fits"), [(3, False), (4, True), (5, False), (6, False), (7, True), (9, False), (10, True)]
)
def test_each_rank_must_get_a_part(size: int, fits: bool) -> None:
    axis = SplitAxis(None, None, 0, 4)
    weight = torch.empty(size, 2)
    assert fits == (len(weight.chunk(4)) == 4)
    if fits:
        _check_size("weight", weight, ParameterSplit(0, 1), axis)
    else:
        with pytest.raises(PrepareError, match="cannot be split along dimension 0 across 4 ranks"):
            _check_size("weight", weight, ParameterSplit(0, 1), axis)


def test_digest_is_equal_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(3, 5)
    whole = gradient_agreement._make_gradient_digest(grad)
    monkeypatch.setattr(gradient_agreement, "_BLOCK_SIZE", 4)
    torch.testing.assert_close(gradient_agreement._make_gradient_digest(grad), whole)
    flat = grad.double().flatten()
    torch.testing.assert_close(whole, torch.stack([flat.norm(), flat @ torch.arange(15.0).double().cos()]))
    assert gradient_agreement._make_gradient_digest(torch.empty(0)).tolist() == [0.0, 0.0]


def test_sequence_parallelism_and_context_parallelism_exclude_each_other() -> None:
    both = TensorParallelOptions(sequence_parallel=True, loss_parallel=True)
    check_options(both, 1)
    check_options(TensorParallelOptions(), 2)
    with pytest.raises(UnsupportedError, match=r"cp=2\) .* drop sequence_parallel and loss_parallel, or cp"):
        check_options(both, 2)


@pytest.mark.parametrize(
    ("sizes", "kept", "said"),
    [
        ({"shard": 4}, None, ""),
        ({"replicate": 2, "shard": 2}, False, ""),
        ({"shard": 2, "tp": 2}, None, "does not work with tp"),
        ({"replicate": 4, "shard": 1}, None, "replicas of one shard each"),
        ({"shard": 4}, 2, r"reshard_after_forward=2\), which gathers among other ranks"),
    ],
)
def test_layouts_in_which_batches_can_run_again(sizes: dict[str, int], kept: bool | int | None, said: str) -> None:
    options = ShardingOptions(reshard_after_forward=kept)
    if not said:
        _check_automatic_microbatching(Layout(**sizes), options, None)
        return
    with pytest.raises(UnsupportedError, match=said):
        _check_automatic_microbatching(Layout(**sizes), options, None)


def test_weights_gathered_in_float8_cannot_run_again() -> None:
    with pytest.raises(UnsupportedError, match="fsdp_all_gather=False"):
        _check_automatic_microbatching(Layout(shard=2), ShardingOptions(), Float8Options())
    for float8 in (Float8Options(fsdp_all_gather=False), Float8Options(recipe="rowwise")):
        _check_automatic_microbatching(Layout(shard=2), ShardingOptions(), float8)
