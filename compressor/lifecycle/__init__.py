"""The lifecycle: a session sends events to modifiers, each of them a small state machine; the rules are tables."""

from __future__ import annotations

from compressor.lifecycle.events import FOLLOWS, Call, Event, EventType
from compressor.lifecycle.hooks import HooksMixin
from compressor.lifecycle.interface import CALLS, TRANSITIONS, BaseStream, CalibrationNeed, Flags, ModifierInterface, PlannedModule
from compressor.lifecycle.modifier import Modifier
from compressor.lifecycle.session import Session
from compressor.lifecycle.state import Fallback, FinishedStage, ModuleRecord, Report, StageValue, State

__all__ = [
    "CALLS",
    "FOLLOWS",
    "TRANSITIONS",
    "BaseStream",
    "CalibrationNeed",
    "Call",
    "Event",
    "EventType",
    "Fallback",
    "FinishedStage",
    "Flags",
    "HooksMixin",
    "Modifier",
    "ModifierInterface",
    "ModuleRecord",
    "PlannedModule",
    "Report",
    "Session",
    "StageValue",
    "State",
]
