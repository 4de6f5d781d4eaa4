"""Test that common mistakes of new users cause an error or a warning that names the correct call."""

import logging

import numpy
import pytest
import torch

from headway import Accelerator, EarlyStopping, ProjectConfiguration, load_checkpoint_and_dispatch
from headway.errors import CallError, ConfigError, DeviceMapError, StateError


@pytest.fixture
def accelerator(tmp_path):
    return Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))


@pytest.mark.parametrize("given", ["3", 2.5, None, float("nan")])
def test_number_of_epochs_must_be_whole(accelerator, given):
    with pytest.raises(ConfigError, match=r"epochs\(.*\): give the total number of epochs, a whole number"):
        next(accelerator.epochs(given))


@pytest.mark.parametrize("given", [2, 2.0, numpy.int64(2)])
def test_any_whole_number_of_epochs_is_accepted(accelerator, given):
    assert list(accelerator.epochs(given)) == [0, 1]


def test_epochs_may_be_infinite(accelerator):
    assert next(accelerator.epochs(float("inf"))) == 0


def test_save_model_with_exchanged_arguments(accelerator, tmp_path):
    with pytest.raises(CallError, match=r"write save_model\(model, save_directory\)"):
        accelerator.save_model(str(tmp_path), torch.nn.Linear(2, 1))


def test_early_stopping_refuses_arguments_of_lightning_with_a_remedy():
    with pytest.raises(CallError, match=r"no argument 'monitor': pass the metric itself: stopping.update\(loss\)"):
        EarlyStopping(monitor="val_loss", patience=3)
    with pytest.raises(CallError, match="did you mean patience"):
        EarlyStopping(patiense=3)


def test_memory_limit_without_a_device_is_refused_with_an_example(tmp_path):
    with pytest.raises(DeviceMapError, match=r"max_memory='20MB' is not a map; .*'cpu': '8GiB'"):
        load_checkpoint_and_dispatch(torch.nn.Linear(2, 1), tmp_path, device_map="auto", max_memory="20MB")


def train_once(accelerator, model, optimizer):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("prepares", [False, True])
def test_checkpoint_without_the_optimizer_warns(accelerator, caplog, prepares):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = accelerator.prepare(model)
    if prepares:
        optimizer = accelerator.prepare(optimizer)
    train_once(accelerator, model, optimizer)
    with caplog.at_level(logging.WARNING, "headway"):
        accelerator.save_state()
    assert ("no optimizer is prepared" in caplog.text) != prepares
    assert "middle of a window" not in caplog.text


@pytest.mark.parametrize("registers", [False, True])
def test_checkpoint_without_the_model_warns(accelerator, caplog, registers):
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    if registers:
        accelerator.register_for_checkpointing(model)
    with caplog.at_level(logging.WARNING, "headway"):
        accelerator.save_state()
    assert ("no model is prepared" in caplog.text) != registers


def test_accumulate_with_an_optimizer_instead_of_a_model(accelerator):
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    first, second, *optimizers = accelerator.prepare(
        *models, *(torch.optim.SGD(model.parameters(), 0.1) for model in models)
    )

    def train():
        for _ in range(2):
            for model, block, optimizer in (first, optimizers[0], optimizers[0]), (second, second, optimizers[1]):
                with accelerator.accumulate(block):
                    accelerator.backward(model(torch.ones(2, 2)).mean())
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(StateError, match=r"accumulate\(\) got PreparedOptimizer, which is not a model"):
        train()
