"""What prepare() makes of models, optimizers and schedulers."""
