"""Which samples come, in which order, drawn from which random numbers, and which rank gets them."""
