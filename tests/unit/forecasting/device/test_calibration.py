"""Test calibration records: reading, writing and precedence. tests/gpu measures a real GPU."""

import json

import pytest
from click.testing import CliRunner

from headway.cli.estimate import estimate as command
from headway.errors import ConfigError, DeviceUnavailable
from headway.forecasting.device import calibration
from headway.forecasting.device.calibration import CalibrationRecord, CudaProperties, read_records, write_record
from headway.forecasting.device.devices import DEVICES, MIB, estimate_use, find_device, name_card

MADE_UP = CalibrationRecord("NVIDIA A100-SXM4-80GB", 81920 * MIB, (8, 0), 431 * MIB, 17 * MIB, "2.13.0", "2026-11-22")


@pytest.fixture
def records_path(tmp_path, monkeypatch):
    """Path of the file of records in a temporary HEADWAY_HOME."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "devices.json"


def test_record_is_kept_and_replaces_the_assumption(records_path):
    assumed = find_device("a100-80gb")
    assert "assumed" in assumed.source
    write_record(records_path, "a100-80gb", MADE_UP)
    write_record(records_path, "rtx-9999", MADE_UP)
    assert read_records(records_path) == {"a100-80gb": MADE_UP, "rtx-9999": MADE_UP}
    found = find_device("A100-80GB")
    assert found.overhead == (431 * MIB, 431 * MIB, 559 * MIB)
    assert (
        found.source
        == "measured on NVIDIA A100-SXM4-80GB, 2026-11-22, with torch 2.13.0 (headway estimate --calibrate)"
    )
    assert found.rates == assumed.rates
    least, likely, most = estimate_use(found, 1000 * MIB)
    assert (least, likely) == (1431 * MIB, 1431 * MIB)
    assert most == (1000 + 559 + 192) * MIB
    assert find_device("a100-40gb") == DEVICES["a100-40gb"]
    assert find_device("rtx-9999").memory == 81920 * MIB  # not in the table


def test_damaged_file_is_reported(records_path):
    records_path.parent.mkdir()
    for content in ("no json", "[]", json.dumps({"a100-80gb": {"overhead": 3}})):
        records_path.write_text(content)
        with pytest.raises(ConfigError, match="remove it, and calibrate again"):
            find_device("t4")


@pytest.mark.parametrize(
    ("product", "mebibytes", "name"),
    [
        ("NVIDIA GeForce RTX 3090", 24268, "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", 81153, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40442, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 81111, "h100"),
        ("Tesla T4", 14930, "t4"),
        ("Tesla V100-SXM2-16GB", 16151, "v100-16gb"),
        ("NVIDIA L4", 22563, "l4"),
        ("NVIDIA L40S", 45589, "l40s"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16076, "rtx-4090-laptop-gpu"),
        ("NVIDIA H100 NVL", 95320, "h100-nvl"),
    ],
)
def test_gpu_in_the_table_gets_its_name_from_the_table(product, mebibytes, name):
    assert name_card(product, mebibytes * MIB) == name


def test_this_means_the_gpu_of_the_machine(records_path, monkeypatch):
    monkeypatch.setattr(
        calibration,
        "read_device_properties",
        lambda: CudaProperties("NVIDIA A100-SXM4-80GB", 81153 * MIB, (8, 0)),
    )
    assert find_device("this") == DEVICES["a100-80gb"]
    write_record(records_path, "a100-80gb", MADE_UP)
    assert find_device("this").overhead.least == 431 * MIB
    monkeypatch.setattr(
        calibration, "read_device_properties", lambda: CudaProperties("NVIDIA Novum", 81153 * MIB, (12, 0))
    )
    with pytest.raises(ConfigError, match="headway estimate --calibrate"):
        find_device("this")


def test_missing_gpu_is_reported(records_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (["--calibrate"], ["bert", "--device", "this"]):
        ended = CliRunner().invoke(command, words)
        assert isinstance(ended.exception, DeviceUnavailable)
        assert "there is no CUDA device here" in str(ended.exception)
    for words, said in ((["bert", "--calibrate"], "takes no other arguments"), ([], "FOLDER is missing")):
        ended = CliRunner().invoke(command, words)
        assert isinstance(ended.exception, ConfigError)
        assert said in str(ended.exception)
    assert not records_path.exists()


def test_current_device_is_measured(monkeypatch):
    """The process that runs the kernels uses the current device, whose free memory is read."""
    properties = type("Properties", (), {"name": "NVIDIA Novum", "total_memory": 8 << 30, "major": 9, "minor": 0})
    free = iter([5000, 4000])
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: asked.append(device) or (next(free), 0))
    work = calibration._WORK
    assert work.index("torch.cuda.set_device(int(sys.argv[1]))") < work.index('device="cuda"')
    text = (
        "import json, sys; print(json.dumps({'reserved': int(sys.argv[1]), 'kept': 7}), flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(calibration, "_WORK", text)
    record = calibration.measure_overhead()
    assert asked == [3, 3]
    assert (record.overhead, record.kept) == (5000 - 4000 - 3, 7)
