"""Module `headway.launchers`, which provides the names of `accelerate.launchers`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
