"""Tensor-parallel options that name parts of one of several models, compared with plain PyTorch on one process."""

import pytest
import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.errors import ConfigError
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import run_ranks

UPDATES = 3


class Policy(nn.Module):
    """Attention-like layers that reshape by a stored number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).tanh().view(len(x), self.num_heads, -1)
        return self.down(heads.flatten(1))  # type: ignore[no-any-return]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


PLAN = {"up": "colwise", "down": "rowwise", "first": "colwise", "second": "rowwise"}
OPTIONS = TensorParallelOptions(PLAN, divide=("num_heads",))
"""The policy has no `first`. The critic has no `up` and no `num_heads`."""
WITHOUT_CRITIC = TensorParallelOptions({"up": "colwise", "down": "rowwise"}, divide=("num_heads",))


def make_models() -> tuple[Policy, Critic]:
    torch.manual_seed(0)
    return Policy().double(), Critic().double()


def make_rows() -> torch.Tensor:
    return torch.randn(UPDATES, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train_by_hand() -> list[dict[str, torch.Tensor]]:
    policy, critic = make_models()
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    for rows in make_rows():
        critic(policy(rows)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [gather_weights(policy), gather_weights(critic)]


def train_on_ranks(
    strategy: str, critic_first: bool, options: TensorParallelOptions
) -> tuple[list[dict[str, torch.Tensor]], list[tuple[int, ...]]]:
    accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[options])
    policy, critic = make_models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (policy, critic)]
    accelerator.prepare(*((critic, policy) if critic_first else (policy, critic)))
    optimizers = accelerator.prepare(*optimizers)
    for rows in make_rows():
        with accelerator.split_between_processes(rows) as own, accelerator.accumulate(policy, critic):
            accelerator.backward(critic(policy(own)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    shapes = [tuple(layer.weight.to_local().shape) for layer in (policy.up, critic.first)]
    return [gather_weights(policy), gather_weights(critic)], shapes


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "critic_first", "options", "shapes"),
    [
        ("tp", 2, False, OPTIONS, [(4, 4), (3, 4)]),
        ("tp", 2, True, WITHOUT_CRITIC, [(4, 4), (3, 4)]),  # the critic gets an automatic plan
        ("fsdp+tp=2", 4, True, OPTIONS, [(2, 4), (2, 4)]),
    ],
)
def test_a_plan_may_name_parts_of_only_one_of_the_models(
    strategy: str, num_ranks: int, critic_first: bool, options: TensorParallelOptions, shapes: list[tuple[int, ...]]
) -> None:
    expected = train_by_hand()
    results = run_ranks(train_on_ranks, num_ranks, strategy, critic_first, options)
    assert results[0][1] == shapes
    for weights_of_models, _ in results:
        for weights, by_hand in zip(weights_of_models, expected, strict=True):
            for name, value in by_hand.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


def name_parts_of_no_model() -> None:
    for options in (
        TensorParallelOptions({**PLAN, "frist": "colwise"}, divide=("num_heads",)),
        TensorParallelOptions(PLAN, divide=("num_heads", "num_haeds")),
    ):
        accelerator = Accelerator(cpu=True, strategy="tp", kwargs_handlers=[options])
        with pytest.raises(ConfigError, match=r"frist|num_haeds") as caught:
            accelerator.prepare(*make_models())
        assert "pass both models to one prepare() call" in str(caught.value)
        accelerator.free_memory()


def test_names_that_no_model_has_are_an_error() -> None:
    run_ranks(name_parts_of_no_model, 2)
