"""Core of Headway: the parts that every run uses.

No module in this package imports an extension directly. Extensions are, for example, layouts, planning, the Trainer
and Accelerate's names. `extensions.py` loads them by a public word such as "tp".
"""
