"""Adapters for engines that start the processes themselves."""
