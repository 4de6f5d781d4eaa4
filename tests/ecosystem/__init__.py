"""Libraries that import Accelerate, each run on the real package and on Headway under its name."""
