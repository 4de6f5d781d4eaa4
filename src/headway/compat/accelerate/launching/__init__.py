"""Accelerate's launcher, config file and plugins, in Headway's settings; and what scripts ask about the machine."""
