import numpy
import torch
from torch import nn
from torch.distributions import Categorical

from headway.core.strategies.output_tensors import list_hidden_tensors, list_output_tensors


class Item:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


class DynamicCache(Item):
    pass


def test_tensors_of_objects_are_found_once() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    item = Item(a=a, nested=[Item(b=b), a], name="x", count=3, array=numpy.ones(2), model=nn.Linear(2, 2))
    item.itself = item  # type: ignore[attr-defined]
    assert list(map(id, list_output_tensors((c, item)))) == list(map(id, (c, a, b)))
    assert list(map(id, list_hidden_tensors((c, item)))) == list(map(id, (a, b)))


def test_plain_outputs_hide_nothing() -> None:
    a, b = torch.ones(1), torch.ones(2)
    for output in (a, [a, (b,)], {"a": a, "b": {"b": b}}, None, 3, "text"):
        assert list_hidden_tensors(output) == []
    assert list(map(id, list_output_tensors({"a": a, "b": [b]}))) == [id(a), id(b)]


def test_caches_and_properties_are_not_read() -> None:
    class Lazy:
        @property
        def values(self) -> torch.Tensor:
            raise AssertionError("a property was called")

    assert list_hidden_tensors({"cache": DynamicCache(keys=[torch.ones(1)]), "lazy": Lazy()}) == []
    distribution = Categorical(logits=torch.zeros(2, 3))
    assert any(each is distribution.logits for each in list_hidden_tensors(distribution))


def test_container_that_contains_itself_is_left_out() -> None:
    a, endless = torch.ones(1), [torch.ones(2)]
    endless.append(endless)  # type: ignore[arg-type]
    assert list(map(id, list_hidden_tensors(Item(endless=endless, a=a)))) == [id(a)]
