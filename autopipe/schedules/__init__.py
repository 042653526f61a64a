"""The schedules, one file each. Importing this package registers them all, and those of other packages.

A new schedule is a module here with ``@schedule("Name", …)`` over a function (shape, stage times) → order; another
package offers one through an entry point of the group ``autopipe.schedules`` that names such a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _entry in entry_points(group="autopipe.schedules"):
    _entry.load()
