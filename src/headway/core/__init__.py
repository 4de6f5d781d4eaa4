"""Core of Headway: the parts that every run uses.

No module in this package imports an extension (layouts, planning, Trainer, Accelerate's names). `extensions.py` finds
extensions by public words.
"""
