"""A run of any size in one process, without values: what a plan or a forecast of a script is taken from."""
