"""What a pass and a rule are, and the driver that runs, checks, times and reports passes."""

from graphc.rewrite.bisect import bisect
from graphc.rewrite.driver import run_passes
from graphc.rewrite.facts import Facts
from graphc.rewrite.options import configure
from graphc.rewrite.rules import Log, Pass, Refused, Rule, apply_rules, apply_until_stable

__all__ = [
    "Facts",
    "Log",
    "Pass",
    "Refused",
    "Rule",
    "apply_rules",
    "apply_until_stable",
    "bisect",
    "configure",
    "run_passes",
]
