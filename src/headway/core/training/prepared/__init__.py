"""Prepared models, optimizers and schedulers, as prepare() returns them."""
