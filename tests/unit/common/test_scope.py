"""Test the registry of per-process singletons."""

import threading

from headway.common import scope
from headway.common.scope import Scope


class Thing:
    pass


def test_each_scope_has_one_object_of_each_class():
    one, other = Scope(), Scope()
    assert not one.has(Thing)
    assert one.get_or_create(Thing) is one.get_or_create(Thing)
    assert one.has(Thing)
    assert one.get_or_create(Thing) is not other.get_or_create(Thing)
    former = one.get_or_create(Thing)
    one.drop(Thing)
    one.drop(Thing)
    assert one.get_or_create(Thing) is not former


def test_falsy_object_is_kept():
    kept = Scope()
    kept.get_or_create(list).append(1)
    assert kept.get_or_create(list) == [1]
    assert kept.get_or_create(set) is kept.get_or_create(set)


def test_threads_that_create_an_object_at_once_get_the_same_one():
    shared, gate, found = Scope(), threading.Barrier(2), []

    def make():
        gate.wait(10)  # both threads found no object yet
        return Thing()

    threads = [threading.Thread(target=lambda: found.append(shared.get_or_create(make))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert found[0] is found[1]


def test_process_has_one_default_scope():
    scope.drop(Thing)
    assert scope.get_or_create(Thing) is scope.get_or_create(Thing)
    scope.drop(Thing)
    assert not scope.has(Thing)
