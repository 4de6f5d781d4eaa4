from click.testing import CliRunner

from headway.cli.batch_sizes import command
from headway.memory import remembered


def test_sizes_are_printed_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    run = CliRunner().invoke
    assert "no batch sizes" in run(command, []).output
    entry = {
        "batch_size": 37, "seen": {"model": "Net: 8 parameters"}, "circumstances": {"function": "train.probe", "device": "cpu"}
    }  # fmt: skip
    remembered.write(tmp_path / remembered.FILE_NAME, "abc", entry)
    said = run(command, []).output
    assert "1 batch sizes" in said
    assert "37  train.probe on cpu" in said
    assert "model: Net: 8 parameters" in said
    assert "1 batch sizes forgotten" in run(command, ["--clear"]).output
    assert not (tmp_path / remembered.FILE_NAME).exists()
    other = tmp_path / "other.json"
    remembered.write(other, "abc", entry)
    assert "37" in run(command, ["--file", str(other)]).output
