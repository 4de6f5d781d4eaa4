"""Tests of buffers and frozen parameters with dtypes that gloo cannot send: all ranks hold rank 0's bits."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks

DTYPES = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16", "float64", "complex64", "complex128"),
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)


class ModelWithOddTensor(torch.nn.Module):
    def __init__(self, rank: int, dtype: torch.dtype, is_parameter: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        odd = make_values(rank, dtype)
        if is_parameter:
            self.odd = torch.nn.Parameter(odd, requires_grad=False)
        else:
            self.register_buffer("odd", odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def make_values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6) + rank).to(dtype)


def read_bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.uint8).tolist()


def train_with_each_dtype(layout: str | None, is_parameter: bool) -> dict[str, Any]:
    from headway import Accelerator

    accelerator: Any = Accelerator(cpu=True, **({"strategy": layout} if layout else {}))
    bits = {}
    for name in DTYPES:
        torch.manual_seed(0)
        dtype = getattr(torch, name)
        net = ModelWithOddTensor(accelerator.process_index, dtype, is_parameter)
        model, optimizer = accelerator.prepare(
            net, torch.optim.SGD([*net.up.parameters(), *net.down.parameters()], lr=0.1)
        )
        at_prepare = [read_bits(each) for key, each in accelerator.get_state_dict(model).items() if key == "odd"]
        if not is_parameter and accelerator.process_index:
            net.odd.copy_(make_values(2, dtype))  # Differs from rank 0, as after a forward pass that updates buffers.
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        after = [read_bits(each) for key, each in accelerator.get_state_dict(model).items() if key == "odd"]
        bits[name] = (at_prepare, after, None if is_parameter else read_bits(net.odd))
        accelerator.free_memory()
    return bits


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (None, 1),
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.matrix),
        pytest.param("tp", 2, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
def test_all_ranks_hold_the_bits_of_rank_0(layout, world_size, is_parameter):
    for rank, bits in enumerate(run_ranks(train_with_each_dtype, world_size, layout, is_parameter)):
        for name in DTYPES:
            expected = read_bits(make_values(0, getattr(torch, name)))
            at_prepare, after, buffer = bits[name]
            is_here = rank == 0 or layout in (None, "ddp")  # Sharded layouts gather whole weights on rank 0 only.
            assert at_prepare == after == ([expected] if is_here else []), name
            assert buffer in (None, expected), name
