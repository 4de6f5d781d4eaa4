"""Models that are built on the meta device are split along every axis, as models with values are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import Accelerator, init_empty_weights
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, build_seeded
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_expert_parallel import mixtral

LAYOUTS = {"tp": 2, "ep": 2, "fsdp+tp=2": 4, "ep=2+tp=2": 4, "pp=2+tp=2": 4, "pp=2+ep=2": 4}


def list_local_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parts that this rank holds. Parameters of other pipeline stages are left out."""
    return {name: get_local_shard(p).shape for name, p in model.named_parameters() if not p.is_meta}


def compare_models(layout: str, file: str) -> None:
    """Prepare a model with values, one on the meta device and one with values from a file, and train each for an update."""
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    shapes, weights = [], []
    for source in ("values", "file", "initializers"):
        accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
        if source == "values":
            model = build_seeded(0, mixtral)
        else:
            with init_empty_weights():
                model = mixtral()
        if source == "file":
            accelerator.load_weights(model, file)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        shapes.append(list_local_shapes(model))
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
        weights.append({name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()})
        accelerator.end_training()
    assert shapes[0] == shapes[1] == shapes[2]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)
        assert weights[2][name].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_on_the_meta_device_are_split(layout, tmp_path: Path):
    model = build_seeded(0, mixtral)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    run_ranks(compare_models, LAYOUTS[layout], layout, str(tmp_path))


class NetWithTable(nn.Module):
    """Linear layer with a non-persistent buffer, which a state dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table


def prepare_with_meta_buffer(layout: str, is_on_rank_0: bool) -> list[float]:
    """Prepare a model whose buffer is on the meta device although its parameters have values. Return the buffer."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    weights = build_seeded(0, NetWithTable).state_dict()
    if is_on_rank_0 or not accelerator.is_main_process:
        with torch.device("meta"):
            model = NetWithTable()
        model.load_state_dict(weights, assign=True)
    else:
        model = build_seeded(0, NetWithTable)
    return accelerator.prepare(model).table.tolist()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_buffer_without_values_is_an_error_on_all_ranks(layout):
    with pytest.raises(RankFailed) as exc_info:
        run_ranks(prepare_with_meta_buffer, 2, layout, True)
    assert str(exc_info.value).count("these of its buffers are on the meta device: table") == 2


def test_buffer_without_values_gets_those_of_rank_0():
    assert run_ranks(prepare_with_meta_buffer, 2, "fsdp", False) == [[0.0, 1.0, 2.0, 3.0]] * 2
