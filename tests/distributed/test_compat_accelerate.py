"""The same code under Accelerate and under Headway gives the same results, on one process and on two."""

import os
import re
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import torch
from packaging import version

from headway.errors import HeadwayError
from tests.distributed.ranks import run_ranks

LIBRARIES = ("accelerate", "headway")


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    """Return the result of each function below under Accelerate and under Headway, by name. Each result has one entry per rank."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_ranks(run_all, request.param, library, folder) for library in LIBRARIES]
    return {name: tuple([rank[name] for rank in run] for run in runs) for name in runs[0][0]}


def run_all(library, folder):
    state = import_module(f"{library}.state")
    calls = {
        "surroundings": read_states, "exchange": call_free_functions, "gate": lambda lib: save_ema_behind_version_check(lib, folder),
        "local_sgd": lambda lib: run_local_sgd(lib, 3, 7), "triggered": trigger_sync, "bars": show_bars,
        "setter": lambda lib: set_windows_by_hand(lib, True), "private": lambda lib: set_windows_by_hand(lib, False),
        "loaders": read_gradient_state,
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        found[name] = call(library)
        # State of one Accelerator must not reach the next.
        state.AcceleratorState._reset_state()
        state.GradientState._reset_state()
    return found


# ---------------------------------------------------------------- states and exchange


def read_states(library):
    lib, utils, state = (import_module(f"{library}{rest}") for rest in ("", ".utils", ".state"))
    before = (state.PartialState._shared_state == {}, state.is_initialized())
    partial = lib.PartialState(cpu=True)
    accelerator = lib.Accelerator(cpu=True)
    is_tpu = accelerator.distributed_type == utils.DistributedType.XLA
    shared = state.AcceleratorState()
    with partial.split_between_processes(list(range(5))) as mine:
        pass
    return {
        "before": before, "is_tpu": is_tpu, "kind": str(accelerator.distributed_type), "backend": partial.backend,
        "facts": [(s.num_processes, s.process_index, s.is_main_process, s.is_last_process, s.device.type, s.use_distributed)
                  for s in (partial, shared, accelerator.state, accelerator)],
        "plugins": (accelerator.state.deepspeed_plugin, accelerator.deepspeed_plugin, shared.mixed_precision,
                    accelerator.native_amp, accelerator.scaler, accelerator.parallelism_config,
                    accelerator.torch_device_mesh, accelerator.is_fsdp2, accelerator.multi_device),
        "mine": mine, "printed": repr(accelerator.state).replace("cpu:0", "cpu"), "initialized": state.is_initialized(),
    }  # fmt: skip


def test_states_have_the_same_values(results):
    theirs, ours = results["surroundings"]
    if len(ours) == 1:  # On one process with a launcher's variables, Accelerate reports the backend gloo.
        for each in (*theirs, *ours):
            assert each.pop("kind") in ("DistributedType.NO", "DistributedType.MULTI_CPU")
            del each["backend"], each["printed"]
            each["facts"] = [facts[:-1] for facts in each["facts"]]
    assert ours == theirs


def call_free_functions(library):
    lib, utils = import_module(library), import_module(f"{library}.utils")
    rank = lib.PartialState(cpu=True).process_index
    tensor = torch.arange(2.0) + 10 * rank
    sent = torch.full((2,), float(rank))
    returned = utils.broadcast(sent)
    objects = [f"from {rank}", rank]
    utils.broadcast_object_list(objects)
    utils.wait_for_everyone()
    return {
        "gather": utils.gather({"a": tensor, "b": [tensor * 2]}), "objects": utils.gather_object([rank, {"r": rank}]),
        "broadcast": (returned, sent), "list": objects, "mean": utils.reduce(tensor), "sum": utils.reduce([tensor], "sum"),
        "padded": utils.pad_across_processes(torch.ones(1 + rank, 2), dim=0, pad_index=-1),
        "first": utils.pad_across_processes(torch.ones(2, 1 + rank), dim=1, pad_first=True),
        "joined": utils.concatenate([{"x": tensor}, {"x": tensor + 1}]),
        "moved": utils.send_to_device({"x": tensor, "n": 3}, "cpu"), "size": utils.find_batch_size([tensor]),
        "fp32": utils.convert_to_fp32((tensor.half(), torch.ones(1, dtype=torch.int32))),
        "lists": utils.listify({"x": tensor}), "applied": utils.recursively_apply(lambda t: t + 1, (tensor, "text")),
    }  # fmt: skip


def convert_tensors(tree):
    """Replace tensors by their dtypes and lists, so that == compares values."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tree.tolist())
    if isinstance(tree, dict):
        return {key: convert_tensors(value) for key, value in tree.items()}
    return type(tree)(map(convert_tensors, tree)) if isinstance(tree, list | tuple) else tree


def test_free_functions_return_the_same(results):
    theirs, ours = results["exchange"]
    assert [convert_tensors(each) for each in ours] == [convert_tensors(each) for each in theirs]


def test_gather_object_is_flat(results):
    both_ranks = [0, {"r": 0}, 1, {"r": 1}]
    _, ours = results["exchange"]
    assert [each["objects"] for each in ours] == [both_ranks[: 2 * len(ours)]] * len(ours)


def copy_tensor():
    from headway.utils import copy_tensor_to_devices, gather_object

    rank = import_module("headway").PartialState(cpu=True).process_index
    made = copy_tensor_to_devices(torch.tensor([[1, 2]], dtype=torch.int16) if rank else None)
    try:
        copy_tensor_to_devices(None)
    except HeadwayError as error:
        return made, str(error), gather_object("text")


def test_copy_tensor_to_devices_sends_one_ranks_tensor_and_gather_object_keeps_text_whole():
    for made, message, texts in run_ranks(copy_tensor, 2):
        assert made.dtype == torch.int16
        assert made.tolist() == [[1, 2]]
        assert "on ranks []" in message
        assert texts == ["text", "text"]


# ---------------------------------------------------------------- the version check


def save_ema_behind_version_check(library, folder):
    """Save as text-to-image scripts do, which register the hook that saves EMA weights behind a version check."""
    accelerate = import_module(library)
    utils = import_module(f"{library}.utils")
    get_logger = import_module(f"{library}.logging").get_logger
    utils.set_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    get_logger(__name__).info(accelerator.state, main_process_only=False, in_order=False)
    deepspeed_plugin = accelerator.state.deepspeed_plugin if accelerate.state.is_initialized() else None
    model, ema = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    if version.parse(accelerate.__version__) >= version.parse("0.16.0"):

        def save(models, weights, output_dir):
            if accelerator.is_main_process:
                torch.save(ema.state_dict(), Path(output_dir, "ema.pt"))

        accelerator.register_save_state_pre_hook(save)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(4, 2)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for kept, live in zip(ema.parameters(), accelerator.unwrap_model(model).parameters()):
            kept.lerp_(live, 0.5)
    accelerator.save_state(str(Path(folder, library)))
    accelerator.wait_for_everyone()
    found = list(Path(folder, library).rglob("ema.pt"))
    weights = [torch.load(path, weights_only=True) for path in found]
    return deepspeed_plugin, convert_tensors([dict(each) for each in weights])


def test_hook_behind_a_version_check_saves_the_ema_weights(results):
    theirs, ours = results["gate"]
    assert ours == theirs
    assert ours[0][0] is None
    assert len(ours[0][1]) == 1


# ---------------------------------------------------------------- local SGD


def make_batch(rank, step):
    return torch.tensor([[1.0 + rank, 0.5 * step], [step - rank, 2.0]])


def run_local_sgd(library, local_steps, num_steps, is_even=True):
    lib = import_module(library)
    LocalSGD = import_module(f"{library}.local_sgd").LocalSGD
    torch.manual_seed(0)
    accelerator = lib.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    apart = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=local_steps, enabled=True) as block:
        for step in range(num_steps):
            with accelerator.accumulate(model):
                batch = make_batch(accelerator.process_index, step)
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            block.step()
            apart.append(accelerator.unwrap_model(model).weight.detach().flatten().tolist())
    return apart, [p.detach().flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]


def run_local_sgd_by_hand(world_size, local_steps, num_steps):
    """Train replicas with separate optimizers in plain PyTorch, averaged every `local_steps` steps and at the end.

    Returns:
        For each replica, its weight after each step and its final parameters.
    """
    torch.manual_seed(0)
    first = torch.nn.Linear(2, 1)
    models = [torch.nn.Linear(2, 1) for _ in range(world_size)]
    for model in models:
        model.load_state_dict(first.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]

    def average():
        with torch.no_grad():
            for group in zip(*(model.parameters() for model in models)):
                mean = torch.stack(list(group)).mean(0)
                for parameter in group:
                    parameter.copy_(mean)

    held = [[] for _ in models]
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            model(make_batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % local_steps == 0:
            average()
        for rank, model in enumerate(models):
            held[rank].append(model.weight.detach().flatten().tolist())
    average()
    return [
        (held[rank], [p.detach().flatten().tolist() for p in model.parameters()]) for rank, model in enumerate(models)
    ]


def test_local_sgd_averages_replicas_every_few_steps(results):
    theirs, ours = results["local_sgd"]
    world_size = len(ours)
    expected = run_local_sgd_by_hand(world_size, 3, 7)
    for (held, end), (held_by_hand, end_by_hand) in zip(ours, expected):
        assert torch.allclose(torch.tensor(held), torch.tensor(held_by_hand), atol=1e-6)
        for one, other in zip(end, end_by_hand):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6)
    if world_size > 1:
        assert ours[0][0][0] != ours[1][0][0]  # different between two averages
        assert ours[0][0][2] == ours[1][0][2]  # equal at the third step
        assert ours[0][1] == ours[1][1]
    # Accelerate gives the same weights.
    assert torch.allclose(torch.tensor(ours[0][0]), torch.tensor(theirs[0][0]), atol=1e-6)
    assert torch.allclose(torch.tensor(ours[0][1][0]), torch.tensor(theirs[0][1][0]), atol=1e-6)


def compare_with_ddp():
    """Train with batches of 4 on rank 0 and 2 on rank 1. Averaged after each step, plain SGD must equal DDP."""
    from headway import Accelerator, LocalSGD

    ends = []
    for is_local in (True, False):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        count = 4 - 2 * accelerator.process_index
        with LocalSGD(accelerator, model, 1, enabled=is_local) as block:
            for step in range(3):
                with accelerator.accumulate(model):
                    batch = torch.randn(count, 2, generator=torch.Generator().manual_seed(step))
                    accelerator.backward(model(batch).pow(2).mean(), weight=count)
                    optimizer.step()
                    optimizer.zero_grad()
                block.step()
        ends.append([value.double().flatten().tolist() for value in model.state_dict().values()])
        accelerator.free_memory()
    return ends


def test_local_sgd_weighs_by_samples_like_ddp():
    first, second = run_ranks(compare_with_ddp, 2)
    for (local, together), name in ((first, "rank 0"), (second, "rank 1")):
        for one, other in zip(local, together):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6), name
    assert first[0] == second[0]


def gather_tensors_and_strings():
    """Return the message if only rank 1 passes objects to `gather_for_metrics`."""
    from headway.compat.accelerate.accelerator import AccelerateAccelerator

    accelerator = AccelerateAccelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2))
    for batch in loader:
        try:
            accelerator.gather_for_metrics(["a", "b"] if accelerator.process_index else batch)
        except HeadwayError as error:
            return str(error)
    return "no error"


def test_gather_of_tensors_and_objects_names_what_each_rank_gathers():
    """Headway's own check of the shapes is a collective, too, which must not be the one that differs."""
    for message in run_ranks(gather_tensors_and_strings, 2):
        assert re.search(r"rank 0: gather #\d+ .* of \[\*\]\|torch.float32", message), message
        assert re.search(r"rank 1: gather #\d+ .* of \[\]", message), message


def get_local_sgd_error():
    from headway import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    try:
        with LocalSGD(accelerator, model, 2):
            pass
    except HeadwayError as error:
        return str(error)


def test_local_sgd_rejects_automatic_microbatching():
    assert all("microbatching='auto'" in message for message in run_ranks(get_local_sgd_error, 2))


# ---------------------------------------------------------------- the rest of the Accelerator


def trigger_sync(library):
    lib = import_module(library)
    torch.manual_seed(0)
    accelerator = lib.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with accelerator.no_sync(model):
        first = model(make_batch(accelerator.process_index, 0)).mean()
        second = model(make_batch(accelerator.process_index, 1)).mean()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    return accelerator.unwrap_model(model).weight.grad.tolist()


def test_trigger_sync_in_backward_reduces_gradients_kept_by_no_sync(results):
    theirs, ours = results["triggered"]
    assert ours[0] == ours[-1]
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs))


def set_windows_by_hand(library, by_setter):
    lib = import_module(library)
    torch.manual_seed(0)
    accelerator = lib.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    for step in range(4):
        last = step % 2 == 1
        if by_setter:
            accelerator.sync_gradients = last
        else:
            accelerator.gradient_state._set_sync_gradients(last)
        seen.append((accelerator.sync_gradients, lib.state.GradientState().sync_gradients))
        accelerator.backward(model(make_batch(accelerator.process_index, step)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return seen, accelerator.unwrap_model(model).weight.tolist()


@pytest.mark.parametrize("way", ["setter", "private"])
def test_windows_set_by_hand(results, way):
    theirs, ours = results[way]
    for (seen, weight), (their_seen, their_weight) in zip(ours, theirs):
        assert seen == their_seen == [(False, False), (True, True)] * 2
        assert torch.allclose(torch.tensor(weight), torch.tensor(their_weight), atol=1e-6)


def read_gradient_state(library):
    lib = import_module(library)
    accelerator = lib.Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(torch.arange(11.0)[:, None])
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(data, batch_size=2))
    state = lib.state.GradientState()
    rows = [(state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)]
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            rows.append((state.in_dataloader, state.end_of_dataloader, state.remainder, state.sync_gradients,
                         accelerator.sync_gradients, state.active_dataloader is loader))  # fmt: skip
    rows.append((state.in_dataloader, state.end_of_dataloader, state.remainder))
    return rows


def test_gradient_state_follows_the_loader(results):
    theirs, ours = results["loaders"]
    assert ours == theirs


def show_bars(library):
    tqdm = import_module(f"{library}.utils").tqdm
    import_module(library).PartialState(cpu=True)
    return [(bar.disable, list(bar)) for bar in (tqdm(range(3)), tqdm(range(3), main_process_only=False, disable=None),
                                                 tqdm(total=2, disable=True, iterable=[1, 2]))]  # fmt: skip


def test_progress_bar_is_shown_on_one_process_per_machine(results):
    theirs, ours = results["bars"]
    assert ours == theirs
    assert [each[0][0] for each in ours] == [False, True][: len(ours)]


def shard_with_fsdp2_prepare_model():
    from headway.compat.accelerate.accelerator import AccelerateAccelerator
    from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin
    from headway.compat.accelerate.sharded import fsdp2_prepare_model

    accelerator = AccelerateAccelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    x = torch.ones(3, 4)
    before = model(x)
    made = fsdp2_prepare_model(accelerator, model)
    plugin = accelerator.state.fsdp_plugin
    mesh = import_module("headway").ParallelismConfig(dp_shard_size=2).build_device_mesh("cpu")
    assert [mesh[joint].size() for joint in ("dp", "dp_shard_cp", "dp_cp")] == [2, 2, 2]
    return (
        [type(each).__name__ for each in made.parameters()], fsdp2_prepare_model(accelerator, made) is made,
        torch.allclose(before, made(x)), plugin.fsdp_version, str(plugin.state_dict_type), type(plugin.cpu_offload).__name__,
    )  # fmt: skip


def test_fsdp2_prepare_model_shards_with_a_version_one_plugin():
    expected = (["DTensor"] * 4, True, True, 2, "StateDictType.FULL_STATE_DICT", "OffloadPolicy")
    assert run_ranks(shard_with_fsdp2_prepare_model, 2) == [expected] * 2


FSDP_VARIABLES = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


def make_model_and_rows():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)), torch.randn(24, 5)


def train_by_hand():
    model, rows = make_model_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        batch = rows[8 * step : 8 * step + 8]
        torch.nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_with_plugin(way, folder):
    from torch.distributed import fsdp

    from headway.compat.accelerate.accelerator import AccelerateAccelerator
    from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin

    os.environ |= FSDP_VARIABLES if way == "environment" else {}
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD, backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        state_dict_type=fsdp.StateDictType.FULL_STATE_DICT, cpu_offload=fsdp.CPUOffload(offload_params=False),
    )  # fmt: skip
    accelerator = AccelerateAccelerator(cpu=True, fsdp_plugin=None if way == "environment" else plugin)
    model, rows = make_model_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
    for batch in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4:]))
        optimizer.step()
        optimizer.zero_grad()
    kinds = [type(each).__name__ for each in model.parameters()]
    accelerator.save_state(folder)
    for each in model.parameters():
        torch.nn.init.zeros_(each)
    accelerator.load_state(folder)
    return kinds, accelerator.get_state_dict(model), str(accelerator.distributed_type)


@pytest.mark.parametrize("way", ["plugin", "environment"])
def test_version_one_plugin_trains_sharded(way, tmp_path):
    expected = train_by_hand()
    ranks = run_ranks(train_with_plugin, 2, way, str(tmp_path / "state"))
    assert [(kinds, kind) for kinds, _, kind in ranks] == [(["DTensor"] * 4, "DistributedType.FSDP")] * 2
    whole = ranks[0][1]  # on rank 0 only, because of FULL_STATE_DICT
    assert whole.keys() == expected.keys()
    assert all(torch.allclose(whole[name], expected[name], atol=1e-6) for name in expected)


def offload_repeatedly(folder):
    from headway import Accelerator, dispatch_model

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    for turn in range(20):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        accelerator.wait_for_everyone()
        made = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=f"{folder}/{turn}")
        assert made(torch.ones(1, 2)).shape == (1, 2)


def test_ranks_can_offload_the_same_weights_to_one_folder_at_once(tmp_path):
    run_ranks(offload_repeatedly, 2, str(tmp_path))
