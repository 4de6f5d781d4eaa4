"""Test that calls that can make two runs differ are found in the source of the user's files."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from headway.verify import source_scan
from headway.verify.source_scan import scan_sources

SOURCE = """
import random
from datetime import datetime

import numpy as np
from numpy.random import default_rng

a = np.random.RandomState()
b = default_rng(None)
c = np.random.default_rng(0)
d = random.Random(seed)
e = datetime.now().microsecond
f = numpy.random.default_rng(seed=1)
g = clock.now()
h = random.random()
"""


def test_unseeded_generators_and_values_from_outside_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("scanned")
    module.__file__ = str(tmp_path / "scanned.py")
    (tmp_path / "scanned.py").write_text(SOURCE)
    monkeypatch.setitem(sys.modules, "scanned", module)
    monkeypatch.chdir(tmp_path)
    for limit in ("_MOST_FILES", "_MOST_LINES"):  # other tests import many files
        monkeypatch.setattr(source_scan, limit, 10**6)
    found = {
        kind: {line: name for line, name in lines.items() if line.startswith("scanned.py")}
        for kind, lines in scan_sources().items()
    }
    assert found["unseeded"] == {"scanned.py:8": "np.random.RandomState", "scanned.py:9": "default_rng"}
    assert found["outside"] == {"scanned.py:12": "datetime.now"}
