"""The hang watch, which finds the rank that others wait for in a collective, and the reason. It needs no launcher."""
