"""Module `headway.test_utils`. Importing it raises `ImportNotServed`, which names an alternative to its helpers."""

from headway.compat.accelerate.provided_names.advice import explain_name
from headway.errors import ImportNotServed

raise ImportNotServed(explain_name("test_utils"), name=__name__)
