"""The learnt order of use."""

from itertools import islice

from headway.bigmodel.order import Order


def ahead(order, num, after=()):
    return list(islice(order.ahead(after), num))


def test_before_anything_was_seen_the_order_of_registration_is_the_guess():
    order = Order(4)
    assert ahead(order, 3) == []
    order.note(1)
    assert ahead(order, 4) == [2, 3, 0, 1]
    assert ahead(order, 2, [2]) == [3, 0]


def test_loops_skips_and_second_uses():
    order = Order(5)
    steps = [0, 3, 1, 3, 4]  # 3 is used twice, 2 never
    for unit in steps * 2:
        order.note(unit)
    assert ahead(order, 10) == steps * 2
    order.note(0)
    order.note(3)
    assert ahead(order, 3) == [1, 3, 4]
    assert ahead(order, 2, [1]) == [3, 4]
    assert ahead(order, 2, [1, 3]) == [4, 0]


def test_an_encoder_and_then_a_decoding_loop():
    order = Order(4)
    for unit in [0, 1, *[2, 3] * 5]:
        order.note(unit)
    assert ahead(order, 4) == [2, 3, 2, 3]
    for unit in [0, 1]:
        order.note(unit)
    # What came last after (2, 3) was a new prompt.
    assert ahead(order, 4) == [2, 3, 0, 1]


def test_one_unit():
    order = Order(1)
    order.note(0)
    assert ahead(order, 2) == [0, 0]
