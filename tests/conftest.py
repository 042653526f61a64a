"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast a machine draws examples decides no test: it may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
