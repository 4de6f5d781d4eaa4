"""Module `headway.commands`. Importing it raises `ImportNotServed` with an alternative to Accelerate's commands."""

from headway.compat.accelerate.provided_names.advice import explain_name
from headway.errors import ImportNotServed

raise ImportNotServed(explain_name("commands"), name=__name__)
