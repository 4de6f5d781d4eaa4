"""Module `headway.checkpointing`, which provides the names of `accelerate.checkpointing`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
