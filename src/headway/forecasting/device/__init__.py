"""The device of a forecast: its size, its kernels, its allocator."""
