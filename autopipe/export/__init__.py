"""What other trainers take from a plan, one file a trainer. Importing this package registers them all.

A new trainer is a module here with ``@exporter("name", …)`` over (plan, heading) → {file name: text}, or CannotExport.
An exporter is pure: it reads no file, knows no model, and needs no torch.
"""

from __future__ import annotations

import importlib
import pkgutil

from autopipe.export.trainer import Trainer, trainer, trainers

__all__ = ["Trainer", "trainer", "trainers"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
