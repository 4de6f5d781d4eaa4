"""`ComparedStrategy`, the part of a strategy that provides the parameters to compare between ranks."""

from collections.abc import Iterable

import torch

from headway.core.runtime.collectives.checked import Collectives


class ComparedStrategy:
    """Protocol for the check that replicated parameters stay equal on all ranks that hold them.

    By default there are no peers and nothing is compared. `Strategy` sets all ranks as peers.
    """

    _peers: Collectives | None = None

    def get_peers(self) -> Collectives | None:
        """Return the collectives over the ranks whose parameters must equal this rank's.

        Return None if there are no such ranks, or while ranks train separately.
        """
        return self._peers

    def list_replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return pairs of (name, parameter) for the parameters whose values must be equal on all peers."""
        return ()

    def find_changed_shards(self) -> tuple[list[str], list[int]]:
        """Return which sharded parameters user code has changed in place since the last call.

        Ranks compare the results, to distinguish a change on one rank from a change on all ranks.

        Returns:
            Names of the changed parameters, and for every parameter the number by which an optimizer step increases its
                version counter.
        """
        return [], []
