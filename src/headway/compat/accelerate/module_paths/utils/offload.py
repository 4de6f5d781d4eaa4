"""Module `headway.utils.offload`, which provides the names of `accelerate.utils.offload`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
