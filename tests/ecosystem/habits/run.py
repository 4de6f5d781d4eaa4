"""One rank of one habit: `run.py NAME` writes what the habit returns to `evidence/rank<n>.json`."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch


def plain(value):
    """The same of what JSON knows."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and value != value:
        return "nan"
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def outcome(name):
    """What the habit returns, or the name of the exception that ends it."""
    group, _, function = name.partition(".")
    try:
        return plain(getattr(import_module(f"tests.ecosystem.habits.{group}"), function)())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return {"raises": type(error).__name__}


if __name__ == "__main__":
    torch.manual_seed(0)
    told = Path("evidence", f"rank{os.environ.get('RANK', '0')}.json").absolute()  # a habit may change the folder
    told.parent.mkdir(exist_ok=True)
    told.write_text(json.dumps(outcome(sys.argv[1])))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # who is done must not take what the others still ask for with it
