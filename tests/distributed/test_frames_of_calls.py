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

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"strategy": "fsdp"},
    {"strategy": "tp"},
    {"strategy": "ep"},
    {"microbatching": "auto"},
]


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


def build_model(strategy: str | None) -> torch.nn.Module:
    if strategy == "ep":
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        experts = {"num_local_experts": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1}
        return MixtralForCausalLM(MixtralConfig(vocab_size=8, **sizes, **experts))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if strategy == "tp":
        model.tp_plan = {"0": "colwise", "1": "rowwise"}  # type: ignore[assignment]
    return model


def call_model(model: torch.nn.Module, strategy: str | None) -> None:
    model(torch.zeros(2, 4, dtype=torch.long) if strategy == "ep" else torch.ones(2, 4))


def collect_names(layout: dict[str, Any]) -> tuple[int, set[str]]:
    accelerator = Accelerator(cpu=True, **layout)
    model = accelerator.prepare(build_model(layout.get("strategy")))
    with FunctionsOnStack() as mode:
        call_model(model, layout.get("strategy"))
    accelerator.free_memory()
    return mode.num_calls, mode.names


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verify_knows_the_functions_between_a_script_and_its_model(layout: dict[str, Any]) -> None:
    for num_calls, names in run_ranks(collect_names, 2, layout):
        assert num_calls > 0
        assert names <= set(script_frames._OWN_CALLS), names
