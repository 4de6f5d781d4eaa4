"""Device maps, hooks, and checkpoints that are loaded in parts."""

import os

import torch
from accelerate import (
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from accelerate.utils import modeling


class _Blocks(torch.nn.Module):
    def __init__(self, count=4, width=8, tied=False):
        super().__init__()
        torch.manual_seed(2)
        self.embed = torch.nn.Linear(width, width, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, width, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        """Call the layers one after the other."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _enter_own_folder():
    folder = f"own{os.environ.get('RANK', '0')}"
    os.mkdir(folder)
    os.chdir(folder)


def a_map_that_fits():
    """Infer a map for a model that fits on one device."""
    return infer_auto_device_map(_Blocks(), max_memory={0: 10000, "cpu": 10000})


def a_map_over_two():
    """Infer a map over two accelerators and the host."""
    return infer_auto_device_map(_Blocks(), max_memory={0: 900, 1: 900, "cpu": 10000})


def a_map_to_the_disk():
    """Infer a map over an accelerator, the host and the disk."""
    return infer_auto_device_map(_Blocks(), max_memory={0: 600, "cpu": 600, "disk": 10**6})


def a_map_without_splitting():
    """Infer a map with no_split_module_classes."""
    return infer_auto_device_map(
        _Blocks(), max_memory={0: 700, 1: 700, "cpu": 10000}, no_split_module_classes=["Linear"]
    )


def a_map_of_tied_weights():
    """Infer a map for a model whose head is tied to its embedding."""
    return infer_auto_device_map(_Blocks(tied=True), max_memory={0: 900, 1: 900, "cpu": 10000})


def a_map_with_buffers():
    """Infer a map with offload_buffers=True."""
    return infer_auto_device_map(_Blocks(), max_memory={0: 700, "cpu": 10000}, offload_buffers=True)


def a_map_by_fallback():
    """Infer a map with fallback_allocation=True."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return infer_auto_device_map(net, max_memory={0: 200, "cpu": 10**6}, fallback_allocation=True)


def a_map_of_half_precision():
    """Infer a map with dtype=float16."""
    return infer_auto_device_map(_Blocks(), max_memory={0: 900, "cpu": 10000}, dtype=torch.float16)


def a_map_that_is_not_cleaned():
    """Infer a map with clean_result=False."""
    return infer_auto_device_map(_Blocks(2), max_memory={0: 700, "cpu": 10000}, clean_result=False)


def balanced_memory():
    """Call get_balanced_memory on a machine without an accelerator."""
    return modeling.get_balanced_memory(_Blocks(), {0: 900, 1: 900, "cpu": 10000})


def sizes_of_modules():
    """Call compute_module_sizes."""
    return modeling.compute_module_sizes(_Blocks(2))


def size_of_the_largest():
    """Call get_max_layer_size."""
    net = _Blocks(2)
    return modeling.get_max_layer_size(list(net.named_children()), modeling.compute_module_sizes(net), [])


def tied_parameters():
    """Call find_tied_parameters."""
    return [sorted(each) for each in modeling.find_tied_parameters(_Blocks(tied=True))]


def checking_a_map():
    """Call check_device_map with an incomplete map, and read the names in the error."""
    try:
        modeling.check_device_map(_Blocks(), {"embed": 0})
    except ValueError as error:
        return "layers" in str(error) and "does not" in str(error)


def cleaning_a_map():
    """Call clean_device_map."""
    return modeling.clean_device_map({"a.0": 0, "a.1": 0, "b": 1})


def setting_a_tensor():
    """Call set_module_tensor_to_device."""
    net = _Blocks(1)
    modeling.set_module_tensor_to_device(net, "embed.weight", "cpu", value=torch.zeros(8, 8))
    modeling.set_module_tensor_to_device(net, "head.weight", "meta")
    return net.embed.weight.sum().item(), str(net.head.weight.device)


def tensors_by_name():
    """Call named_module_tensors with and without buffers."""
    return [name for name, _ in modeling.named_module_tensors(_Blocks(1), recurse=True)], [
        name for name, _ in modeling.named_module_tensors(_Blocks(1), include_buffers=False, recurse=True)
    ]


def empty():
    """Build modules in init_empty_weights, with and without buffers."""
    with init_empty_weights():
        net = torch.nn.BatchNorm1d(3)
    with init_empty_weights(include_buffers=True):
        other = torch.nn.BatchNorm1d(3)
    return str(net.weight.device), str(net.running_mean.device), str(other.running_mean.device)


def on_a_device():
    """Build a module in init_on_device."""
    with init_on_device(torch.device("meta")):
        return str(torch.nn.Linear(2, 2).weight.device)


def loading_a_file():
    """Load a single file with load_checkpoint_in_model."""
    _enter_own_folder()
    net = _Blocks()
    torch.save(net.state_dict(), "weights.bin")
    other = _Blocks()
    torch.nn.init.zeros_(other.embed.weight)
    load_checkpoint_in_model(other, "weights.bin")
    return torch.equal(net.embed.weight, other.embed.weight)


def loading_an_index():
    """Load a sharded checkpoint by its index."""
    _enter_own_folder()
    import json

    net = _Blocks(2)
    state = net.state_dict()
    names = list(state)
    parts = {"one.bin": names[:3], "two.bin": names[3:]}
    for file, own in parts.items():
        torch.save({name: state[name] for name in own}, file)
    with open("pytorch_model.bin.index.json", "w") as out:
        json.dump({"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}, out)
    other = _Blocks(2)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    load_checkpoint_in_model(other, "pytorch_model.bin.index.json")
    first = torch.equal(net.embed.weight, other.embed.weight)
    with init_empty_weights():
        third = _Blocks(2)
    load_checkpoint_in_model(third, "pytorch_model.bin.index.json", device_map={"": "cpu"})
    return first, torch.equal(net.head.weight, third.head.weight)


def loading_and_dispatching():
    """Load and dispatch a checkpoint, partly to the disk."""
    _enter_own_folder()
    net = _Blocks(2).eval()
    torch.save(net.state_dict(), "pytorch_model.bin")
    with init_empty_weights():
        other = _Blocks(2)
    other = load_checkpoint_and_dispatch(
        other, ".", device_map={"embed": "cpu", "layers": "disk", "norm": "cpu", "head": "cpu"}, offload_folder="off"
    ).eval()
    x = torch.ones(2, 8)
    return torch.equal(net(x), other(x)), {str(key): str(value) for key, value in other.hf_device_map.items()}


def dispatched():
    """Dispatch a model with one layer on the disk."""
    _enter_own_folder()
    net = _Blocks(2).eval()
    x = torch.ones(2, 8)
    before = net(x)
    made = dispatch_model(
        net, {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "norm": "cpu", "head": "cpu"}, offload_dir="off"
    )
    return torch.equal(before, made(x)), hasattr(made.layers[0], "_hf_hook"), type(made.layers[0]._hf_hook).__name__


def counting_what_is_on_meta():
    """Count the offloaded weights on the meta device, like some scripts."""
    _enter_own_folder()
    net = _Blocks(2)
    made = dispatch_model(net, {"embed": "cpu", "layers": "disk", "norm": "cpu", "head": "cpu"}, offload_dir="off")
    return sum(each.device.type == "meta" for each in made.parameters())


def offloaded():
    """Offload a model with cpu_offload."""
    net = _Blocks(1).eval()
    x = torch.ones(2, 8)
    before = net(x)
    cpu_offload(net, torch.device("cpu"))
    return torch.equal(before, net(x)), str(net.embed.weight.device)


def offloaded_with_a_hook():
    """Offload a model with cpu_offload_with_hook."""
    net, hook = cpu_offload_with_hook(_Blocks(1).eval(), torch.device("cpu"))
    net(torch.ones(2, 8))
    hook.offload()
    hook.remove()
    return hasattr(net, "_hf_hook"), isinstance(hook.hook, CpuOffload)


def hooked():
    """Add, append and remove hooks of a module."""
    seen = []

    class Noting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append("before")
            return args, kwargs

        def post_forward(self, module, output):
            seen.append("after")
            return output * 2

    net = torch.nn.Identity()
    add_hook_to_module(net, Noting())
    first = net(torch.ones(1)).item()
    add_hook_to_module(net, Noting(), append=True)
    kind, second = type(net._hf_hook).__name__, net(torch.ones(1)).item()
    remove_hook_from_module(net)
    return first, kind, second, net(torch.ones(1)).item(), seen, hasattr(net, "_old_forward")


def hooks_in_sequence():
    """Combine an AlignDevicesHook with another hook in a SequentialHook."""
    net = torch.nn.Linear(2, 2)
    add_hook_to_module(net, SequentialHook(AlignDevicesHook(execution_device="cpu"), ModelHook()))
    return list(net(torch.ones(1, 2)).shape), len(net._hf_hook.hooks)


def tied_sizes():
    """Call compute_module_total_buffer_size."""
    from accelerate.utils.modeling import compute_module_total_buffer_size

    return compute_module_total_buffer_size(_Blocks(1))


def state_of_offloaded():
    """Call get_state_dict_offloaded_model."""
    _enter_own_folder()
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    net = _Blocks(1)
    made = dispatch_model(net, {"embed": "cpu", "layers": "disk", "norm": "cpu", "head": "cpu"}, offload_dir="off")
    found = get_state_dict_offloaded_model(made)
    return sorted(found), {str(each.device) for each in found.values()} == {"cpu"}


def offloading_a_state_dict():
    """Use offload_state_dict and OffloadedWeightsLoader."""
    _enter_own_folder()
    from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

    offload_state_dict("off", {"a": torch.ones(2), "b": torch.zeros(1, dtype=torch.bfloat16)})
    weights = OffloadedWeightsLoader(save_folder="off")
    return sorted(weights), weights["a"].tolist(), str(weights["b"].dtype), len(weights)


def maximum_memory():
    """Convert sizes in words with get_max_memory."""
    return modeling.get_max_memory({0: "1MB", "cpu": "2MiB"})


def loading_by_words():
    """Load with device_map="auto" and the other words, and a host that is too small."""
    _enter_own_folder()
    torch.save(_Blocks().state_dict(), "pytorch_model.bin")
    maps = []
    for word in ("auto", "balanced", "balanced_low_0", "sequential"):
        with init_empty_weights():
            net = _Blocks()
        made = load_checkpoint_and_dispatch(
            net, ".", device_map=word, max_memory={"cpu": 900}, offload_folder=f"off_{word}", dtype=torch.float16
        )
        maps.append(dict(made.hf_device_map))
    return maps


def a_map_with_a_name_too_many():
    """Dispatch with a map that names a layer which the model does not have."""
    net = dispatch_model(_Blocks(1), {"embed": "cpu", "layers": "cpu", "norm": "cpu", "head": "cpu", "tail": "cpu"})
    return list(net(torch.ones(2, 8)).shape), list(net.hf_device_map)


def balanced_budgets():
    """Call get_balanced_memory for devices that this machine does not have."""
    return [
        modeling.get_balanced_memory(_Blocks(tied=True), {0: 3000, 1: 3000, 2: 3000, "cpu": 10000}, whole, low_zero=low)
        for whole in (None, ["Linear"])
        for low in (False, True)
    ]


def sizes_of_masks():
    """Compute the size of a boolean buffer, which counts one eighth of a byte per element."""
    net = _Blocks(1)
    net.register_buffer("mask", torch.ones(12, dtype=torch.bool))
    return modeling.compute_module_sizes(net)["mask"], modeling.compute_module_sizes(net)[""]
