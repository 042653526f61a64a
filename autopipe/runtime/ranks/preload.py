"""What ranks import, for the process that they are forked from: torch alone takes a second or two for each otherwise.

Nobody else imports this module; see launch._config.
"""

from __future__ import annotations

import importlib
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends all ranks

for _name in (
    "autopipe.runtime.checking.plans",
    "autopipe.runtime.measuring.links",
    "autopipe.runtime.measuring.profiling",
    "torch.export._trace",  # what the first export imports
):
    importlib.import_module(_name)
