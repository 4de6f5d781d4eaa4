"""Test that the state of models, optimizers and other objects is collected and restored exactly, or not at all."""

import copy
import re
from collections import deque

import numpy
import pytest
import torch

from headway.core.checkpoint.format.dense import copy_tensor
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.loading.misfits import describe_casts, find_misfits, match_models
from headway.core.checkpoint.loading.restoring import restore_objects
from headway.core.checkpoint.state import CollectedState, StatefulObjects, collect_state
from headway.core.weights.tensor_bytes import get_raw_bytes
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.reading import read_tensors
from tests.unit.core.checkpoint.saved import save
from tests.unit.core.checkpoint.test_round_trip import assert_same


def build_model(seed=0, tied=False):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    if tied:
        model[2].weight = model[0].weight
    return model


def collect_objects(model, optimizer, **others):
    return StatefulObjects([model], [optimizer], others, lambda m: m.state_dict().items())


def train(model, optimizer, scheduler=None, steps=3, seed=1):
    """Train for some steps and return the losses."""
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


def save_and_read(collected, folder):
    """Save a collected state in `folder` and return the state that is read back."""
    save(folder, tensors=collected.tensors, aliases=collected.aliases, state=collected.state)
    manifest = verify_checkpoint(folder / "checkpoint_1")
    return CollectedState(
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
def test_training_continues_bit_for_bit(kind, tmp_path):
    model = build_model()
    optimizer = MAKERS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    train(model, optimizer, scheduler)
    found = save_and_read(collect_state(collect_objects(model, optimizer, scheduler=[scheduler])), tmp_path)
    expected = train(model, optimizer, scheduler, seed=2)

    other = build_model(seed=9)
    optimizer = MAKERS[kind](list(other.parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    into = collect_objects(other, optimizer, scheduler=[scheduler])
    assert find_misfits(into, found) == []
    restore_objects(into, found)
    assert train(other, optimizer, scheduler, seed=2) == expected
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(mine, theirs)


def test_state_of_another_dtype_than_the_parameters_stays_exact(tmp_path):
    model = build_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.randn(p.shape)
    found = save_and_read(collect_state(collect_objects(model, optimizer)), tmp_path)
    other = build_model(seed=9).to(torch.bfloat16)
    into = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    restore_objects(collect_objects(other, into), found)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], into.state[q]["momentum_buffer"])


def test_tied_weights_are_written_once(tmp_path):
    model = build_model(tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    collected = collect_state(collect_objects(model, optimizer))
    assert collected.aliases == {"model/0/2.weight": "model/0/0.weight"}
    other = build_model(seed=9, tied=True)
    into = collect_objects(other, torch.optim.Adam(other.parameters()))
    found = save_and_read(collected, tmp_path)
    assert find_misfits(into, found) == []
    restore_objects(into, found)
    assert torch.equal(other[2].weight, model[0].weight)


def test_parameters_are_found_by_name_in_another_order(tmp_path):
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    found = save_and_read(collect_state(collect_objects(model, optimizer)), tmp_path)
    other = build_model(seed=9)
    into = torch.optim.Adam(list(other.parameters())[::-1])
    restore_objects(collect_objects(other, into), found)
    assert torch.equal(into.state[other[2].bias]["exp_avg"], optimizer.state[model[2].bias]["exp_avg"])


def test_every_misfit_is_listed():
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    found = collect_state(collect_objects(model, optimizer, custom=[optimizer]))
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    told = "\n".join(find_misfits(collect_objects(other, torch.optim.SGD(other.parameters(), 0.1)), found))
    assert "model/0/0.weight has the shape (5, 4), the checkpoint's (4, 4)" in told
    assert "model/0/2.bias is in the checkpoint, the model has none" in told
    assert "optimizer 0 is SGD; the saved one was Adam" in told
    assert "only in the checkpoint: 2.bias" in told
    renamed = torch.nn.ModuleDict(
        {"1": torch.nn.BatchNorm1d(4), "00": torch.nn.Linear(4, 4), "2": torch.nn.Linear(4, 4)}
    )
    told = "\n".join(find_misfits(collect_objects(renamed, torch.optim.Adam(renamed.parameters())), found))
    assert "model/0/00.weight is not in the checkpoint; it has 0.weight" in told


class Counter:
    """Object with a count as its state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Fussy(Counter):
    """Counter that refuses any count except 0."""

    def load_state_dict(self, state):
        if state["count"]:
            raise ValueError("I do not like it")


def test_refused_state_changes_nothing():
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    counter, fussy = Counter(), Fussy()
    counter.count = fussy.count = 3
    found = copy.deepcopy(collect_state(collect_objects(model, optimizer, custom=[counter, fussy])))
    other = build_model(seed=9)
    into = torch.optim.Adam(other.parameters())
    counter, fussy, before = Counter(), Fussy(), copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"I do not like it.*nothing was changed"):
        restore_objects(collect_objects(other, into, custom=[counter, fussy]), found)
    assert counter.count == 0
    assert not into.state
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


class WithExtra(torch.nn.Linear):
    """Linear layer with extra state."""

    mood = "calm"

    def get_extra_state(self):
        return {"mood": self.mood, "table": torch.arange(3)}

    def set_extra_state(self, state):
        self.mood = state["mood"]


def test_extra_state_of_modules_is_restored(tmp_path):
    model = torch.nn.Sequential(WithExtra(2, 2))
    model[0].mood = "wild"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = save_and_read(collect_state(collect_objects(model, optimizer)), tmp_path)
    other = torch.nn.Sequential(WithExtra(2, 2))
    restore_objects(collect_objects(other, torch.optim.SGD(other.parameters(), 0.1)), found)
    assert other[0].mood == "wild"


def test_manifests_of_states_are_plain_json(tmp_path):
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    collected = collect_state(collect_objects(model, optimizer))
    encoded = Manifest({}, {}, {}, collected.state, {}).encode()
    assert b"pickle" not in encoded


def collect_custom_objects(*objects):
    return StatefulObjects([], [], {"custom": objects}, lambda m: m.state_dict().items())


class Broken(WithExtra):
    """Layer that refuses any mood except "calm"."""

    def set_extra_state(self, state):
        if state["mood"] != "calm":
            raise ValueError("no such mood")


def test_refused_extra_state_leaves_every_model_unchanged():
    saved = [build_model(), torch.nn.Sequential(WithExtra(2, 2))]
    saved[1][0].mood = "wild"
    export = lambda m: m.state_dict().items()  # noqa: E731
    found = copy.deepcopy(collect_state(StatefulObjects(saved, [], {}, export)))
    first, calm, broken = build_model(seed=9), torch.nn.Sequential(WithExtra(2, 2)), torch.nn.Sequential(Broken(2, 2))
    before = copy.deepcopy(first.state_dict())
    with pytest.raises(CheckpointError, match=r"no such mood\); nothing was changed"):
        restore_objects(StatefulObjects([first, broken], [], {}, export), found)
    assert all(torch.equal(before[name], value) for name, value in first.state_dict().items())
    two = StatefulObjects([first, calm], [], {"custom": [Fussy()]}, export)
    found.state["custom"] = [{"count": 1}]
    with pytest.raises(CheckpointError, match="nothing was changed"):
        restore_objects(two, found)
    assert calm[0].mood == "calm"


def test_extra_state_that_is_a_tensor_is_restored(tmp_path):
    class Scaled(torch.nn.Linear):
        scale = torch.zeros(2)

        def get_extra_state(self):
            return self.scale.clone()

        def set_extra_state(self, state):
            self.scale = state

    saved, other = Scaled(2, 2), Scaled(2, 2)
    saved.scale = torch.ones(2)
    optimizer, into = torch.optim.SGD(saved.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    restore_objects(
        collect_objects(other, into), save_and_read(collect_state(collect_objects(saved, optimizer)), tmp_path)
    )
    assert torch.equal(other.scale, torch.ones(2))


class Clinging(Counter):
    """Counter whose state is its own list, and which cannot load a state while `is_stuck`."""

    def __init__(self):
        super().__init__()
        self.items, self.is_stuck = [1, 2], False

    def state_dict(self):
        return {"items": self.items}

    def load_state_dict(self, state):
        if self.is_stuck:
            raise RuntimeError("I am stuck")
        self.items.clear()
        self.items.extend(state["items"])


def test_undo_continues_after_a_failed_step_and_names_it():
    class Sticks(Clinging):
        """Counter that cannot load a second state."""

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.is_stuck = True

    found = CollectedState(
        state={"extra": [], "optimizer": [], "custom": [{"items": [9]}, {"items": [9]}, {"count": 1}]}
    )
    clinging, sticks = Clinging(), Sticks()
    with pytest.raises(
        CheckpointError, match=r"do not like it\); but this state could not be restored.*custom 1 .*I am stuck"
    ):
        restore_objects(collect_custom_objects(clinging, sticks, Fussy()), found)
    assert clinging.items == [1, 2]


def test_load_that_fails_on_another_rank_is_undone_here():
    counter = Counter()
    found = CollectedState(state={"extra": [], "optimizer": [], "custom": [{"count": 5}]})
    with pytest.raises(CheckpointError, match="rank 1: it broke"):
        restore_objects(
            collect_custom_objects(counter), found, exchange_errors=lambda failure: [failure or "rank 1: it broke"]
        )
    assert counter.count == 0


def test_undo_restores_the_optimizers_own_tensors():
    model = build_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.randn(p.shape)
    before = {p: entry["momentum_buffer"] for p, entry in optimizer.state.items()}
    found = copy.deepcopy(collect_state(collect_objects(model, optimizer)))
    found.state["optimizer"][0]["groups"][0]["lr"] = 7.0
    with pytest.raises(CheckpointError):
        restore_objects(
            collect_objects(model, optimizer), found, exchange_errors=lambda failure: ["another rank failed"]
        )
    assert all(optimizer.state[p]["momentum_buffer"] is tensor for p, tensor in before.items())
    assert optimizer.param_groups[0]["lr"] == 0.1


class Memory(torch.optim.SGD):
    """Optimizer whose state is any value, not only tensors."""

    def remember(self, value):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = value(p)


def make_nested_state(p):
    return {
        0: torch.full(p.shape, 0.1), (1, "x"): "text", "mode": "full", "table": numpy.arange(3, dtype=numpy.float32),
        "deep": {"history": [torch.full(p.shape, 0.2, dtype=torch.float64)], "pair": (torch.ones(1), "word")},
        "queue": deque([torch.full((2,), 0.3)], maxlen=4), "low": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip


def test_nested_state_keeps_its_keys_types_and_dtypes(tmp_path):
    model, other = build_model().to(torch.bfloat16), build_model(seed=9).to(torch.bfloat16)
    optimizer, into = Memory(model.parameters(), 0.1), Memory(other.parameters(), 0.1)
    optimizer.remember(make_nested_state)
    optimizer.state["calls"] = {"count": 3, 2: torch.full((1,), 0.4)}
    restore_objects(
        collect_objects(other, into), save_and_read(collect_state(collect_objects(model, optimizer)), tmp_path)
    )
    for p in other.parameters():
        assert_same(into.state[p], make_nested_state(p))
    assert_same(into.state["calls"], {"count": 3, 2: torch.full((1,), 0.4)})


def test_state_of_a_parameter_that_left_its_group_is_refused():
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(CheckpointError, match=r"optimizer 0 keeps state of a tensor of shape \(4,\) that is in none"):
        collect_state(collect_objects(model, optimizer))
    optimizer = Memory(model.parameters(), 0.1)
    optimizer.state[0] = {"x": 1}
    with pytest.raises(CheckpointError, match="keeps state under 0"):
        collect_state(collect_objects(model, optimizer))


def build_with_buffer(value):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("held", value)
    return model


def make_other_values(value):
    if value.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(value.shape), 1.0, 0, value.dtype)
    if value.is_sparse:
        return value * 0
    other = copy_tensor(value)
    get_raw_bytes(other).zero_()
    return other.as_strided(value.shape, value.stride()) if other.numel() == value.numel() == 1 else other


BUFFERS = {
    "uint4": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.uint4),
    "int4": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.int4),
    "bits8": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.bits8),
    "strided": torch.arange(9.0)[1:2].as_strided((1,), (5,)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_every_type_are_restored(kind, tmp_path):
    saved, other = build_with_buffer(BUFFERS[kind]), build_with_buffer(make_other_values(BUFFERS[kind]))
    optimizer, into = torch.optim.SGD(saved.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    found = save_and_read(collect_state(collect_objects(saved, optimizer)), tmp_path)
    assert find_misfits(collect_objects(other, into), found) == []
    restore_objects(collect_objects(other, into), found)
    assert_same(other.held, BUFFERS[kind])


@pytest.mark.filterwarnings("ignore")
def test_quantized_buffers_are_restored(tmp_path):
    value = torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.qint8)
    saved, other = build_with_buffer(value), build_with_buffer(make_other_values(value))
    optimizer, into = torch.optim.SGD(saved.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    restore_objects(
        collect_objects(other, into), save_and_read(collect_state(collect_objects(saved, optimizer)), tmp_path)
    )
    assert_same(other.held, value)
    assert other.held.q_scale() == 0.1


def test_expanded_buffers_are_restored_if_the_values_allow(tmp_path):
    saved, other = build_with_buffer(torch.ones(1, 3).expand(4, 3)), build_with_buffer(torch.zeros(1, 3).expand(4, 3))
    optimizer, into = torch.optim.SGD(saved.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    found = save_and_read(collect_state(collect_objects(saved, optimizer)), tmp_path)
    assert find_misfits(collect_objects(other, into), found) == []
    restore_objects(collect_objects(other, into), found)
    assert torch.equal(other.held, torch.ones(4, 3))
    assert other.held.stride() == (0, 1)
    found.tensors["model/0/held"] = torch.arange(12.0).reshape(4, 3)
    assert "elements that share memory" in find_misfits(collect_objects(other, into), found)[0]


@pytest.mark.parametrize("name", ["\ud800", "\ud800\udc00", "a\0b", "\\ud800"])
def test_parameters_with_unusual_names_are_restored(name, tmp_path):
    saved, other = torch.nn.ParameterDict({name: torch.ones(2)}), torch.nn.ParameterDict({name: torch.zeros(2)})
    optimizer, into = torch.optim.Adam(saved.parameters()), torch.optim.Adam(other.parameters())
    saved[name].square().sum().backward()
    optimizer.step()
    found = save_and_read(collect_state(collect_objects(saved, optimizer)), tmp_path)
    assert find_misfits(collect_objects(other, into), found) == []
    restore_objects(collect_objects(other, into), found)
    assert torch.equal(other[name], saved[name])
    assert torch.equal(into.state[other[name]]["exp_avg"], optimizer.state[saved[name]]["exp_avg"])


def build_exported(tensor):
    """Return a model with this buffer, and a function that exports the buffer."""
    return build_with_buffer(tensor), lambda m: [("held", m.held)]


@pytest.mark.parametrize(("own", "saved", "match"), [
    (torch.zeros(2, dtype=torch.int8), torch.ones(2), r"is of torch\.int8, the checkpoint's of torch\.float32"),
    (torch.zeros(2), torch.ones(2, dtype=torch.complex64), r"is of torch\.float32"),
    (torch.zeros(2, dtype=torch.int8), torch.tensor([1, 300]), "too large for it"),
    (torch.zeros(2, dtype=torch.float16), torch.tensor([1.0, 1e30]), "too large for it"),
    (torch.zeros(2, dtype=torch.uint8).view(torch.int4), torch.ones(2, dtype=torch.uint8), r"is of torch\.int4"),
    (torch.zeros(2, device="meta"), torch.ones(2), "meta device"),
])  # fmt: skip
def test_values_that_a_cast_would_change_are_refused(own, saved, match):
    (model, export), (other, _) = build_exported(saved), build_exported(own)
    found = collect_state(StatefulObjects([model], [], {}, export))
    (problem,) = find_misfits(StatefulObjects([other], [], {}, export), found)
    assert re.search(match, problem)


def test_casts_are_reported():
    (model, export), (other, _) = (
        build_exported(torch.ones(2, dtype=torch.float64)),
        build_exported(torch.zeros(2, dtype=torch.bfloat16)),
    )
    found, into = collect_state(StatefulObjects([model], [], {}, export)), StatefulObjects([other], [], {}, export)
    assert find_misfits(into, found) == []
    assert describe_casts(match_models(into, found)) == ["model/0/held: float64 -> bfloat16"]
    restore_objects(into, found)
    assert torch.equal(other.held, torch.ones(2, dtype=torch.bfloat16))
