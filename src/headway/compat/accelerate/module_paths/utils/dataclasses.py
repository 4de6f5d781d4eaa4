"""Module `headway.utils.dataclasses`, which provides the names of `accelerate.utils.dataclasses`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
