"""What the runs of a comparison say: a record for each mode, and one that asks whether there was anything to see."""

from __future__ import annotations

import math
from collections.abc import Mapping

from harness.replay.difference import FirstDifference, locate_refused
from harness.replay.mode_run import ModeRun, spell_plans
from harness.replay.runs import Plot
from harness.verdict import CheckRecord, Claim, Outcome

CLAIMS = {
    "eager": Claim("replay.repeats", "Two eager runs from one seed give the same bits"),
    "capture": Claim("replay.capture", "A recorded step gives the bits of the eager one"),
    "replay": Claim("replay.replay", "A replayed step gives the bits of the eager one"),
    "vacuity": Claim("replay.not_vacuous", "There was something to compare"),
}


def judge_eager(odd: tuple[int, list[str]] | None) -> CheckRecord:
    """Say whether eager repeats itself.

    Args:
        odd: the first step after which two eager runs differ, and what differs.

    Returns:
        The record.
    """
    if odd is None:
        return CLAIMS["eager"].record(Outcome.PASS, "two eager runs are equal bit for bit")
    number, names = odd
    return CLAIMS["eager"].record(
        Outcome.INCONCLUSIVE,
        f"eager does not repeat itself: step {number}: {names[0]} and {len(names) - 1} more differ between two eager runs from one seed; "
        "this is not about replay: seed what the factory draws, share nothing between instances, use deterministic algorithms",
        findings=names,
    )


def judge_mode(run: ModeRun, difference: FirstDifference | None, plot: Plot) -> CheckRecord:
    """Say whether a mode gave what eager gave.

    Args:
        run: of the mode.
        difference: from eager.
        plot: of the runs.

    Returns:
        The record.
    """
    claim, evidence = CLAIMS[run.mode], run.to_dict()
    if difference is not None:
        return claim.record(Outcome.FAIL, str(difference), evidence=evidence, findings=difference.names)
    if run.overwritten:
        text = f"the loss that step {run.overwritten[0]} returned was overwritten later, and so were {len(run.overwritten) - 1} more"
        return claim.record(Outcome.FAIL, text, evidence=evidence)
    refusal = run.refusal
    if refusal is not None:
        kind = "refused" if refusal.is_named else "broke without a named error"
        left = f"; not as before the call: {', '.join(refusal.changed[:3])}" if refusal.changed else ""
        operator = locate_refused(plot, refusal)
        text = f"{kind} at {refusal}{left}" + (f"\n{operator}" if operator else "")
        return claim.record(Outcome.FAIL, text, evidence=evidence, findings=refusal.changed)
    return claim.record(Outcome.PASS, f"{len(run.digests)} states of {len(run.actions)} steps are equal bit for bit", evidence=evidence)


def judge_vacuity(runs: Mapping[str, ModeRun]) -> CheckRecord:
    """Say what a pass would rest on, and call it inconclusive where that is nothing.

    Args:
        runs: by mode, eager among them.

    Returns:
        The record.
    """
    claim, eager = CLAIMS["vacuity"], runs["eager"]
    if any(run.refusal is not None for run in runs.values()):
        return claim.skipped("a mode ended early")
    reasons = list(_nothing_moved(eager))
    replay, capture = runs.get("replay"), runs.get("capture")
    if capture is not None and "capture" not in capture.actions:
        reasons.append(f"nothing was recorded in {len(capture.actions)} steps; give more than the warm-up takes, which is 2 by default")
    if replay is not None:
        needed = "warm-up, capture, proof and one replay take 5 steps by default; give more steps, or fewer kinds of batches"
        if not replay.num_replays:
            reasons.append(f"nothing was replayed in {len(replay.actions)} steps ({', '.join(dict.fromkeys(replay.actions))}): {needed}")
        elif not replay.proven_elsewhere:
            reasons.append("no plan ever met another batch than the one it was captured with; give batches that differ")
    if reasons:
        return claim.record(Outcome.INCONCLUSIVE, "; ".join(reasons), findings=reasons)
    replays = "" if replay is None else f"{replay.num_replays} replays of {spell_plans(replay)}, "
    return claim.record(Outcome.PASS, f"{replays}{_count_changed(eager, 'param:')} parameters moved")


def _nothing_moved(eager: ModeRun) -> list[str]:
    reasons = []
    if all(math.isnan(loss) for loss in eager.losses):
        reasons.append("every loss is NaN")
    if len(eager.digests) > 1:
        if not _count_changed(eager, "param:"):
            reasons.append("no parameter ever changed: a rate of 0, or an optimizer of other parameters")
        if not _count_changed(eager, "grad:"):
            reasons.append("no gradient ever changed: the loss does not depend on the batch or on the parameters")
    return reasons


def _count_changed(run: ModeRun, prefix: str) -> int:
    states = list(run.digests.values())
    names = [name for name in states[-1] if name.startswith(prefix)]
    return sum(len({state.get(name) for state in states}) > 1 for name in names)
