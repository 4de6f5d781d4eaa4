"""Who makes a call, as the sources around it say; the process is told it is one of several."""

import os
from types import SimpleNamespace

import pytest
import torch

from headway.runtime import callers
from headway.runtime.callers import calling_ranks
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import RankAware
from headway.runtime.device import CPU
from headway.runtime.process import ProcessRuntime

STEPS = 10


def process(rank=0, world_size=2, machines=1):
    local = world_size // machines
    return ProcessRuntime(rank, world_size, rank % local, local, CPU, torch.device("cpu"), False)


class Script:
    """Saves in many ways; what it found is kept."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.accelerator = RankAware(runtime, Collectives(runtime))
        self.is_main = self.accelerator.is_main_process
        self.told = None

    def save_state(self):
        self.told = calling_ranks(self.runtime)
        return self.told

    # ------------------------------------------------------------ rank 0 alone

    def under_if(self):
        if self.accelerator.is_main_process:
            self.save_state()

    def under_nested_ifs(self):
        if self.accelerator.is_main_process:
            if STEPS % 5 == 0:
                with open(os.devnull):
                    self.save_state()

    def under_and(self, step=5):
        if step % 5 == 0 and self.accelerator.is_main_process and not self.told:
            self.save_state()

    def what_holds_has_changed_since(self, step=5):
        if self.accelerator.is_main_process and step == 5:
            step += 1
            self.save_state()

    def or_what_is_false_everywhere(self):
        kind = SimpleNamespace(name="MULTI_CPU")
        if self.accelerator.is_main_process or kind.name == "DEEPSPEED":
            self.save_state()

    def after_return(self):
        if not self.accelerator.is_main_process:
            return
        self.save_state()

    def after_continue(self):
        for step in range(2):
            if step == 0 or not self.accelerator.is_main_process:
                continue
            self.save_state()

    def in_else(self):
        if not self.accelerator.is_main_process:
            self.told = None
        else:
            self.save_state()

    def by_number(self):
        if self.accelerator.process_index == 0:
            self.save_state()

    def by_variable_rank(self):
        rank = self.accelerator.process_index
        if rank == 0:
            self.save_state()

    def by_old_local_rank(self):
        args = SimpleNamespace(local_rank=self.accelerator.local_process_index)
        if args.local_rank in [-1, 0]:
            self.save_state()

    def by_environment(self):
        if int(os.environ.get("RANK", 0)) == 0:
            self.save_state()

    def by_function(self):
        def get_rank():
            return 0

        if get_rank() == 0:
            self.save_state()

    def by_variable(self):
        main = self.accelerator.is_main_process
        if main:
            self.save_state()

    def by_negated_variable(self):
        is_other = not self.accelerator.is_main_process
        if not is_other and STEPS:
            self.save_state()

    def by_attribute(self):
        if self.is_main:
            self.save_state()

    def within_a_line(self):
        self.accelerator.is_main_process and self.save_state()

    def by_ternary(self):
        return self.save_state() if self.accelerator.is_main_process else None

    def asserted(self):
        assert self.accelerator.is_main_process
        self.save_state()

    def helper_under_if(self):
        if self.accelerator.is_main_process:
            self.helper()

    def helper(self):
        try:
            self.save_state()
        finally:
            pass

    def decorated(self):
        @self.accelerator.on_main_process
        def save():
            self.save_state()

        save()

    def decorated_by_number(self):
        self.accelerator.on_process(self.save_state, process_index=0)()

    def decorated_by_local_number(self):
        self.accelerator.on_local_main_process(self.helper)()

    def decorated_by_hand(self):
        def only_main(function):
            def run(*args):
                if self.accelerator.is_main_process:
                    return function(*args)
                return None

            return run

        only_main(self.helper)()


ALONE = [name for name in vars(Script) if not name.startswith("_") and name not in ("save_state", "helper")]


@pytest.mark.parametrize("name", ALONE)
def test_rank_0_alone(name):
    script = Script(process())
    getattr(script, name)()
    assert script.told.ranks == (0,)
    assert script.told.reason
    assert "test_callers.py:" in script.told.call_site


class Together(Script):
    """Saves on every rank, under conditions that look otherwise."""

    def plain(self):
        self.save_state()

    def both_branches(self):
        if self.accelerator.is_main_process:
            print("saving")
            self.save_state()
        else:
            self.save_state()

    def both_branches_by_a_helper(self):
        if not self.accelerator.is_main_process:
            self.helper()
            return
        self.helper()

    def or_what_holds_everywhere(self, everywhere=True):
        if self.accelerator.is_main_process or everywhere:
            self.save_state()

    def or_what_nobody_knows(self):
        if self.accelerator.is_main_process or self.unknown():
            self.save_state()

    def unknown(self):
        return True

    def beside_a_condition(self):
        if self.accelerator.is_main_process:
            print("saving")
        self.save_state()

    def without_a_launcher(self):
        args = SimpleNamespace(local_rank=-1)
        if args.local_rank in [-1, 0]:
            self.save_state()

    def a_variable_of_another_meaning(self):
        rank = 4
        if rank > 1:
            self.save_state()

    def assigned_twice(self):
        chosen = self.accelerator.is_main_process
        chosen = True
        if chosen:
            self.save_state()

    def every_rank_at_its_turn(self):
        for rank in range(2):
            if rank == self.accelerator.process_index:
                self.save_state()


TOGETHER = [name for name in vars(Together) if not name.startswith("_") and name != "unknown"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_all_ranks(name, rank):
    script = Together(process(rank))
    getattr(script, name)()
    if script.told is not None:  # rank 1, where only rank 0 passes a condition of this test's own
        assert script.told.ranks == (0, 1)


def test_the_first_processes_of_two_machines():
    for rank in (0, 2):
        script = Script(process(rank, 4, machines=2))
        if script.accelerator.is_local_main_process:
            script.save_state()
        assert script.told.ranks == (0, 2)
        script.decorated_by_local_number()
        assert script.told.ranks == (0, 2)


def test_the_last_rank():
    script = Script(process(2, 3))
    if script.accelerator.is_last_process:
        script.save_state()
    assert script.told.ranks == (2,)
    script.accelerator.on_last_process(script.save_state)()
    assert script.told.ranks == (2,)


def test_what_the_call_was_under_is_told():
    script = Script(process())
    script.under_if()
    assert script.told.reason.startswith("under `if self.accelerator.is_main_process:` (")


def test_one_process_asks_nothing():
    script = Script(process(0, 1))
    script.under_if()
    assert script.told == callers.Callers((0,), "")


def run(source, name, script):
    exec(compile(source, name, "exec"), {"script": script})
    return script.told.ranks


SOURCE = "if script.accelerator.is_main_process:\n    script.save_state()\n"


def test_a_source_that_is_not_there_or_was_changed_says_nothing(tmp_path, monkeypatch):
    assert run(SOURCE, "<string>", Script(process())) == (0, 1)
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(callers, "_STARTED", path.stat().st_mtime - 10)
    assert run(SOURCE, str(path), Script(process())) == (0, 1)
    monkeypatch.setattr(callers, "_STARTED", path.stat().st_mtime + 10)
    assert run(SOURCE, str(path), Script(process())) == (0,)
