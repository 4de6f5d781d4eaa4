"""Model the device that a forecast is for: its memory, its kernels and its allocator."""
