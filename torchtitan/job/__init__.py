"""A job with its ranks and device, and all that follows from them, each fact derived in one place. Needs no torch."""

from torchtitan.job.resolved_job import ResolvedJob

__all__ = ["ResolvedJob"]
