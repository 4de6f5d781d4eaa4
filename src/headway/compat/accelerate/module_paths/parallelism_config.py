"""Module `headway.parallelism_config`, which provides the names of `accelerate.parallelism_config`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)
