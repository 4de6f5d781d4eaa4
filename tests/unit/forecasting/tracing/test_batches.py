import threading
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import headway
from headway.forecasting.tracing.batches import list_batch_tensors, map_batch


@dataclass(frozen=True)
class Graph:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str] = field(default_factory=list)


class Data:
    """Batch of a library, such as torch_geometric, that stores its tensors in attributes."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.store = {"x": x, "again": x, "y": y}
        self.name = "data"

    def to(self, device: Any) -> "Data":
        return Data(self.store["x"].to(device), self.store["y"].to(device))

    @property
    def x(self) -> torch.Tensor:
        return self.store["x"]


class Locked(Data):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x, y)
        self.lock = threading.Lock()  # cannot be pickled


def count_bytes(batch: Any) -> int:
    return sum(each.nbytes for each in list_batch_tensors(batch))


def test_tensors_are_replaced_in_every_kind_of_batch() -> None:
    x, y = torch.ones(4, 3), torch.ones(4)
    for batch in (
        x,
        [x, (y,)],
        {"x": x},
        UserDict(x=x, y=y),
        Graph(x, y, ["a"]),
        Data(x, y),
        [Data(x, y), {"g": Graph(x, y)}],
    ):
        tensors = list_batch_tensors(batch)
        copied = map_batch(torch.zeros_like, batch)
        assert type(copied) is type(batch)
        assert [each.shape for each in list_batch_tensors(copied)] == [each.shape for each in tensors]
        assert all(not each.any() for each in list_batch_tensors(copied))
        assert all(each.all() for each in tensors), "the original was changed"
    data = map_batch(torch.zeros_like, Data(x, y))
    assert data.store["x"] is data.store["again"]
    assert data.name == "data"
    assert map_batch(torch.zeros_like, Graph(x, y, ["a"])).names == ["a"]


def test_other_objects_are_kept() -> None:
    x = torch.ones(2)
    for item in ("text", 3, None, numpy.ones(2), nn.Linear(2, 2), object(), Locked(x, x)):
        assert map_batch(torch.zeros_like, [item])[0] is item
        assert list_batch_tensors(item) == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch["x"] if isinstance(batch, UserDict) else batch.x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["dataclass", "object", "mapping"])
def test_forecast_counts_the_batch(kind: str) -> None:
    make: Any = {"dataclass": Graph, "object": Data, "mapping": lambda x, y: UserDict(batch=Graph(x, y))}[kind]
    forecast = headway.forecast(
        model_fn=Model, batch_fn=lambda size: make(torch.zeros(size, 1024), torch.zeros(size, 1)),
        loss=lambda outputs, batch: mse_loss(outputs, torch.zeros_like(outputs)), optimizer="sgd", batch_size=64,
        device="a100-40gb",
    )  # fmt: skip
    assert forecast.split["batch"] >= 64 * (1024 + 1) * 4  # bytes of the float32 tensors of one batch
    assert forecast.split["batch"] < 2.01 * 64 * (1024 + 1) * 4
