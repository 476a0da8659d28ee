"""What stopped a run: hangs, the error that ended it, silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from podium.doctor.facts import Facts, Finding


def hangs(facts: Facts) -> Iterator[Finding]:
    for report in facts.reports[-3:]:
        owner, kind = report.get("owner", "something"), report.get("kind", "")
        doing = " > ".join(report.get("doing", ()))
        about = str(report.get("about") or "")[:160]
        waited = f"{report['waited_seconds']:.0f} s" if "waited_seconds" in report else "too long"
        blocked = _blocked_at(report)
        yield Finding(
            "error",
            f"hang: {owner}",
            f"{report.get('waiter', 'the run')} waited for {owner} {waited}; its deadline passed",
            "; ".join(x for x in (f"at {doing}" if doing else "", about, blocked, f"reports/{report['file']}") if x),
            _HANG_REMEDIES.get(kind, f"look at the stacks in the report; deadlines.{kind or 'call'} sets how long it may take"),
        )


_HANG_REMEDIES = {
    "reward": "the reward or scorer does not answer: give it a timeout, look at its service; the samples are named above",
    "rollout": "generation does not end: look at the engine's stack in the report; lower rollout.max_new_tokens",
    "call": "a worker does not come back: one rank waits in a collective for another; compare the ranks' stacks in the report",
    "data": "the data source does not answer: look at the file system or the dataset's server",
    "save": "saving does not end: look at the disk",
}


def _blocked_at(report: dict[str, Any]) -> str:
    """The last line of the waiting thread's stack."""
    for name, stack in report.get("threads", {}).items():
        if name.startswith(str(report.get("waiter", ""))) and stack:
            return "stands in " + " ".join(str(stack[-1]).split())
    return ""


def errors(facts: Facts) -> Iterator[Finding]:
    """What ended the run. A deadline's report, or a watched number's bound, says more: those are findings of their own."""
    if facts.stacks.strip():
        yield Finding(
            "error",
            "hang: the process ended itself",
            "a wait reacted neither to a signal nor to an exception",
            f"reports/stacks.txt: {_first_frame(facts.stacks)}",
            "native code does not return (a collective, a driver, a library): the stacks say which",
        )
    error = facts.error
    if error is None or error["type"] in ("KeyboardInterrupt", "DeadlineError" if facts.reports else "", "NumericsError"):
        return
    message = " ".join(str(error["message"]).split())[:300]
    yield Finding(
        "error",
        _ERRORS.get(error["type"], error["type"]),
        f"the run ended after step {error['step']}: {message}",
        "error.json (with the traceback)",
        _ERROR_REMEDIES.get(error["type"], f"mend it, then {facts.going_on}"),
    )


_ERRORS = {
    "WorkerLost": "a worker is gone or did not answer",
    "WorkerError": "workers do not agree, or one failed",
    "OutOfMemoryError": "out of device memory",
    "RewardError": "a reward failed",
    "DeadlineError": "a deadline passed",
    "CheckpointError": "a checkpoint could not be written",
}
_ERROR_REMEDIES = {
    "CheckpointError": "free disk space (podium plan says how much it takes); --resume goes on from the last one",
    "OutOfMemoryError": "podium plan on this run's folder says what each phase takes and what to change",
    "WorkerLost": "was it killed for memory (dmesg)? the message has the ranks and their stacks; --resume goes on",
    "WorkerError": "the message names the ranks: all must get the same batch, settings and code",
}


def _first_frame(stacks: str) -> str:
    """The innermost line of the first stack."""
    return next((" ".join(line.split()) for line in stacks.splitlines() if line.strip().startswith("File")), "")


def silence(facts: Facts) -> Iterator[Finding]:
    usual = facts.last("time/step")
    if facts.finished or facts.reports or facts.error or facts.stacks.strip() or not usual:
        return
    if facts.silent_seconds > max(600, 20 * usual):
        yield Finding(
            "warning",
            "stopped without a word",
            f"step {facts.steps[-1]['step']} of {facts.settings.get('run', {}).get('steps')} was the last, "
            f"{facts.silent_seconds / 3600:.1f} hours ago",
            f"a step took {usual:.1f} s; there is no summary.json and no report",
            f"the process is gone or hangs outside of what is watched; {facts.going_on}",
        )
