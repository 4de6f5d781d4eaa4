"""From a LaunchConfig to running processes; torch-free."""
