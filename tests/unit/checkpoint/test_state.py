import copy

import pytest
import torch

from headway.checkpoint.layout import read_tensors, verify
from headway.checkpoint.manifest import Manifest
from headway.checkpoint.restoring import misfits, restore
from headway.checkpoint.state import Collected, Parts, collect
from headway.errors import CheckpointError
from tests.unit.checkpoint.test_layout import save


def build(seed=0, tied=False):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    if tied:
        model[2].weight = model[0].weight
    return model


def parts(model, optimizer, **others):
    return Parts([model], [optimizer], others, lambda m: m.state_dict().items())


def train(model, optimizer, scheduler=None, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        x = torch.randn(8, 4, generator=generator)
        losses.append(optimizer.step(closure).item())
        if scheduler is not None:
            scheduler.step()
    return losses


def through_files(collected, folder):
    save(folder, tensors=collected.tensors, aliases=collected.aliases, state=collected.state)
    manifest = verify(folder / "checkpoint_1")
    return Collected(
        dict(read_tensors(folder / "checkpoint_1", manifest)), dict(manifest.aliases), dict(manifest.state)
    )


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "betas": (0.5, 0.9)}]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_bit_for_bit(kind, tmp_path):
    model = build()
    optimizer = MAKERS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    train(model, optimizer, scheduler)
    found = through_files(collect(parts(model, optimizer, scheduler=[scheduler])), tmp_path)
    wanted = train(model, optimizer, scheduler, seed=2)

    other = build(seed=9)
    optimizer = MAKERS[kind](list(other.parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    into = parts(other, optimizer, scheduler=[scheduler])
    assert misfits(into, found) == []
    restore(into, found)
    assert train(other, optimizer, scheduler, seed=2) == wanted
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(mine, theirs)


def test_state_in_another_dtype_than_the_parameters_stays_exact(tmp_path):
    model = build().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.randn(p.shape)
    found = through_files(collect(parts(model, optimizer)), tmp_path)
    other = build(seed=9).to(torch.bfloat16)
    into = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    restore(parts(other, into), found)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], into.state[q]["momentum_buffer"])


def test_tied_weights_are_written_once(tmp_path):
    model = build(tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    collected = collect(parts(model, optimizer))
    assert collected.aliases == {"model/0/2.weight": "model/0/0.weight"}
    other = build(seed=9, tied=True)
    into = parts(other, torch.optim.Adam(other.parameters()))
    found = through_files(collected, tmp_path)
    assert misfits(into, found) == []
    restore(into, found)
    assert torch.equal(other[2].weight, model[0].weight)


def test_parameters_are_found_by_name_in_another_order(tmp_path):
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    found = through_files(collect(parts(model, optimizer)), tmp_path)
    other = build(seed=9)
    into = torch.optim.Adam(list(other.parameters())[::-1])
    restore(parts(other, into), found)
    assert torch.equal(into.state[other[2].bias]["exp_avg"], optimizer.state[model[2].bias]["exp_avg"])


def test_every_misfit_is_listed():
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    found = collect(parts(model, optimizer, custom=[optimizer]))
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    told = "\n".join(misfits(parts(other, torch.optim.SGD(other.parameters(), 0.1)), found))
    assert "model/0/0.weight has the shape (5, 4), the checkpoint's (4, 4)" in told
    assert "model/0/2.bias is in the checkpoint, the model has none" in told
    assert "optimizer 0 is SGD; the saved one was Adam" in told
    assert "only saved: 0/2.bias" in told
    renamed = torch.nn.ModuleDict(
        {"1": torch.nn.BatchNorm1d(4), "00": torch.nn.Linear(4, 4), "2": torch.nn.Linear(4, 4)}
    )
    told = "\n".join(misfits(parts(renamed, torch.optim.Adam(renamed.parameters())), found))
    assert "model/0/00.weight is not in the checkpoint; it has 0.weight" in told


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Fussy(Counter):
    def load_state_dict(self, state):
        if state["count"]:
            raise ValueError("I do not like it")


def test_a_state_that_is_refused_changes_nothing():
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    counter, fussy = Counter(), Fussy()
    counter.count = fussy.count = 3
    found = copy.deepcopy(collect(parts(model, optimizer, custom=[counter, fussy])))
    other = build(seed=9)
    into = torch.optim.Adam(other.parameters())
    counter, fussy, before = Counter(), Fussy(), copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"I do not like it.*nothing was changed"):
        restore(parts(other, into, custom=[counter, fussy]), found)
    assert counter.count == 0
    assert not into.state
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


class WithExtra(torch.nn.Linear):
    mood = "calm"

    def get_extra_state(self):
        return {"mood": self.mood, "table": torch.arange(3)}

    def set_extra_state(self, state):
        self.mood = state["mood"]


def test_extra_state_of_modules_comes_back(tmp_path):
    model = torch.nn.Sequential(WithExtra(2, 2))
    model[0].mood = "wild"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = through_files(collect(parts(model, optimizer)), tmp_path)
    other = torch.nn.Sequential(WithExtra(2, 2))
    restore(parts(other, torch.optim.SGD(other.parameters(), 0.1)), found)
    assert other[0].mood == "wild"


def test_manifests_of_states_are_plain_json(tmp_path):
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    collected = collect(parts(model, optimizer))
    encoded = Manifest({}, {}, {}, collected.state, {}).encode()
    assert b"pickle" not in encoded
