"""Property test: device maps, sizes and balanced budgets equal those of Accelerate for random models and budgets."""

import warnings

import pytest
import torch
from accelerate.utils import modeling
from accelerate.utils.modeling import infer_auto_device_map as theirs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from headway.compat.accelerate.modules import dispatched, greedy_map
from headway.compat.accelerate.modules.greedy_map import infer_auto_device_map as ours


class Block(nn.Module):
    """Two layers, a parameter and two buffers."""

    def __init__(self, width, inner):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.register_buffer("mask", torch.ones(width) > 0)
        self.register_buffer("cache", torch.ones(width), persistent=False)


class Model(nn.Module):
    """Embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, widths, tied, direct):
        super().__init__()
        self.embed = nn.Embedding(5, widths[0])
        if direct:
            self.bias = nn.Parameter(torch.ones(3))
            self.register_buffer("places", torch.ones(4))
        self.layers = nn.ModuleList(Block(width, 2 * width) for width in widths)
        self.norm = nn.LayerNorm(widths[0])
        self.head = nn.Linear(widths[0], 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


compared = []


@settings(max_examples=300, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    flags=st.tuples(*[st.booleans()] * 5),
    budgets=st.tuples(st.integers(0, 2500), st.integers(0, 2500), st.integers(0, 4000)),
    dtype=st.sampled_from([None, torch.float16, torch.float64]),
    balances=st.sampled_from([None, False, True]),
)
@example(
    [3], (False, True, False, False, False), (169, 20, 0), torch.float16, True
)  # balanced budgets with fractions of bytes
def compare_device_maps(widths, flags, budgets, dtype, balances):
    """Compare one random case with Accelerate's map and count it, unless Accelerate's code fails."""
    tied, direct, is_whole, cleans, falls_back = flags
    model = Model(widths, tied, direct)
    arguments = {
        "max_memory": {0: budgets[0], 1: budgets[1], "cpu": budgets[2]},
        "no_split_module_classes": ["Block"] if is_whole else None,
        "dtype": dtype,
        "clean_result": cleans,
        "fallback_allocation": falls_back,
    }
    if balances is not None:
        given = {name: arguments[name] for name in ("max_memory", "no_split_module_classes", "dtype")}
        budgets = modeling.get_balanced_memory(
            model, **{**given, "max_memory": dict(given["max_memory"])}, low_zero=balances
        )
        assert greedy_map.get_balanced_memory(model, **given, low_zero=balances) == budgets
        arguments["max_memory"] = budgets
    try:
        expected = theirs(model, **{**arguments, "max_memory": dict(arguments["max_memory"])})
    except (IndexError, KeyError, AttributeError):
        # Accelerate fails for tied parameters of the root module, and for fallbacks with fractional sizes.
        return
    assert ours(model, **arguments) == expected
    compared.append(1)


@pytest.mark.slow
def test_device_maps_equal_accelerates():
    compared.clear()
    compare_device_maps()
    assert len(compared) > 150  # cases in which Accelerate's code does not fail


@pytest.mark.parametrize("budgets", [{"cpu": 300}, {"cpu": 10**6, "disk": 10}, {0: "1KB", "cpu": "1MB"}])
def test_budgets_of_other_types_give_accelerates_map(budgets):
    model = Model([4, 4], True, True)
    assert ours(model, dict(budgets)) == theirs(model, dict(budgets))


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    tied=st.booleans(),
    dtype=st.sampled_from([None, "float16", torch.float64]),
    special=st.dictionaries(st.sampled_from(["embed.weight", "layers.0.mask", "norm.bias"]), st.just(torch.float16)),
    buffers_only=st.booleans(),
)
def test_sizes_equal_accelerates(widths, tied, dtype, special, buffers_only):
    model = Model(widths, tied, True)
    if dtype == "float16":  # only Headway accepts the name of a dtype
        expected = modeling.compute_module_sizes(model, torch.float16, special, buffers_only)
    else:
        expected = modeling.compute_module_sizes(model, dtype, special, buffers_only)
    assert greedy_map.compute_module_sizes(model, dtype, special, buffers_only) == expected
    assert greedy_map.compute_module_total_buffer_size(model, dtype) == modeling.compute_module_total_buffer_size(
        model, torch.float16 if dtype == "float16" else dtype
    )


@pytest.mark.parametrize("device_map", [
    {"": 0}, {"embed": 0}, {"embed": 0, "layers": 1, "norm": 0, "head": "cpu"}, {"embed": 0, "layers.0": 0, "more": 1},
    {"embed": 0, "layers": 1, "norm": 0, "head": "cpu", "head.weight": 0, "tail": 3},
])  # fmt: skip
def test_maps_are_checked_like_in_accelerate(device_map):
    def collect_messages(check):
        """Return the error and the warnings of a check."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check(Model([3, 4], True, False), device_map)
            except ValueError as error:
                return str(error), [str(each.message) for each in caught]
            return [str(each.message) for each in caught]

    assert collect_messages(dispatched.check_device_map) == collect_messages(modeling.check_device_map)


def test_low_zero_needs_no_devices_that_count_up_from_zero():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    budgets = {1: 600, 3: 600, "cpu": 10_000}
    assert greedy_map.get_balanced_memory(model, budgets, low_zero=True) == greedy_map.get_balanced_memory(
        model, budgets
    )
    num_bytes = sum(each.nbytes for each in model.parameters())
    low = greedy_map.get_balanced_memory(model, {0: 10_000, 3: 600, "cpu": 10_000}, low_zero=True)
    assert low == {0: num_bytes - 600, 3: 600, "cpu": 10_000}
