"""Memory while a program runs: out-of-memory errors recognised and undone, sizes searched, use shown."""
