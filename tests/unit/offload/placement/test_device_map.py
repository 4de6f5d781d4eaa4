"""Test device maps: placement of real models, maps by hand, balancing and the report."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    get_balanced_memory,
    infer_auto_device_map,
    init_empty_weights,
)
from headway.errors import DeviceMapError
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.device_map import DeviceMap, get_device
from tests.unit.offload.placement.models import MODELS, Chain, build_layers, build_model

peer = pytest.importorskip("accelerate.utils.modeling")


def build_meta_model(name):
    with init_empty_weights():
        return build_model(name)


def sum_bytes(model, device_map):
    """Return the bytes on each device according to the map, with each tensor counted once."""
    found, seen = {}, set()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            device = get_device(device_map, name)
            found[device] = found.get(device, 0) + tensor.numel() * tensor.element_size()
    return found


def test_no_device_is_empty_while_layers_are_placed_on_the_cpu():
    model = build_layers(40_000, 40_000, 160_000, 40_000, 40_000)
    budgets = {0: 170_000, 1: 170_000, 2: 170_000, "cpu": 10**9}
    assert infer_auto_device_map(model, budgets) == {"0": 0, "1": 0, "2": 1, "3": 2, "4": 2}
    assert "cpu" in peer.infer_auto_device_map(model, dict(budgets)).values()


def test_space_for_the_largest_offloaded_layer_is_kept_on_the_main_device():
    model = build_layers(10, 10, 10, 10, 30)
    assert infer_auto_device_map(model, {0: 60, "cpu": 100}) == {
        "0": 0,
        "1": 0,
        "2": 0,
        "3": "cpu",
        "4": "cpu",
    }
    found = infer_auto_device_map(build_layers(10, 10, 10, 30), {0: 50, 1: 10, "cpu": 100})
    assert found == {"0": 0, "1": 0, "2": 1, "3": "cpu"}
    assert found.plan.row(0).streaming == 30
    assert found.plan.headroom(0) == 0
    assert found.main_device == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "shares",
    [{0: 0.7, 1: 0.7}, {0: 0.4, 1: 0.5, 2: 0.5}, {0: 0.4, "cpu": 0.4}, {0: 0.4, 1: 0.3, "cpu": 1.0}, {"cpu": 0.6}],
)
def test_real_models_fit_their_budgets(name, shares):
    model = build_meta_model(name)
    total = compute_module_sizes(model)[""]
    budgets = {device: int(total * share) for device, share in shares.items()}
    classes = model._no_split_modules
    found = infer_auto_device_map(model, budgets, no_split_module_classes=classes)
    check_device_map(model, found)
    used = sum_bytes(model, found)
    assert all(used[device] <= budgets[device] for device in used if device in budgets and device != 0)
    for path, module in model.named_modules():
        if type(module).__name__ in classes:
            assert len({get_device(found, f"{path}.{key}") for key, _ in module.named_parameters()}) == 1
    names = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(get_device(found, key))
    assert all(len(devices) == 1 for devices in names.values())
    for row in found.plan.rows:
        assert row.headroom is None or row.headroom >= 0
    # The accelerators hold at least as much as with Accelerate's map, unless that one overfills them.
    theirs = sum_bytes(
        model,
        peer.infer_auto_device_map(model, dict(budgets), no_split_module_classes=classes),
    )
    accelerators = [device for device in budgets if isinstance(device, int)]
    if all(theirs.get(device, 0) <= budgets[device] for device in accelerators) and name != "t5":
        assert sum(used.get(d, 0) for d in accelerators) >= sum(theirs.get(d, 0) for d in accelerators)


def test_map_equals_accelerates_where_that_is_correct():
    model = build_meta_model("llama")
    total = compute_module_sizes(model)[""]
    for budgets in ({0: total // 3, 1: total // 3, "cpu": total}, {0: 2 * total}, {"cpu": 2 * total}):
        theirs = peer.infer_auto_device_map(model, dict(budgets), no_split_module_classes=model._no_split_modules)
        assert infer_auto_device_map(model, budgets, model._no_split_modules) == dict(theirs)


def test_tied_layers_stay_together():
    model = Chain(4)
    sizes = compute_module_sizes(model)
    block = sizes["blocks.0"]
    found = infer_auto_device_map(model, {0: sizes["embedding"] + block, 1: 10 * block}, "Block")
    assert found == {"embedding": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 0}
    # If the first device is too small for the tied layers, another device holds them, and nothing is offloaded.
    found = infer_auto_device_map(model, {0: 2 * block, 1: sizes["embedding"] + 2 * block}, "Block")
    assert found == {"embedding": 1, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}


def test_parameters_tied_at_the_top_and_in_a_block():
    model = Chain(2)
    model.extra = model.blocks[1].norm.weight
    assert infer_auto_device_map(model, {0: 10**6}, "Block") == {"": 0}
    found = infer_auto_device_map(model, {0: 4500, 1: 10**6}, "Block", clean_result=False)
    assert found["extra"] == found["blocks.1"]
    assert set(found) == {"extra", "embedding", "blocks.0", "blocks.1", "head"}


def test_buffers_of_offloaded_layers_stay_on_the_main_device_or_are_offloaded():
    def build_with_buffers():
        blocks = build_layers(10, 10, 10)
        for block in blocks:
            block.register_buffer("b", torch.empty(10, dtype=torch.int8, device="meta"))
        return blocks

    stays = infer_auto_device_map(build_with_buffers(), {0: 50, "cpu": 100})
    assert list(stays.values()) == [0, "cpu", "cpu"]
    assert (stays.plan.row(0).weights, stays.plan.row(0).streaming) == (40, 10)
    goes = infer_auto_device_map(build_with_buffers(), {0: 40, "cpu": 100}, offload_buffers=True)
    assert list(goes.values()) == [0, "cpu", "cpu"]
    assert (goes.plan.row(0).weights, goes.plan.row(0).streaming) == (20, 20)


def test_cpu_runs_layers_that_are_on_disk():
    found = infer_auto_device_map(build_layers(10, 10, 10), {"cpu": 20})
    assert found == {"0": "cpu", "1": "disk", "2": "disk"}
    assert found.main_device == "cpu"
    assert infer_auto_device_map(build_layers(10, 10), {"cpu": 12}) == {"": "disk"}
    assert infer_auto_device_map(build_layers(10, 10), {0: 0, "disk": "1GB"}) == {"": "disk"}


def test_layer_that_cannot_fit_is_named_in_an_error():
    with pytest.raises(DeviceMapError, match=r"cpu: 9 B.*the largest one \(1\) takes 10 B.*Raise max_memory"):
        infer_auto_device_map(build_layers(5, 10), {"cpu": 9})
    with pytest.raises(DeviceMapError, match="does not fit"):
        infer_auto_device_map(build_layers(10, 10, 10), {"cpu": 10, "disk": 15})


def test_accelerator_too_small_for_a_layer_is_not_used(caplog):
    found = infer_auto_device_map(build_layers(5, 100), {0: 50, "cpu": 200})
    assert found == {"": "cpu"}
    assert "no accelerator in {0: 50 B, cpu: 200 B} has enough memory" in caplog.text


def test_dtypes_are_taken_into_account():
    model = Chain(3)
    size = compute_module_sizes(model)[""]
    assert set(infer_auto_device_map(model, {0: size // 2, "cpu": size}, dtype=torch.float16).values()) == {0}
    assert "cpu" in infer_auto_device_map(model, {0: size, "cpu": 2 * size}, dtype="float64").values()


def test_single_layer_and_model_without_tensors():
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}) == {"": 0}
    assert infer_auto_device_map(nn.Sequential(nn.ReLU(), nn.ReLU()), {0: 100}) == {"": 0}
    assert infer_auto_device_map(nn.Sequential(), {0: 100}) == {"": 0}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_balanced(name):
    model = build_meta_model(name)
    classes = model._no_split_modules
    total = compute_module_sizes(model)[""]
    budgets = {0: total, 1: total, 2: total, "cpu": total}
    limits = get_balanced_memory(model, budgets, classes)
    assert (limits[2], limits["cpu"]) == (total, total)
    found = infer_auto_device_map(model, limits, classes)
    assert set(found.values()) == {0, 1, 2}
    theirs = peer.infer_auto_device_map(
        model,
        peer.get_balanced_memory(model, dict(budgets), classes),
        no_split_module_classes=classes,
    )
    assert max(sum_bytes(model, found).values()) <= max(sum_bytes(model, theirs).values())
    assert resolve_device_map(model, "auto", budgets) == found == resolve_device_map(model, "balanced", budgets)


def test_first_device_is_kept_low_even_if_numbers_do_not_start_at_0():
    model = build_layers(*[10] * 6)
    assert list(resolve_device_map(model, "balanced_low_0", {2: 100, 3: 100, 5: 100}).values()) == [
        3,
        3,
        3,
        5,
        5,
        5,
    ]
    assert list(resolve_device_map(model, "balanced_low_0", {2: 100, 3: 20, 5: 20}).values()) == [
        2,
        2,
        3,
        3,
        5,
        5,
    ]
    assert list(resolve_device_map(model, "sequential", {2: 100, 3: 20}).values()) == [2]
    low = get_balanced_memory(model, {2: 100, 3: 100, "cpu": 7}, low_zero=True)
    assert low == {2: 0, 3: 100, "cpu": 7}


def test_budgets_stay_where_nothing_can_be_balanced():
    model = build_layers(10, 10)
    assert get_balanced_memory(model, {"cpu": 5}) == {"cpu": 5}
    assert get_balanced_memory(model, {0: 50, "cpu": 5}) == {0: 50, "cpu": 5}
    assert get_balanced_memory(model, {0: 5, 1: 5}) == {0: 5, 1: 5}


def test_maps_by_hand_are_checked_and_every_fault_is_named():
    model = Chain(2)
    with pytest.raises(DeviceMapError) as exc_info:
        check_device_map(model, {"embeding": 0, "blocks.0": "gpu", "blocks.1.up": 1})
    text = str(exc_info.value)
    for fault in ("no 'embeding'; did you mean 'embedding'?", "'blocks.0': 'gpu' is not a device", "'embedding.weight' has no place",
                  "'blocks.1.down.weight' has no place", "'head.weight' has no place"):  # fmt: skip
        assert fault in text
    assert "'blocks.0.up.weight'" not in text
    with pytest.raises(ValueError, match="has no place"):
        check_device_map(model, {})
    check_device_map(model, {"": "cpu"})


def test_forms_of_maps():
    model = Chain(1)
    assert resolve_device_map(model, {"": torch.device("cpu")}) == {"": "cpu"}
    assert resolve_device_map(model, "cpu") == {"": "cpu"}
    assert resolve_device_map(model, {"embedding": "cpu", "blocks": "disk", "head": "cpu"}).main_device == "cpu"
    with pytest.raises(DeviceMapError, match="neither one of auto, balanced, balanced_low_0, sequential"):
        resolve_device_map(model, "automatic")
    with pytest.raises(DeviceMapError, match="uses accelerator 99; this machine has"):
        resolve_device_map(model, {"": 99})
    with pytest.raises(DeviceMapError, match=r"(?s)'a': 'x' is not a device.*\n.*'b': 'y' is not a device"):
        resolve_device_map(model, {"a": "x", "b": "y"})


def test_tied_weights_on_different_devices_are_reported(caplog):
    check_device_map(Chain(1), {"embedding": "cpu", "blocks": "cpu", "head": "disk"})
    assert "embedding.weight, head.weight are one parameter, placed on 2 devices" in caplog.text


def test_longest_entry_applies():
    device_map = {"": 0, "a.b": "cpu", "a.b.c": 1}
    assert [get_device(device_map, name) for name in ("x", "a", "a.b.weight", "a.b.c.weight", "a.bc")] == [
        0,
        0,
        "cpu",
        1,
        0,
    ]
    assert DeviceMap({"a": "cpu", "b": 1, "c": 0}).main_device == 1
    with pytest.raises(DeviceMapError, match="'x' has no place"):
        get_device({"a": 0}, "x")


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, st.sampled_from([0, 1, "cpu"]), min_size=1))
def test_cleaning_changes_no_placement(entries):
    leaves = {name: device for name, device in entries.items() if not any(o.startswith(f"{name}.") for o in entries)}
    cleaned = clean_device_map(leaves)
    assert {name: get_device(cleaned, name) for name in leaves} == leaves
    assert clean_device_map(cleaned) == cleaned
    assert cleaned == peer.clean_device_map(dict(leaves))


def test_cleaning_within_a_module():
    device_map = {"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}
    assert clean_device_map(device_map, "a") == {"a": 0, "b.x": 0, "b.y": 0}


def test_report_of_a_placement():
    found = infer_auto_device_map(build_layers(1024, 1024, 1024, 2048), {0: 5000, "cpu": 10**6}, clean_result=False)
    assert found.explain().splitlines() == [
        "device  units  weights  streaming     budget   headroom",
        "     0      2  2.0 KiB    2.0 KiB    4.9 KiB      904 B",
        "   cpu      2  3.0 KiB          -  976.6 KiB  973.6 KiB",
        "0: 0 ... 1",
        "cpu: 2 ... 3",
    ]
    assert DeviceMap({"": "cpu"}).explain() == "the full model: cpu"


def test_report_can_be_logged(caplog):
    caplog.set_level("INFO")
    infer_auto_device_map(build_layers(10), {0: 10}, verbose=True)
    assert "headroom" in caplog.text
