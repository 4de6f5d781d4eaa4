"""Device maps are those of Accelerate's own code, over random models and budgets."""

import pytest
import torch
from accelerate.utils.modeling import infer_auto_device_map as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway.compat.accelerate.modules.greedy_map import infer_auto_device_map as ours


class Block(nn.Module):
    """Two layers and a parameter of its own."""

    def __init__(self, width, inner):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.register_buffer("mask", torch.ones(width))


class Model(nn.Module):
    """An embedding, blocks, a head that may be tied to the embedding."""

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


@settings(max_examples=300, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    flags=st.tuples(*[st.booleans()] * 5),
    budgets=st.tuples(st.integers(0, 2500), st.integers(0, 2500), st.integers(0, 4000)),
    dtype=st.sampled_from([None, torch.float16]),
)
def test_maps_are_the_same(widths, flags, budgets, dtype):
    tied, direct, is_whole, cleans, falls_back = flags
    model = Model(widths, tied, direct)
    arguments = {
        "max_memory": {0: budgets[0], 1: budgets[1], "cpu": budgets[2]},
        "no_split_module_classes": ["Block"] if is_whole else None,
        "dtype": dtype,
        "clean_result": cleans,
        "fallback_allocation": falls_back,
    }
    try:
        wanted = theirs(model, **{**arguments, "max_memory": dict(arguments["max_memory"])})
    except (IndexError, KeyError):  # of Accelerate's own, with tied weights that are parameters of the model itself
        return
    assert ours(model, **arguments) == wanted
    compared.append(1)


compared = []


def test_most_of_them_were_compared():
    assert len(compared) > 150


@pytest.mark.parametrize("budgets", [{"cpu": 300}, {"cpu": 10**6, "disk": 10}, {0: "1KB", "cpu": "1MB"}])
def test_budgets_of_other_kinds(budgets):
    model = Model([4, 4], True, True)
    assert ours(model, dict(budgets)) == theirs(model, dict(budgets))
