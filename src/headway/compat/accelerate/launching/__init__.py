"""Accelerate's launcher, config files and layout options, translated for Headway, and checks of the machine."""
