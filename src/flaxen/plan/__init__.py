"""Does a run fit, and what will it cost: before any weight is read."""

from __future__ import annotations

from flaxen.plan.job import Job
from flaxen.plan.report import Report, planned
from flaxen.plan.topology import Target, prepare, target
from flaxen.show.flops import model_flops

__all__ = ["Job", "Report", "Target", "model_flops", "planned", "prepare", "target"]
