"""Test run events: each listener receives each event once, and a failing listener does not interrupt the run."""

import gc
import logging

import pytest

from headway.common import scope
from headway.core.runtime import events


class Listener:
    """Listener that records events, and raises `error` if one is given."""

    def __init__(self, error=None):
        self.heard, self.error = [], error
        events.subscribe(self.hear)

    def hear(self, happening):
        self.heard.append(happening)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def fresh_listeners():
    scope.drop(events.Listeners)
    yield
    scope.drop(events.Listeners)


def test_all_listeners_receive_an_event_once():
    one, two = Listener(), Listener()
    events.subscribe(one.hear)
    events.notify_listeners("checkpoint", step=3, source=one, folder="c")
    for listener in (one, two):
        (happening,) = listener.heard
        assert (happening.name, happening.step, happening.source) == ("checkpoint", 3, one)
        assert happening.details == {"folder": "c"}


def test_failing_listener_is_named_and_the_others_receive_the_event(caplog):
    Listener()  # garbage collected at once
    one, two = Listener(ValueError("no disk")), Listener()
    with caplog.at_level(logging.WARNING):
        events.notify_listeners("out_of_memory")
    assert "'out_of_memory' was not recorded: ValueError: no disk" in caplog.text
    assert len(one.heard) == len(two.heard) == 1


def test_listener_is_removed_with_its_owner():
    listener = Listener()
    del listener
    gc.collect()
    events.notify_listeners("checkpoint")
    assert scope.get_or_create(events.Listeners).event_listeners == []
