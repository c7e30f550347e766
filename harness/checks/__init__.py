"""The numeric catalogue: numbered checks for anybody's quantizer, packer, solver, transform, layer or observer.

    import harness

    print(harness.check(my_quantizer))      # a report: text, JSON, JUnit

protocols.py   what a subject has to offer, per kind       catalogue/    the registry: a check is a decorated function
suites/        the checks                                  run.py        object -> subject -> report
adapters/      libraries as subjects                       oracles.py    slow and exact, sharing no code with what they judge

Names are imported on first use, so that listing the catalogue needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.object_reference import lazy_names

if TYPE_CHECKING:
    from harness.checks.catalogue.registry import Check, CheckFailed, NothingToCheckError, register
    from harness.checks.parametrize import parametrize_with_catalogue
    from harness.checks.run import CheckReport, check


_PUBLIC = {
    "CheckFailed": "harness.checks.catalogue.registry",
    "Check": "harness.checks.catalogue.registry",
    "CheckReport": "harness.checks.run",
    "NothingToCheckError": "harness.checks.catalogue.registry",
    "check": "harness.checks.run",
    "parametrize_with_catalogue": "harness.checks.parametrize",
    "register": "harness.checks.catalogue.registry",
}

__all__ = ["Check", "CheckFailed", "CheckReport", "NothingToCheckError", "check", "parametrize_with_catalogue", "register"]


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
