"""Functions of the Accelerator on real ranks: order, splitting, triggers, seeds, files, and models prepared with DDP."""

import contextlib
import copy
import io
import random
import time

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProfileKwargs, set_seed, synchronize_rng_states
from headway.core.runtime import process
from headway.errors import PrepareError, StateError
from tests.distributed.ranks import run_ranks
from tests.unit.core.data.fakes import Numbers

# -------------------------------------------------------------------- decorators and order


def call_on_chosen_ranks():
    acc = Accelerator(cpu=True)
    rank, out = acc.process_index, {}
    with acc.split_between_processes({"a": [1, 2, 3], "b": (4, 5, 6)}, apply_padding=True) as part:
        out["split"] = part
    marks = {
        "main": acc.on_main_process, "local": acc.on_local_main_process(), "last": acc.on_last_process,
        "one": acc.on_process(process_index=1), "local one": acc.on_local_process(local_process_index=1),
    }  # fmt: skip
    out["ran"] = {name: mark(lambda value: value)(name) for name, mark in marks.items()}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        acc.print("hello", rank)
    out["printed"] = text.getvalue()

    out["untriggered"] = acc.check_trigger()
    if rank == 1:
        acc.set_trigger()
    out["triggered"] = [acc.check_trigger(), acc.check_trigger()]
    return out


def test_decorators_splits_and_triggers_act_on_the_right_ranks():
    first, second = run_ranks(call_on_chosen_ranks, 2)
    assert first["split"] == {"a": [1, 2], "b": (4, 5)}
    assert second["split"] == {"a": [3, 3], "b": (6, 6)}
    assert first["ran"] == {"main": "main", "local": "local", "last": None, "one": None, "local one": None}
    assert second["ran"] == {"main": None, "local": None, "last": "last", "one": "one", "local one": "local one"}
    assert (first["printed"], second["printed"]) == ("hello 0\n", "")
    for out in (first, second):
        assert (out["untriggered"], out["triggered"]) == (False, [True, False])


def go_first(folder):
    acc, out = Accelerator(cpu=True), []
    path = f"{folder}/made"
    for mark in (acc.main_process_first, acc.local_main_process_first):
        with mark():
            if acc.is_main_process:
                time.sleep(0.2)
                open(path + mark.__name__, "w").close()
            out.append(_exists(path + mark.__name__))
    try:
        with acc.main_process_first():
            if acc.is_main_process:
                raise KeyError("first")
            out.append("went on")
    except KeyError:
        out.append("raised")
    acc.wait_for_everyone()
    return out


def _exists(path):
    from pathlib import Path

    return Path(path).exists()


def test_main_process_goes_first_and_its_error_releases_the_others(tmp_path):
    assert run_ranks(go_first, 2, str(tmp_path), timeout=60) == [[True, True, "raised"], [True, True, "went on"]]


# -------------------------------------------------------------------- RNG states


def draw_random_numbers():
    rank = process.current().rank
    set_seed(3)
    common = (random.random(), float(numpy.random.rand()), float(torch.rand(1)))
    set_seed(3, device_specific=True)
    own = (random.random(), float(numpy.random.rand()), float(torch.rand(1)))
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["python", "numpy", "torch", "device", "generator"], generator)
    after = (
        random.random(),
        float(numpy.random.rand()),
        float(torch.rand(1)),
        float(torch.rand(1, generator=generator)),
    )
    random.seed(rank)
    synchronize_rng_states(["torch"])
    return common, own, after, random.random()


def test_random_states_are_equal_only_where_requested():
    ranks = run_ranks(draw_random_numbers, 2)
    common, own, after, untouched = zip(*ranks)
    assert common[0] == common[1] == own[0]
    assert not set(own[0]) & set(own[1])
    assert after[0] == after[1]
    assert untouched[0] != untouched[1]


# -------------------------------------------------------------------- uneven data


def join_uneven_inputs():
    acc = Accelerator(cpu=True)
    torch.manual_seed(0)
    model, loader = acc.prepare(nn.Linear(1, 1), DataLoader(Numbers(5), batch_size=2))
    optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    out = {"before": [batch.tolist() for batch in loader]}
    with acc.join_uneven_inputs([model], even_batches=False):
        rows = []
        for batch in loader:
            acc.backward(model(batch.float()[:, None]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            rows += batch.tolist()[: loader.num_valid]
        out["inside"] = rows
    out["after"] = (acc.even_batches, [batch.tolist() for batch in loader])
    try:
        with acc.join_uneven_inputs([nn.Linear(1, 1)]):
            pass
    except StateError as error:
        out["error"] = str(error)
    out["weight"] = model.weight.item()
    return out


def test_join_uneven_inputs():
    first, second = run_ranks(join_uneven_inputs, 2)
    assert sorted(first["inside"] + second["inside"]) == list(range(5))
    for out in (first, second):
        assert out["after"] == (True, out["before"])
        assert "not prepared" in out["error"]
    assert first["weight"] == second["weight"]


# -------------------------------------------------------------------- prepared models


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(self.norm(x))


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.tensor([float(index)])


def use_model_under_ddp(folder):
    acc, out = Accelerator(cpu=True, mixed_precision="bf16"), {}
    rank = acc.process_index
    torch.manual_seed(rank)  # DDP copies rank 0's values to all ranks
    net = Net()
    keys = list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model, prepared, loader = acc.prepare(net, optimizer, DataLoader(Rows(), batch_size=2))
    assert model is net
    assert isinstance(model, Net)
    assert acc.prepare(model) is model
    assert "forward" not in model.__dict__
    for inputs, targets in loader:
        with acc.autocast():
            loss = nn.functional.mse_loss(model(inputs), targets)
        acc.backward(loss)
        prepared.step()
        prepared.zero_grad()
    assert list(model.state_dict()) == list(acc.get_state_dict(model)) == keys
    out["state"] = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    twin = copy.deepcopy(model)
    store = io.BytesIO()
    torch.save(model, store)
    store.seek(0)
    assert type(twin) is type(torch.load(store, weights_only=False)) is Net
    try:
        acc.prepare(nn.parallel.DistributedDataParallel(Net()))
    except PrepareError as error:
        out["ddp"] = str(error)
    # On one rank only: a forward pass without gradients must not wait in a collective.
    if rank == 1:
        model.eval()
        with torch.no_grad():
            out["alone"] = model(torch.ones(2, 3)).shape
        model.train()
        with torch.inference_mode():
            model(torch.ones(2, 3))
    acc.wait_for_everyone()
    out["compiled"] = _compute_compiled_gradients(acc)
    with contextlib.suppress(KeyError), acc.profile(ProfileKwargs(output_trace_dir=folder)):
        torch.ones(2, 2) @ torch.ones(2, 2)
        raise KeyError
    acc.save({"rank": rank}, f"{folder}/object.pt")
    acc.save_model(model, f"{folder}/weights")
    out["saved"] = torch.load(f"{folder}/object.pt")["rank"]
    acc.free_memory()
    assert type(model) is Net
    return out


def _compute_compiled_gradients(acc):
    torch.manual_seed(1)
    inputs = torch.randn(4, 3) * (acc.process_index + 1)
    gradients = []
    for order in ("before", "after"):
        torch._dynamo.reset()
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        if order == "before":
            model = acc.prepare(torch.compile(net, backend="aot_eager"))
        else:
            model = torch.compile(acc.prepare(net), backend="aot_eager")
        with acc.autocast():
            loss = model(inputs).float().square().mean()
        acc.backward(loss)
        assert list(acc.get_state_dict(model)) == list(net.state_dict())
        gradients.append(net[0].weight.grad.tolist())
    return gradients


def test_model_under_ddp_keeps_its_class_and_state(tmp_path):
    from safetensors.torch import load_file

    first, second = run_ranks(use_model_under_ddp, 2, str(tmp_path))
    del first["state"]["norm.num_batches_tracked"]
    for name in first["state"]:
        assert first["state"][name] == second["state"][name], name
    assert second["alone"] == (2, 1)
    for out in (first, second):
        assert "give the bare model" in out["ddp"]
        assert out["saved"] == 0
        before, after = out["compiled"]
        assert before == after
        assert first["compiled"] == out["compiled"]
    assert sorted(path.name for path in tmp_path.glob("profile_*.json")) == ["profile_0.json", "profile_1.json"]
    saved = load_file(tmp_path / "weights" / "model.safetensors")
    assert saved["layer.weight"].tolist() == first["state"]["layer.weight"]


# -------------------------------------------------------------------- transformers


def train_language_model(folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    acc = Accelerator(cpu=True)
    torch.manual_seed(acc.process_index)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=31)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = acc.prepare(model, optimizer)
    tokens = torch.arange(8).reshape(2, 4) + acc.process_index
    model.train()
    acc.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    made = None
    if acc.is_main_process:  # on one rank only: generation must not wait for the others
        made = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=31).shape
    if acc.is_main_process:
        acc.unwrap_model(model).save_pretrained(f"{folder}/pretrained")
    acc.save_model(model, f"{folder}/weights")
    acc.save_model(model, f"{folder}/sharded", max_shard_size=600)
    if acc.is_main_process:
        config.save_pretrained(f"{folder}/weights")
        config.save_pretrained(f"{folder}/sharded")
    with torch.no_grad():
        return made, model(tokens * 0 + 1).logits.tolist()


def test_transformers_model_trains_generates_and_saves(tmp_path):
    from transformers import GPT2LMHeadModel

    (made, logits), (_, other) = run_ranks(train_language_model, 2, str(tmp_path))
    assert made[0] == 2
    assert logits == other
    for name in ("pretrained", "weights", "sharded"):
        again = GPT2LMHeadModel.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            assert torch.allclose(again(torch.ones(2, 4, dtype=torch.long)).logits, torch.tensor(logits), atol=1e-6), (
                name
            )
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1


def _run_three_trainings() -> list[float]:
    sums = []
    for turn in range(3):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        sums.append(accelerator.gather(torch.tensor([float(turn)])).sum().item())
        accelerator.end_training()
    return sums


def test_process_joins_several_groups_one_after_another() -> None:
    assert run_ranks(_run_three_trainings, 2) == [[0.0, 2.0, 4.0]] * 2
