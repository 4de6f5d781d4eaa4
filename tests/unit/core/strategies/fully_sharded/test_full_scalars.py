"""Test the handler in torch's dispatcher: it exists as long as the runtime, and never replaces one of another library."""

from torch.distributed.tensor import DTensor

from headway.core.runtime import process
from headway.core.strategies.fully_sharded.full_scalars import _ITEM, FullScalars


def test_handler_is_removed_with_the_runtime() -> None:
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    scalars = FullScalars()
    scalars.register_handler(process.start(cpu=True))
    scalars.register_handler(process.current())
    assert table.keys() - before.keys() == {_ITEM}
    process.reset()
    assert table == before
    scalars.release()


def test_handler_of_another_library_is_kept() -> None:
    table = DTensor._op_dispatcher._custom_op_handlers

    def other() -> None:
        pass

    table[_ITEM] = other
    scalars = FullScalars()
    scalars.register_handler(process.start(cpu=True))
    process.reset()
    assert table.pop(_ITEM) is other
