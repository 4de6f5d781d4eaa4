"""Random sweeps: runs that are interrupted at random times, saves with failing calls, fuzzed inputs, and random training loops."""
