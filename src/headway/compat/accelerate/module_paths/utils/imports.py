"""Module `headway.utils.imports`, which provides the names of `accelerate.utils.imports`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
