"""Test the arguments of notebook_launcher: Accelerate's, in its order. Useless ones are reported, and invalid ones refused."""

import inspect

import numpy
import pytest

from headway import debug_launcher, notebook_launcher
from headway.core.config.launch import UNSET
from headway.errors import ConfigError
from headway.launch import notebook


@pytest.fixture
def resolve_arguments(monkeypatch):
    """Function that returns the resolved settings for arguments, without starting processes."""

    class Reached(Exception):
        pass

    def resolve_settings(*args, **arguments):
        found = []

        def stop(resolve_arguments, *rest):
            found.append(resolve_arguments)
            raise Reached

        monkeypatch.setattr(notebook.plan, "make_plan", stop)
        with pytest.raises(Reached):
            notebook_launcher(print, (), *args, **arguments)
        return found[0].config

    return resolve_settings


def test_signature_equals_accelerates():
    accelerate = pytest.importorskip("accelerate")
    for ours, theirs in (
        (notebook_launcher, accelerate.notebook_launcher),
        (debug_launcher, accelerate.debug_launcher),
    ):
        own = [one for one in inspect.signature(ours).parameters.values() if one.kind is not one.KEYWORD_ONLY]
        others = list(inspect.signature(theirs).parameters.values())
        assert [one.name for one in own] == [one.name for one in others]
        assert {one.name for one, other in zip(own, others) if one.default != other.default} <= {"mixed_precision"}


def test_one_machine_needs_no_rendezvous(resolve_arguments, caplog):
    config = resolve_arguments(2, "bf16", max_restarts=3, monitor_interval=0.5)
    assert (config.num_processes, config.mixed_precision, config.max_restarts, config.monitor_interval) == (
        2,
        "bf16",
        3,
        0.5,
    )
    assert config.num_machines is UNSET
    assert caplog.text == ""
    config = resolve_arguments(2, use_port="29501", rdzv_backend="c10d", log_line_prefix_template="[${rank}]")
    assert config.main_process_port is UNSET
    assert "use_port='29501', rdzv_backend='c10d': not needed" in caplog.text
    assert "log_line_prefix_template has no effect" in caplog.text


def test_several_machines_meet_at_the_given_address(resolve_arguments):
    config = resolve_arguments(numpy.int64(4), use_port="29501", master_addr="10.0.0.1", node_rank=1, num_nodes=2,
                      rdzv_conf={"timeout": 60}, rdzv_id="run7")  # fmt: skip
    assert (config.num_processes, config.num_machines, config.machine_rank) == (8, 2, 1)
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 29501)
    assert (config.rdzv_conf, config.rdzv_id, config.rdzv_backend) == ("timeout=60", "run7", UNSET)
    config = resolve_arguments(1, num_nodes=2, rdzv_endpoint="10.0.0.2:4711", rdzv_backend="c10d")
    assert (config.main_process_ip, config.main_process_port, config.rdzv_backend) == ("10.0.0.2", 4711, "c10d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": "2"}, r"num_processes='2' \(notebook_launcher\(num_processes=...\)\) must be a whole number, 1 or more"),
        ({"num_processes": 0}, "num_processes=0 .* must be a whole number, 1 or more"),
        ({"num_processes": 2.5}, "num_processes=2.5 .* must be a whole number"),
        ({"num_processes": True}, "num_processes=True .* must be a whole number"),
        ({"mixed_precision": "fp4"}, "must be one of no, bf16, fp16, fp8"),
        ({"max_restarts": "twice"}, "max_restarts='twice' .* must be a whole number, 0 or more"),
        ({"num_nodes": 2, "use_port": "http"}, "use_port='http'; give a port as a number"),
        ({"num_nodes": 2, "master_addr": "10.0.0.1", "use_port": 99999}, r"99999 \(.*use_port=...\)\) must be .* 0 to 65535"),
        ({"num_nodes": 2, "num_processes": 1}, "give the address at which the other machines reach the machine with node_rank=0"),
        ({"node_rank": 1, "num_processes": 1}, "machine_rank=1 .* must be below num_machines=1"),
        ({"args": "abc"}, r"args=\('abc',\)"),
        ({"function": None}, "give the function itself"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        notebook_launcher(**{"function": print, **arguments})


def test_debug_launcher_requires_a_number():
    with pytest.raises(ConfigError, match=r"num_processes='2' .* must be a whole number"):
        debug_launcher(print, (), "2")


def test_variables_set_what_arguments_leave_open(resolve_arguments, monkeypatch):
    monkeypatch.setenv("HEADWAY_TIMEOUT", "8")
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("HEADWAY_NUM_MACHINES", "2")
    config = resolve_arguments(2, "no")
    assert (config.timeout, config.mixed_precision, config.num_processes) == (8, "no", 2)
    assert config.num_machines is UNSET
    assert resolve_arguments(2).mixed_precision == "bf16"
    monkeypatch.setenv("HEADWAY_TIMEOUTS", "8")
    with pytest.raises(ConfigError, match="HEADWAY_TIMEOUT"):
        notebook_launcher(print)
