"""Headway's launcher, which turns a launch configuration into running processes without importing torch itself."""
