"""Module `headway.utils.fsdp_utils`, which provides the names of `accelerate.utils.fsdp_utils`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
