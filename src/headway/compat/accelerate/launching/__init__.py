"""Accelerate's launcher, config files and plugins, translated to Headway's settings, and checks of the machine."""
