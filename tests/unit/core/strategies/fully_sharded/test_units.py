"""Test how a model is divided into units for FSDP: blocks, classes, sizes, shared parameters, and unsupported models."""

import pytest
import torch
from torch import nn

from headway import ShardingOptions
from headway.core.strategies.fully_sharded.units import ShardingUnits, find_units
from headway.errors import ConfigError, PrepareError


class Net(nn.Module):
    """Embedding, three blocks, and a head that can be tied to the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def list_names(model: nn.Module, units: ShardingUnits) -> list[str]:
    """Return the names of the units' modules."""
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units.modules]


def test_repeated_blocks_are_units_and_tied_weights_stay_with_the_root():
    for tied in (False, True):
        model = Net(tied)
        units = find_units(model, ShardingOptions())
        assert list_names(model, units) == ["blocks.0", "blocks.1", "blocks.2"]
        assert units.divided_blocks == ()
        assert not units.ignored


def test_model_without_blocks_is_one_unit():
    assert find_units(nn.Linear(3, 3), ShardingOptions()).modules == ()


def test_units_are_given_by_class_or_name_innermost_first():
    model = Net()
    for expected in (nn.Linear, "Linear"):
        units = find_units(model, ShardingOptions(units=(expected,)))
        assert list_names(model, units) == [*(f"blocks.{i}.{j}" for i in range(3) for j in (0, 2)), "head"]
    nested = find_units(model, ShardingOptions(units=("blocks.1", "blocks.1.0")))
    assert list_names(model, nested) == ["blocks.1.0", "blocks.1"]
    with pytest.raises(ConfigError, match="names 'Decoder', which Net lacks"):
        find_units(model, ShardingOptions(units="Decoder"))
    with pytest.raises(ConfigError, match="names 'blocks', a ModuleList, which is never called"):
        find_units(model, ShardingOptions(units="blocks"))


def test_smallest_modules_above_the_minimal_size_become_units():
    model = Net()
    assert list_names(model, find_units(model, ShardingOptions(min_num_params=70))) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    small = list_names(model, find_units(model, ShardingOptions(min_num_params=36)))
    assert small == [*(f"blocks.{i}.{j}" for i in range(3) for j in (0, 2))]
    assert find_units(model, ShardingOptions(min_num_params=10**6)).modules == ()


def test_blocks_that_share_parameters_are_divided_further():
    model = Net()
    model.blocks[2][0].weight = model.blocks[0][0].weight  # type: ignore[index]
    units = find_units(model, ShardingOptions())
    assert list_names(model, units) == ["blocks.0.2", "blocks.2.2", "blocks.1"]
    assert units.divided_blocks == ("blocks.0", "blocks.2")
    inside = Net()
    inside.blocks[1][2].bias = inside.head.bias = None  # type: ignore[index]
    inside.blocks[1].twin = inside.blocks[1][0]  # type: ignore[union-attr]
    assert list_names(inside, find_units(inside, ShardingOptions())) == ["blocks.0", "blocks.1", "blocks.2"]


class Adapted(nn.Module):
    """Block that uses a container of parameters, which other blocks can use, too."""

    def __init__(self, bank: nn.ParameterDict) -> None:
        super().__init__()
        self.layers, self.bank = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), bank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) * self.bank["scale"])


@pytest.mark.parametrize("is_shared", [True, False])
def test_container_is_never_a_unit_and_its_parents_use_its_parameters(is_shared: bool):
    banks = [nn.ParameterDict({"scale": torch.ones(4)}) for _ in range(3)]
    model = Net()
    model.blocks = nn.ModuleList(Adapted(banks[0] if is_shared else bank) for bank in banks)
    found = list_names(model, find_units(model, ShardingOptions()))
    layers = [f"blocks.{i}.layers.{j}" for i in range(3) for j in range(2)]
    assert found == (layers if is_shared else ["blocks.0", "blocks.1", "blocks.2"])
    by_size = list_names(model, find_units(model, ShardingOptions(min_num_params=4)))
    assert not [name for name in by_size if name.endswith(("bank", "layers"))]
    with pytest.raises(ConfigError, match=r"names 'blocks\.0\.bank', a ParameterDict, which is never called"):
        find_units(model, ShardingOptions(units="blocks.0.bank"))


def test_frozen_parameters_can_stay_unsharded():
    model = Net()
    model.tokens.requires_grad_(False)
    units = find_units(model, ShardingOptions(ignored="tokens"))
    assert units.ignored == {model.tokens.weight}
    with pytest.raises(PrepareError, match=r"trainable parameters \(head.weight\)"):
        find_units(model, ShardingOptions(ignored=("head.weight",)))
    with pytest.raises(ConfigError, match="names 'gone'"):
        find_units(model, ShardingOptions(ignored="gone"))


def test_scalars_stay_unsharded():
    model = Net()
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.blocks[0].frozen_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64), requires_grad=False)
    units = find_units(model, ShardingOptions())
    assert units.ignored == {model.scale, model.blocks[0].frozen_scale}
    assert find_units(model, ShardingOptions(ignored="scale")).ignored == units.ignored
    plain = Net()
    assert list_names(model, units) == list_names(plain, find_units(plain, ShardingOptions()))


def test_frozen_and_trainable_parameters_of_several_dtypes_share_a_unit():
    plain, mixed = Net(), Net()
    mixed.blocks[0][0].to(torch.bfloat16).requires_grad_(False)  # type: ignore[index]
    expected = list_names(plain, find_units(plain, ShardingOptions()))
    assert list_names(mixed, find_units(mixed, ShardingOptions())) == expected


def build_unsupported(change: str) -> nn.Module:
    model = Net()
    if change == "strided":
        model.head.weight = nn.Parameter(torch.randn(4, 7).t())
    elif change == "types":
        model.blocks[1][0].to(torch.bfloat16)  # type: ignore[index]
    elif change == "sparse":
        model.tokens = nn.Embedding(7, 4, sparse=True)
    elif change == "lazy":
        model.late = nn.LazyLinear(3)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("strided", r"'head.weight' of Net is not contiguous.*\.contiguous\(\)"),
        ("types", r"float32: blocks.1.2.weight, blocks.1.2.bias; .*bfloat16: |bfloat16: blocks.1.0.weight.*float32: "),
        ("sparse", "'tokens' of Net produces sparse gradients.*sparse=False"),
        ("lazy", "lazy parameter 'late.weight'.*one forward pass"),
    ],
)
def test_unsupported_parameters_are_named(change, message):
    with pytest.raises(PrepareError, match=message):
        find_units(build_unsupported(change), ShardingOptions())


def test_options_are_checked():
    with pytest.raises(ConfigError, match="units and min_num_params"):
        ShardingOptions(units="Block", min_num_params=5)
    with pytest.raises(ConfigError, match="allowed: float32, bfloat16, float16"):
        ShardingOptions(reduce_dtype="int8")
    with pytest.raises(ConfigError, match="forward_prefetch=-1"):
        ShardingOptions(forward_prefetch=-1)
    with pytest.raises(ConfigError, match="reshard_after_forward=0"):
        ShardingOptions(reshard_after_forward=0)
    assert ShardingOptions(param_dtype=torch.bfloat16).param_dtype == "bfloat16"
    assert ShardingOptions(reduce_dtype="fp32").reduce_dtype == "float32"
    ShardingOptions(reshard_after_forward=2).check(4)
    with pytest.raises(
        ConfigError, match=r"reshard_after_forward=3\) does not divide 8 shards; give one of 2, 4, True"
    ):
        ShardingOptions(reshard_after_forward=3).check(8)
