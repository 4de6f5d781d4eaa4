"""Records which library provides the name `accelerate`."""

import accelerate

from tests.scripts.evidence import Evidence

state = accelerate.PartialState(cpu=True)
evidence = Evidence("evidence", state.process_index)
evidence.add("ranks", state.num_processes, state.process_index)
evidence.add("is_headway", float(hasattr(accelerate, "__headway_version__")))
evidence.write()
