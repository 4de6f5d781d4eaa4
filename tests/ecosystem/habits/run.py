"""Runs one rank of one habit: `run.py NAME` writes the habit's result to `evidence/rank<n>.json`."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch


def convert_to_json(value):
    """Convert a value to types that JSON supports."""
    if isinstance(value, torch.Tensor):
        return convert_to_json(value.detach().tolist())
    if isinstance(value, dict):
        return {str(key): convert_to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(each) for each in value]
    if isinstance(value, float) and value != value:
        return "nan"
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def run_habit(name):
    """Return the habit's result, or the name of the exception that it raised."""
    group, _, function = name.partition(".")
    try:
        return convert_to_json(getattr(import_module(f"tests.ecosystem.habits.{group}"), function)())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return {"raises": type(error).__name__}


if __name__ == "__main__":
    torch.manual_seed(0)
    path = Path("evidence", f"rank{os.environ.get('RANK', '0')}.json").absolute()  # a habit may call chdir
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(run_habit(sys.argv[1])))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a rank that exits early would end the store that other ranks still need
