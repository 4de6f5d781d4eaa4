"""A user's module around a transformers model is split by the plan of that model, if its structure alone gives none."""

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, build_seeded
from tests.distributed.ranks import run_ranks
from tests.distributed.test_expert_parallel import mixtral


class Scorer(nn.Module):
    """A mixture of experts without its language-model head, below a head that scores each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = mixtral().model
        self.head = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.backbone(input_ids=ids).last_hidden_state[:, -1])
        return scores


def make_ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))


def train(layout: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights after two updates, and the names of the parameters of which this rank holds only a part."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = build_seeded(0, Scorer)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(make_ids()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    split = [
        name for name, parameter in model.named_parameters() if get_local_shard(parameter).shape != parameter.shape
    ]
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}, split


@pytest.mark.parametrize(("layout", "num_ranks"), [("tp", 2), ("ep=2+tp=2", 4)])
def test_contained_model_is_split_by_its_own_plan(layout, num_ranks):
    weights, split = run_ranks(train, num_ranks, layout)[0]
    model = build_seeded(0, Scorer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(make_ids()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    assert {"backbone.layers.0.self_attn.q_proj.weight", "backbone.layers.1.mlp.experts.gate_up_proj"} <= set(split)
