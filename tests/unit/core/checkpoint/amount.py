"""Number of examples in property tests of checkpoints. More: `HEADWAY_EXAMPLES=10000 pytest tests/unit/core/checkpoint`."""

import os

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "200"))
