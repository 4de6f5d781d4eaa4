"""Sharding options that name modules and methods of one of several models, and the advice for methods that are not named."""

import pytest
import torch
from torch import nn

from headway import Accelerator, ShardingOptions
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from headway.errors import ConfigError, PrepareError
from tests.devices import ON_CPU
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

UPDATES = 3


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))  # belongs to the root, which is gathered for the named methods

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.encode(x))  # type: ignore[no-any-return]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.bilinear(x, x)))  # type: ignore[no-any-return]


OPTIONS = ShardingOptions(units=("Linear", "Bilinear"), ignored=("frozen",), forward_methods=("encode",))
"""The encoder has no Bilinear and no module named "frozen". The critic has no method `encode`."""


def make_models() -> tuple[Encoder, Critic]:
    torch.manual_seed(0)
    return Encoder().double(), Critic().double()


def make_rows() -> torch.Tensor:
    return torch.randn(UPDATES, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train_by_hand() -> list[dict[str, torch.Tensor]]:
    encoder, critic = make_models()
    optimizer = torch.optim.SGD([*encoder.parameters(), *critic.parameters()], lr=0.1)
    for rows in make_rows():
        (critic(encoder.encode(rows)) + encoder(rows).sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [gather_weights(encoder), gather_weights(critic)]


def train_on_ranks(critic_first: bool) -> list[dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp", kwargs_handlers=[OPTIONS])
    encoder, critic = make_models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (encoder, critic)]
    accelerator.prepare(*((critic, encoder) if critic_first else (encoder, critic)))
    optimizers = accelerator.prepare(*optimizers)
    for rows in make_rows():
        with accelerator.accumulate(encoder, critic):
            half = rows.chunk(2)[accelerator.process_index].to(accelerator.device)
            loss = (critic(encoder.encode(half)) + encoder(half).sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [gather_weights(encoder), gather_weights(critic)]


@pytest.mark.parametrize("critic_first", [False, True])
def test_options_may_name_parts_of_only_one_of_the_models(critic_first: bool) -> None:
    expected = train_by_hand()
    for results in run_ranks(train_on_ranks, 2, critic_first):
        for weights, by_hand in zip(results, expected, strict=True):
            for name, value in by_hand.items():
                torch.testing.assert_close(weights[name].cpu(), value, rtol=1e-9, atol=1e-11)


def name_parts_of_no_model() -> None:
    for options, error in (
        (ShardingOptions(units=("Linaer",)), ConfigError),
        (ShardingOptions(ignored=("forzen",)), ConfigError),
        (ShardingOptions(forward_methods=("encodes",)), PrepareError),
    ):
        accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp", kwargs_handlers=[options])
        with pytest.raises(error, match="pass both models to one prepare"):
            accelerator.prepare(*make_models())
        accelerator.free_memory()


def test_names_that_no_model_has_are_an_error() -> None:
    run_ranks(name_parts_of_no_model, 2)


def call_a_method_that_is_not_named() -> tuple[str, str]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    encoder = accelerator.prepare(make_models()[0])
    rows = make_rows()[0].to(accelerator.device)
    with pytest.raises(RuntimeError, match="mixed") as of_a_method:
        encoder.encode(rows)
    with pytest.raises(RuntimeError, match="mixed") as of_the_script:
        rows @ encoder.scale.weight
    return explain_error(of_a_method.value), explain_error(of_the_script.value)


def test_methods_that_are_not_named_get_advice() -> None:
    for of_a_method, of_the_script in run_ranks(call_a_method_that_is_not_named, 2):
        assert "encode() uses parameters" in of_a_method
        assert "ShardingOptions(forward_methods=['encode'])" in of_a_method
        assert "p.full_tensor()" in of_the_script
        assert "forward_methods" not in of_the_script
