"""Test the warning about parameters that get gradients but are in no optimizer, and that correct programs get none."""

from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.extras import untrained_parameters

SGD = torch.optim.SGD
WARNING = "2 trainable parameters get gradients, but no optimizer updates them (0.weight, 0.bias)"


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


class Program:
    """Training loop whose optimizer holds only the last layer. Subclasses change what happens to the first layer."""

    num_steps = 1

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.num_steps)
        self.model: Any = build_model()
        self.optimizers: list[Any] = [SGD(self.model[1].parameters(), lr=0.1)]
        self.prepare()

    def prepare(self) -> None:
        self.model, *self.optimizers = self.accelerator.prepare(self.model, *self.optimizers)

    def compute_loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, 3)).square().mean()  # type: ignore[no-any-return]

    def run(self, updates: int = 3) -> None:
        for number in range(updates * self.num_steps):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.compute_loss())
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            self.end_update(number)

    def end_update(self, number: int) -> None:
        pass


class Forgotten(Program):
    pass


class ForgottenInWindows(Program):
    num_steps = 2


class AllHeld(Program):
    def prepare(self) -> None:
        self.optimizers = [SGD(self.model.parameters(), lr=0.1)]
        super().prepare()


class InTwoOptimizers(Program):
    def prepare(self) -> None:
        self.optimizers.append(SGD(self.model[0].parameters(), lr=0.2))
        super().prepare()


class Frozen(Program):
    def prepare(self) -> None:
        self.model[0].requires_grad_(False)
        super().prepare()


class UnusedHead(Program):
    """The head is trained by nobody, and used only in evaluation."""

    def prepare(self) -> None:
        self.model.append(nn.Linear(1, 1))
        self.optimizers = [SGD(self.model[:2].parameters(), lr=0.1)]
        super().prepare()

    def compute_loss(self) -> torch.Tensor:
        return self.model[1](self.model[0](torch.ones(2, 3))).square().mean()  # type: ignore[no-any-return]


class PreparedLater(Program):
    def end_update(self, number: int) -> None:
        if number == 0:
            self.optimizers.append(self.accelerator.prepare(SGD(self.model[0].parameters(), lr=0.1)))


class AddedLater(Program):
    def end_update(self, number: int) -> None:
        if number == 0:
            self.optimizers[0].add_param_group({"params": self.model[0].parameters()})


class UnpreparedOptimizer(Program):
    """The script steps the optimizer of the first layer now and then."""

    def prepare(self) -> None:
        self.other = SGD(self.model[0].parameters(), lr=0.1)
        super().prepare()

    def end_update(self, number: int) -> None:
        if number == 2:
            self.other.step()


class OptimizerOfAnotherAccelerator(Program):
    def prepare(self) -> None:
        super().prepare()
        self.second = Accelerator(cpu=True)
        self.other = self.second.prepare(SGD(self.model[0].parameters(), lr=0.1))


class UpdatedByHand(Program):
    def end_update(self, number: int) -> None:
        with torch.no_grad():
            for p in self.model[0].parameters():
                p -= 0.1 * p.grad
                p.grad = None


class UpdatedThroughData(Program):
    def end_update(self, number: int) -> None:
        for p in self.model[0].parameters():
            p.data.add_(p.grad, alpha=-0.1)


class EvaluationNetwork(Program):
    """A network in evaluation mode measures the loss."""

    def prepare(self) -> None:
        super().prepare()
        self.judge = self.accelerator.prepare(nn.Linear(1, 1)).eval()
        self.optimizers.append(self.accelerator.prepare(SGD(self.model[0].parameters(), lr=0.1)))

    def compute_loss(self) -> torch.Tensor:
        return self.judge(self.model(torch.ones(2, 3))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("program", [Forgotten, ForgottenInWindows])
def test_forgotten_layer_is_named_once(program: type[Program], caplog: pytest.LogCaptureFixture) -> None:
    made = program()
    made.run()
    made.accelerator.free_memory()
    assert [WARNING in record.getMessage() for record in caplog.records if "no optimizer" in record.msg] == [True]


@pytest.mark.parametrize(
    "program",
    [
        AllHeld,
        InTwoOptimizers,
        Frozen,
        UnusedHead,
        PreparedLater,
        AddedLater,
        UnpreparedOptimizer,
        OptimizerOfAnotherAccelerator,
        UpdatedByHand,
        UpdatedThroughData,
        EvaluationNetwork,
    ],
)
def test_correct_programs_get_no_warning(program: type[Program], caplog: pytest.LogCaptureFixture) -> None:
    made = program()
    made.run()
    made.accelerator.free_memory()
    assert "no optimizer updates" not in caplog.text


def test_adversarial_networks_get_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The generator's loss gives gradients to the critic, whose own optimizer is prepared later."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    generator, critic = accelerator.prepare(nn.Linear(3, 3), nn.Linear(3, 1))
    first = accelerator.prepare(SGD(generator.parameters(), lr=0.1))
    second = SGD(critic.parameters(), lr=0.1)
    noise = torch.ones(2, 3)
    for number in range(3):
        with accelerator.accumulate(generator):
            accelerator.backward(critic(generator(noise)).square().mean())
            first.step()
            first.zero_grad()
        second = accelerator.prepare(second)
        with accelerator.accumulate(critic):
            accelerator.backward((critic(generator(noise).detach()) - 1).square().mean())
            second.step()
            second.zero_grad()
    accelerator.free_memory()
    assert "no optimizer updates" not in caplog.text


def test_check_computes_nothing_after_the_second_update(monkeypatch) -> None:
    program = Forgotten()
    program.run(2)
    monkeypatch.setattr(untrained_parameters, "_find_untrained", None)  # a call would raise an error
    program.run(2)
