"""Adapters for other systems: engines that start the training processes, such as Ray, and object stores."""
