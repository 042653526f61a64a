"""Everything that touches torch: capture, stages, measuring, running, checking."""
