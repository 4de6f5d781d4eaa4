"""Test that a rollback restores all fields of windows and clocks, or names the fields that it does not restore."""

import torch

from headway import Accelerator
from headway.core.data.batch_reads import BatchReads
from headway.core.training.update_clock import UpdateClock
from headway.core.training.windows import UNSPLIT, AccumulationWindow, AccumulationWindows, BatchPiece, LossWeight


class FakeLoader:
    """Loader of which only the identity matters."""


def make_windows(num_steps: int = 2) -> AccumulationWindows:
    return AccumulationWindows(num_steps, BatchReads())


def test_every_field_of_the_windows_is_restored_or_named() -> None:
    state = make_windows()
    assert set(vars(state)) >= AccumulationWindows.NOT_ROLLED_BACK, "NOT_ROLLED_BACK names fields that no longer exist"
    covered = set(vars(state)) - AccumulationWindows.NOT_ROLLED_BACK
    snapshot = state.snapshot()
    assert set(snapshot) == covered
    plain = covered - {"_by_models", "reads"}  # these two have copies of their own
    for name in plain:
        setattr(state, name, object())
    state.restore(snapshot)
    assert {name: getattr(state, name) for name in plain} == {name: snapshot[name] for name in plain}


def test_batches_read_ahead_are_restored() -> None:
    reads, loader = BatchReads(), FakeLoader()
    reads.active_loaders.append(loader)  # type: ignore[arg-type]
    state = AccumulationWindows(2, reads, sync_with_loader=False)
    before = state.snapshot()
    reads.untrained_batches += [loader, loader]  # type: ignore[list-item]
    state.begin_micro_batch([torch.nn.Linear(1, 1)])
    assert reads.untrained_batches == []
    assert state.reads.trained_on == [loader]
    after = state.snapshot()
    assert after["reads"] != before["reads"]
    state.restore(before)
    assert state.snapshot()["reads"] == before["reads"]
    assert state.reads.trained_on == [loader], "the loop around a replayed batch does not repeat what it did before"


def test_added_counter_is_restored_too() -> None:
    for state in (make_windows(), UpdateClock()):
        state.num_added = 1  # type: ignore[union-attr]
        snapshot = state.snapshot()
        state.num_added = 2  # type: ignore[union-attr]
        state.restore(snapshot)
        assert state.num_added == 1  # type: ignore[union-attr]


def test_windows_are_restored_and_new_ones_are_forgotten() -> None:
    state, first, second = make_windows(3), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state.begin_micro_batch([first])
    state.current.micro_weight, state.current.local_weight = LossWeight(2.0, 2.0), 2.0
    before, kept = dict(vars(state.current)), state.current
    snapshot = state.snapshot()
    for _ in range(2):  # a snapshot can be restored twice
        state.begin_micro_batch([first])
        state.current.micro_weight, state.current.local_weight = LossWeight(3.0, None), 5.0
        state.current.close_after_error()
        state.begin_micro_batch([second])
        assert state.num_windows == 2
        state.restore(snapshot)
        assert state.current is kept
        assert vars(state.current) == before
        assert (state.num_windows, state.is_unfinished, state.are_closed) == (1, True, False)


def test_every_field_of_a_window_is_restored() -> None:
    state = make_windows()
    state.begin_micro_batch([torch.nn.Linear(1, 1)])
    before, snapshot = dict(vars(state.current)), state.snapshot()
    for name in vars(state.current):
        setattr(state.current, name, "changed")
    state.restore(snapshot)
    assert vars(state.current) == before
    assert set(before) == set(vars(AccumulationWindow()))


def test_counts_of_an_optimizer_are_restored() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(value: float) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), value)).sum())
            optimizer.step()

    train(1.0)
    snapshots = [each.snapshot() for each in (optimizer, accelerator.clock)]
    before = optimizer.num_updates, optimizer.step_was_skipped, optimizer.last_window_length, accelerator.num_updates
    for _ in range(2):
        train(1.0)
        assert accelerator.num_updates > before[-1]
        for each, snapshot in zip((optimizer, accelerator.clock), snapshots):
            each.restore(snapshot)
        now = optimizer.num_updates, optimizer.step_was_skipped, optimizer.last_window_length, accelerator.num_updates
        assert now == before


def test_held_update_waits_until_the_next_micro_batch_begins() -> None:
    state, model = make_windows(1), torch.nn.Linear(1, 1)
    state.begin_micro_batch([model])
    state.current.close(1.0)
    assert (state.is_step_due, state.are_gradients_final) == (True, True)
    state.set_steps_enabled(False)
    assert (state.is_step_due, state.are_gradients_final) == (False, False)
    state.set_steps_enabled(True)
    assert state.are_gradients_final
    state.set_steps_enabled(False)
    state.begin_micro_batch([model])
    assert state.is_step_due


def test_pieces_of_a_batch_are_one_micro_batch_and_the_last_ends_the_window() -> None:
    state, model = make_windows(1), torch.nn.Linear(1, 1)
    seen = []
    for piece in (BatchPiece(1, 2, 4, False), BatchPiece(1, 2, 4, True)):
        state.set_piece(piece)
        state.begin_micro_batch([model])
        seen.append((state.current.num_done, state.is_last))
    assert seen == [(1, False), (1, True)]
    state.set_piece(UNSPLIT)
    assert not state.is_in_splittable_batch
