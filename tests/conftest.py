"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# A machine shared with an engine may be slow: slowness alone is no failure.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
settings.load_profile("shared")
