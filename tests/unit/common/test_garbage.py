"""Test pauses of the garbage collector: imported objects go to the oldest generation, and frozen objects stay frozen."""

import subprocess
import sys

import pytest

_IMPORT = """
import gc
from headway.common.garbage import import_without_garbage_collection
%s
with import_without_garbage_collection():
    assert not gc.isenabled()
    new = [[] for _ in range(5000)]  # seven times the number of allocations that start a collection
oldest = {id(each) for each in gc.get_objects(generation=2)}
print(gc.isenabled(), sum(id(each) in oldest for each in new), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "True 5000 False"),
        ("gc.disable()", "False 0 False"),  # the program collects garbage itself
        ("gc.freeze()", "True 0 True"),
    ],
    ids=["import", "collector off", "frozen before"],
)
def test_objects_of_an_import_are_in_the_oldest_generation(before, expected):
    script = _IMPORT % before
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
