"""Libraries that import Accelerate: each runs with the real package, and with Headway under Accelerate's name."""
