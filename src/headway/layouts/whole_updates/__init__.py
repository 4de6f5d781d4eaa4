"""Support for optimizers that need full parameters on sharded models: one rank updates each parameter."""
