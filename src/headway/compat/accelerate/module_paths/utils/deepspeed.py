"""Module `headway.utils.deepspeed`, which provides the names of `accelerate.utils.deepspeed`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
