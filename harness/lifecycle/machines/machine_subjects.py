"""What the machines drive in our own library: probes that do as they are told, or somebody's modifier among probes."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from compressor.lifecycle import Session
from harness.lifecycle.driving.callback_actions import Actor
from harness.lifecycle.driving.driver import CompressorRun, Run, apply_settings
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.probes import Chain, Probe
from harness.lifecycle.machines import strategies
from harness.lifecycle.machines.modifier_machine import ModifierMachine, SoloStage
from harness.lifecycle.machines.session_machine import SessionMachine, Stage, build
from harness.lifecycle.machines.strategies import Setup
from harness.lifecycle.oracle import SessionModel
from harness.lifecycle.subject import Subject
from harness.profiles import Profile

# Over a real modifier a step costs far more than over probes, and most of what can be found is found in the first runs.
GUEST_SHARE = 0.2


def probe_stage(session_class: type[Session] = Session) -> Stage:
    """Return a stage of one to three probes over a chain, where everything that happens is planned and so everything is compared.

    Args:
        session_class: the session to drive.

    Returns:
        The stage.
    """

    def open_run(setup: Setup) -> CheckedRun:
        modifiers = [apply_settings(Probe(), one) for one in setup.settings]
        run = CompressorRun(Chain(), modifiers, setup.steps_per_epoch, setup.keep_originals, session_class)
        run.recorder.perform = Actor(run, session_class).perform
        return CheckedRun(run, SessionModel(setup.settings, setup.steps_per_epoch, setup.keep_originals))

    return Stage(open_run, _forward_chain)


def guest_stage(subject: Subject) -> Stage:
    """Return a stage of somebody's modifier, alone or with probes behind it.

    Args:
        subject: the modifier and its model.

    Returns:
        The stage.
    """

    def open_run(setup: Setup) -> CheckedRun:
        run = subject.open(setup)
        checked = subject.check(run)
        checked.on_failure = None  # a modifier may refuse much of what is drawn
        if subject.template.calibration_need != "none":
            checked.flow, checked.stages = partial(subject.flow, checked, run), subject.parts
        return checked

    return Stage(open_run, subject.forward, strategies.GUEST_STEPS, subject.parts, subject.stopwatch)


def drive_session(stage: Stage, profile: Profile, share: float = 1.0, shrink: bool = True) -> int:
    """Drive sessions at random.

    Args:
        stage: what to drive.
        profile: how long.
        share: of the profile's runs.
        shrink: look for the shortest failing run.

    Returns:
        The number of steps.

    Raises:
        Violation: something went another way than the oracle.
    """
    run_state_machine_as_test(build(SessionMachine, stage), settings=_settings(profile, share, shrink))
    return stage.num_steps


def drive_modifier(profile: Profile, share: float = 1.0, shrink: bool = True, stage: SoloStage | None = None) -> int:
    """Drive single probes at random, without a session.

    Args:
        profile: how long.
        share: of the profile's runs.
        shrink: look for the shortest failing run.
        stage: what to drive; by default a fresh one.

    Returns:
        The number of steps.

    Raises:
        Violation: something went another way than the oracle.
    """
    stage = stage or SoloStage()
    run_state_machine_as_test(build(ModifierMachine, stage), settings=_settings(profile, share, shrink))
    return stage.num_steps


def _settings(profile: Profile, share: float, shrink: bool) -> settings:
    phases = (Phase.reuse, Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    return settings(profile.machine_settings(share), phases=phases, report_multiple_bugs=False, print_blob=False)


def _forward_chain(run: Run) -> object:
    return run.model(torch.ones(1, 2))
