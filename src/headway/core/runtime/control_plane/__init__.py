"""Control plane: votes, agreements and notifications between ranks, over a store that needs no process group."""
