"""State of this process: rank, device, process group, RNG states, control plane and heartbeat."""
