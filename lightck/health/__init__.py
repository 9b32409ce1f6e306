"""Symptoms of failures to come, as this machine shows them: probes, and the monitor that runs them.

Everything is read below a root, so that a made-up machine can be read as well.
"""

from lightck.health.monitor import HealthMonitor, UnavailableError

__all__ = ["HealthMonitor", "UnavailableError"]
