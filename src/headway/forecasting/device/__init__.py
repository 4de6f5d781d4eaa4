"""Model the device of a forecast: its memory, its kernels and its allocator."""
