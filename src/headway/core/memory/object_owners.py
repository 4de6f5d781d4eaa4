"""Registry of the objects that keep prepared models, optimizers and loaders alive, so that their memory can be freed."""

import weakref
from collections.abc import Container, Mapping
from typing import Any, Protocol

from headway.common import scope


class ObjectOwner(Protocol):
    """Interface of an object that keeps prepared models, optimizers and loaders alive, such as `Preparation`."""

    def list_prepared_objects(self) -> Mapping[int, str]:
        """Return a dict from the `id` of each prepared object to its name for messages."""

    def release(self, kept_ids: Container[int] = ()) -> None:
        """Release all prepared objects whose IDs are not in `kept_ids`. By default, release all."""

    def read_progress(self) -> dict[str, Any]:
        """Return the counts of updates, samples and tokens."""

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Restore the counts of updates, samples and tokens."""


class _ObjectOwners(weakref.WeakSet[ObjectOwner]):
    """Registry of the owners of prepared objects in this process, as weak references."""


def register_owner(owner: ObjectOwner) -> None:
    """Register an owner of prepared objects, so that a failed attempt can release them.

    Only a weak reference is kept.
    """
    scope.get_or_create(_ObjectOwners).add(owner)


def list_owners() -> list[ObjectOwner]:
    """Return the registered owners that still exist."""
    return list(scope.get_or_create(_ObjectOwners))


def list_prepared_objects() -> dict[int, str]:
    """Return a dict from the `id` of each prepared object of this process to its name for messages."""
    names: dict[int, str] = {}
    for owner in list_owners():
        names.update(owner.list_prepared_objects())
    return names
