"""Test the objects that `prepare()` accepts, returns and refuses."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, DataLoaderConfiguration
from headway.core.data.loader import PreparedLoader
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler
from headway.errors import ConfigError, LossError, PrepareError, StateError
from tests.unit.core.data.fakes import Numbers


def build_objects():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(Numbers(4)), torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_objects_are_returned_in_the_order_given():
    model, optimizer, loader, scheduler = build_objects()
    made = Accelerator(cpu=True).prepare(scheduler, None, loader, optimizer, model)
    assert [type(each) for each in made] == [
        PreparedScheduler,
        type(None),
        PreparedLoader,
        PreparedOptimizer,
        nn.Linear,
    ]
    assert isinstance(made[0], torch.optim.lr_scheduler.LRScheduler)
    assert isinstance(made[2], DataLoader)
    assert isinstance(made[3], torch.optim.Optimizer)
    assert made[3].param_groups[0]["params"][0] is model.weight


def test_single_object_is_returned_alone_and_preparing_twice_changes_nothing():
    acc, given = Accelerator(cpu=True), build_objects()
    model = acc.prepare(given[0])
    assert model is given[0]
    assert acc.prepare(None) is None
    made = acc.prepare(*given)
    assert all(one is other for one, other in zip(acc.prepare(*made), made, strict=True))
    again = acc.prepare(given[0], given[1])
    assert again[0] is made[0]
    assert again[1] is made[1]


def test_prepare_methods_for_each_type():
    acc, (model, optimizer, loader, scheduler) = Accelerator(cpu=True), build_objects()
    assert acc.prepare_model(model) is model
    assert acc.prepare_optimizer(optimizer).optimizer is optimizer
    assert isinstance(acc.prepare_data_loader(loader), PreparedLoader)
    assert acc.prepare_scheduler(scheduler).scheduler is scheduler


UNKNOWN = ["text", 3, [1], {"a": 1}, object(), Numbers(3), nn.Linear, lambda: None]


@pytest.mark.parametrize("wrong", UNKNOWN)
def test_unknown_object_is_returned_with_one_warning(wrong, caplog):
    model, acc = nn.Linear(1, 1), Accelerator(cpu=True)
    for _ in range(2):
        assert acc.prepare(model, wrong, None) == (model, wrong, None)
    assert acc.prepare(wrong) is wrong
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert f"{type(wrong).__module__}.{type(wrong).__qualname__}, which is not a model" in messages[0]
    assert "strict=True" in messages[0]


@pytest.mark.parametrize("wrong", UNKNOWN)
def test_unknown_object_is_refused_with_strict(wrong):
    with pytest.raises(
        PrepareError, match=rf"{type(wrong).__qualname__}.*not a model .*Wrap data in a torch DataLoader"
    ):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), wrong, strict=True)


def test_none_causes_no_warning(caplog):
    assert Accelerator(cpu=True).prepare(None, nn.Linear(1, 1))[0] is None
    assert not caplog.records


def test_no_objects_and_wrong_placements_are_refused():
    acc = Accelerator(cpu=True)
    with pytest.raises(PrepareError, match="got nothing"):
        acc.prepare()
    with pytest.raises(ConfigError, match="2 entries for 1 objects"):
        acc.prepare(nn.Linear(1, 1), device_placement=[True, False])


def test_parameters_on_meta_are_refused():
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    with pytest.raises(PrepareError, match=r"2 parameters of .* on the meta device.*'weight'"):
        Accelerator(cpu=True).prepare(model)


def test_optimizer_of_another_model_is_refused():
    model, other = nn.Linear(2, 2), nn.Linear(3, 1)
    with pytest.raises(PrepareError, match=r"SGD has 2 parameters .*\(1, 3\).*exactly the model"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    acc = Accelerator(cpu=True)
    made = acc.prepare(model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    assert made[0] is model


def test_schedule_without_its_optimizer_is_refused():
    _, _, _, scheduler = build_objects()
    with pytest.raises(PrepareError, match="StepLR follows an optimizer that is not prepared"):
        Accelerator(cpu=True).prepare(scheduler)


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        (3.0, {}, "got a float"),
        ({"loss": 1}, {}, "output.loss"),
        (torch.ones(3, requires_grad=True) * 1, {}, r"shape \(3,\)"),
        (torch.tensor(1.0), {}, "without a graph"),
        (torch.ones((), requires_grad=True) * 1, {"reduction": "max"}, "reduction='max'"),
        (torch.ones((), requires_grad=True) * 1, {"weight": -1}, "weight=-1"),
        (torch.ones((), requires_grad=True) * 1, {"weight": float("nan")}, "weight=nan"),
        (torch.ones((), requires_grad=True) * 1, {"weight": float("inf")}, "weight=inf"),
    ],
)
def test_invalid_loss_is_refused(loss, options, said):
    with pytest.raises(LossError, match=said):
        Accelerator(cpu=True).backward(loss, **options)


def test_non_blocking_is_set_by_the_configuration():
    assert not Accelerator(cpu=True).non_blocking
    for chosen in (True, False):
        acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=chosen))
        assert acc.non_blocking is chosen
        assert len(list(acc.prepare(DataLoader(Numbers(2))))) == 2  # no batch is moved, so there is no warning


def test_contradicting_settings_are_refused():
    with pytest.raises(ConfigError, match="both set the rule"):
        Accelerator(cpu=True, scheduler_ticks="updates", adjust_scheduler_to_accumulation=True)
    with pytest.raises(ConfigError, match="scheduler_ticks='epochs'"):
        Accelerator(cpu=True, scheduler_ticks="epochs")
    with pytest.raises(ConfigError, match="0 steps"):
        Accelerator(cpu=True, gradient_accumulation_steps=0)
    with pytest.raises(ConfigError, match="not a multiple"):
        Accelerator(cpu=True, global_batch_size=7).prepare(DataLoader(Numbers(20), batch_size=4))


def test_join_uneven_inputs_needs_prepared_models():
    with pytest.raises(StateError, match="Linear that is not prepared"):
        with Accelerator(cpu=True).join_uneven_inputs([nn.Linear(1, 1)]):
            pass
