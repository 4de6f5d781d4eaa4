"""Tests of training loops with calls in the wrong order: one warning names the line and says where to move the call."""

import logging
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks


def run_loop(order: str, num_steps: int) -> tuple[list[str], int]:
    """Train with the calls in this order. Return the warnings and the number of updates."""
    from headway import Accelerator

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headway").addHandler(handler)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = model(x).mean()
            for action in order.split():
                if action == "backward":
                    accelerator.backward(loss)
                elif action == "step":
                    optimizer.step()  # the line of step()
                else:
                    optimizer.zero_grad()  # the line of zero_grad()
    logging.getLogger("headway").removeHandler(handler)
    return lines, accelerator.num_updates


ADVICE = {
    "step backward zero_grad": ("step", "Move accelerator.backward(loss) above this line"),
    "step zero_grad": ("step", "or add it where it is missing"),
    "backward zero_grad step": ("zero_grad", "Move zero_grad() below optimizer.step()"),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("order", ADVICE)
def test_warning_names_the_line_and_where_to_move_the_call(order, num_steps, world_size):
    lines, num_updates = run_ranks(run_loop, world_size, order, num_steps)[0]
    call, advice = ADVICE[order]
    source = Path(__file__).read_text().splitlines()
    number = next(index for index, line in enumerate(source, 1) if line.endswith(f"# the line of {call}()"))
    assert len(lines) == 1
    assert f"{call}() at {__file__}:{number} came" in lines[0]
    assert advice in lines[0]
    assert (num_updates == 0) == (call == "step")


@pytest.mark.parametrize("order", ["backward step zero_grad", "zero_grad backward step"])
def test_correct_orders_give_no_warning(order):
    for num_steps in (1, 2):
        assert run_ranks(run_loop, 1, order, num_steps)[0][0] == []
