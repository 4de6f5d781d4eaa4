"""Support for optimizers that need whole parameters on sharded models: one rank updates each parameter."""
