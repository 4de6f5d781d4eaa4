"""Launcher of Headway, which turns a launch configuration into running processes, without importing torch."""
