"""Test `headway config` and `headway env` from the command line, and the interview in a pseudo-terminal."""

import json
import os
import select
import sys
import time

import pytest

from headway.cli import main
from headway.core.config.files import parse_config


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs `headway` and returns stdout, or stderr if an exit code other than 0 is expected."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.delenv("HEADWAY_RUN", raising=False)

    def run_command(*args, code=0):
        with pytest.raises(SystemExit) as exc_info:
            main.main(list(args))
        said = capsys.readouterr()
        assert exc_info.value.code == code, said
        return said.out if code == 0 else said.err

    return run_command


def test_default_writes_the_file_and_prints_its_path(run, tmp_path):
    path = tmp_path / "default_config.yaml"
    assert run("config", "default", "--mixed-precision", "bf16").startswith(f"written to {path}:\n")
    assert 'mixed_precision: "bf16"' in path.read_text()
    assert "exists already; add --force" in run("config", "default", code=2)
    run("config", "default", "--force")
    assert "mixed_precision" not in path.read_text()
    assert "one of no, bf16, fp16" in run("config", "default", "--force", "--mixed_precision", "x", code=2)


def test_show_prints_each_value_with_its_origin(run, tmp_path, monkeypatch):
    (tmp_path / "default_config.yaml").write_text("num_processes: 4\ncpu: true\n")
    monkeypatch.setenv("HEADWAY_NUM_PROCESSES", "2")
    shown = {line.split()[0]: line.split(maxsplit=2)[1:] for line in run("config", "show").splitlines()}
    assert shown["num_processes"] == ["2", "environment: HEADWAY_NUM_PROCESSES"]
    assert shown["cpu"] == ["true", f"file: {tmp_path}/default_config.yaml key cpu"]
    assert shown["max_restarts"] == ["-", "default: 0"]
    content = json.loads(run("config", "show", "--json"))
    assert content["num_processes"] == {"value": 2, "origin": "environment: HEADWAY_NUM_PROCESSES"}
    assert "max_restarts" not in content


def test_update_removes_unsupported_keys(run, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("num_processes: 4\nfsdp_version: 2\n")
    assert "taken out: fsdp_version: write strategy: fsdp" in run("config", "update", "--config_file", str(path))
    assert "fsdp" not in path.read_text()
    assert "num_processes: 4" in path.read_text()
    path.write_text("num_procs: 4\n")
    assert "did you mean num_processes" in run("config", "update", "--config_file", str(path), code=2)
    assert path.read_text() == "num_procs: 4\n"


def test_import_reports_every_key(run, tmp_path):
    foreign = tmp_path / "accelerate.yaml"
    foreign.write_text("use_cpu: true\nnum_processes: 2\ndistributed_type: FSDP\nmegatron_lm_config: {tp: 2}\n")
    output = run("config", "import", str(foreign))
    assert "use_cpu                cpu: True" in output
    assert "distributed_type       FSDP: the model is sharded" in output
    assert "together               strategy: 'fsdp'" in output
    assert "1 of 4 keys could not be kept" in output
    assert "cpu: true\n" in (tmp_path / "default_config.yaml").read_text()
    assert "exists already" in run("config", "import", str(foreign), code=2)
    assert "cannot be read" in run("config", "import", "nothing.yaml", code=2)


def test_questions_need_a_terminal(run):
    assert "`headway config default`" in run("config", code=1)


def test_config_file_before_the_subcommand_is_refused_with_the_correct_order(run):
    assert "headway config show --config_file" in run("config", "--config_file", "x", "show", code=2)


def test_env_shows_versions_and_the_config_file(run, tmp_path):
    output = run("env")
    for name in ("headway", "python", "torch", "accelerators", "CPU cores", "memory", "config file"):
        assert f"\n{name} " in f"\n{output}"
    assert json.loads(run("env", "--json"))["config file"].startswith(str(tmp_path))


def test_env_hides_secrets(run, monkeypatch):
    monkeypatch.setenv("HEADWAY_SECRET", "0123456789abcdef")
    monkeypatch.setenv("HEADWAY_CONTROL", '{"key":"0123456789abcdef"}')
    output = run("env")
    assert "0123456789abcdef" not in output
    assert output.count("set, and not shown") == 2


WITHOUT_QUESTIONARY = (
    "import sys; sys.modules['questionary'] = None; from headway.cli.main import main; main(['config'])"
)


@pytest.mark.parametrize("has_menus", [True, False], ids=["questionary", "plain"])
def test_interview_in_a_terminal_accepts_defaults(tmp_path, has_menus):
    """Press Enter at each of the four questions, so that each gets its default."""
    pty = pytest.importorskip("pty")
    if has_menus:
        pytest.importorskip("questionary")
    command = ["-m", "headway", "config"] if has_menus else ["-c", WITHOUT_QUESTIONARY]
    environment = {**os.environ, "HEADWAY_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, *command], environment)
    shown = ""
    for expected in ("How many machines", "How many processes", "Which precision", "How many micro-batches"):
        shown = _read_until(terminal, shown, expected)
        time.sleep(0.1)
        os.write(terminal, b"\r")
    shown = _read_until(terminal, shown, "written to")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert parse_config((tmp_path / "default_config.yaml").read_bytes(), "f")["num_processes"].value == 1


def _read_until(terminal, shown, expected):
    deadline = time.monotonic() + 20
    start = len(shown)
    while expected not in shown[start:]:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.1)[0]:
            piece = os.read(terminal, 4096).decode(errors="replace")
            if "\x1b[6n" in piece:  # a query for the cursor position
                os.write(terminal, b"\x1b[1;1R")
            shown += piece
    return shown


@pytest.mark.parametrize(
    "text",
    [
        "log_dir: 2024-01-02",
        "gpu_ids: !!set {0, 1}",
        "num_processes: &n [*n]",
        "role: .nan",
        "num_processes: 0x" + "f" * 5000,
    ],
)
def test_update_of_values_that_json_cannot_hold_prints_one_error(tmp_path, capsys, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as exc_info:
        main.main(["config", "update", "--config_file", str(path)])
    output = capsys.readouterr().err
    assert exc_info.value.code == 2
    assert output.startswith("headway: error: ")
    assert output.count("\n") == 1
    assert path.read_text() == text
