"""What `import accelerate` finds where this folder is on the path: Headway's own modules take the name over."""

from headway.compat.accelerate.served.names import take_over

take_over()
