"""`headway verify` finds the script's line of each torch call, whichever functions of Headway are on the stack."""

import sys
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from headway import Accelerator
from headway.common.callsite import is_headway_file
from headway.verify import script_frames
from tests.distributed.ranks import run_ranks

LAYOUTS: list[dict[str, Any]] = [{}, {"strategy": "fsdp"}, {"strategy": "tp"}, {"microbatching": "auto"}]


class FunctionsOnStack(TorchFunctionMode):
    """Mode that collects the names of Headway's functions between `call_model` and a call of `linear`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.num_calls += 1
            frame = sys._getframe(1)
            while frame.f_code.co_name != "call_model":
                if is_headway_file(frame.f_code.co_filename):
                    self.names.add(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))


def call_model(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def collect_names(layout: dict[str, Any]) -> tuple[int, set[str]]:
    accelerator = Accelerator(cpu=True, **layout)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if layout.get("strategy") == "tp":
        model.tp_plan = {"0": "colwise", "1": "rowwise"}
    model = accelerator.prepare(model)
    with FunctionsOnStack() as mode:
        call_model(model)
    accelerator.free_memory()
    return mode.num_calls, mode.names


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verify_knows_the_functions_between_a_script_and_its_model(layout: dict[str, Any]) -> None:
    for num_calls, names in run_ranks(collect_names, 2, layout):
        assert num_calls > 0
        assert names <= set(script_frames._OWN_CALLS), names
