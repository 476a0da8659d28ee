"""What a run's folder says of its troubles: each check is a small function from the run's facts to findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from podium.doctor.facts import LAST, Facts, Finding, read_run
from podium.doctor.growth import leaks
from podium.doctor.stops import errors, hangs, silence

__all__ = ["Facts", "Finding", "examine", "read_run"]


def examine(facts: Facts) -> list[Finding]:
    """All findings, worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.severity))


# ------------------------------------------------------------------ checks


def nonfinite(facts: Facts) -> Iterator[Finding]:
    for name in sorted({n for row in facts.steps for n in row if n.endswith("/skipped_updates")}):
        bad = [step for step, value in facts.series(name) if value > 0]
        if not bad:
            continue
        share = len(bad) / len(facts.steps)
        kept = f"; their samples: samples/{facts.nonfinite[0]}" if facts.nonfinite else ""
        yield Finding(
            "error" if share > 0.2 or bad[-1] == facts.steps[-1]["step"] else "warning",
            "gradient not finite",
            f"{len(bad)} of {len(facts.steps)} steps left out an update of the {name.split('/')[0]}, first step {bad[0]}",
            f"{name} > 0{kept}",
            _nonfinite_remedy(facts),
        )


def _nonfinite_remedy(facts: Facts) -> str:
    if facts.settings.get("model", {}).get("dtype") == "float16":
        return "float16 overflows: take model.dtype=bfloat16"
    return "look at the kept samples (an infinite reward or advantage?), lower optimizer.lr, add optimizer.warmup_updates"


def equal_rewards(facts: Facts) -> Iterator[Finding]:
    signal = facts.series("advantages/abs")[-LAST:]
    if len(signal) >= 2 and all(value == 0 for _, value in signal):
        reward = facts.last("reward/mean")
        why = (
            "the reward gives the same number for all"
            if reward not in (0.0, 1.0)
            else "all are wrong"
            if reward == 0
            else "all are right"
        )
        shown = [s.get("response", "")[:80] for s in facts.samples[:2]]
        yield Finding(
            "error",
            "no signal: all rewards are equal",
            f"in the last {len(signal)} steps no response was better than another of its group ({why})",
            f"advantages/abs = 0, reward/mean = {_n(reward)}; responses: {shown}",
            "try the reward on the samples by hand; easier or harder prompts; a larger batch.group_size; sampling_rounds=3",
        )
    elif signal and sum(value == 0 for _, value in signal) > 0 and len(signal) >= 4:
        yield Finding(
            "note",
            "little signal",
            f"{sum(v == 0 for _, v in signal)} of the last {len(signal)} steps taught nothing",
            "advantages/abs = 0",
            "sampling_rounds=3 replaces groups whose rewards are all equal",
        )


def broken_rewards(facts: Facts) -> Iterator[Finding]:
    rows = facts.last("reward/skipped") or 0.0
    size = float(facts.settings.get("batch", {}).get("prompts_per_step", 1)) * float(
        facts.settings.get("batch", {}).get("group_size", 1)
    )
    if rows > 0.05 * size:
        yield Finding(
            "error" if rows > 0.5 * size else "warning",
            "reward fails",
            f"{rows:.1f} of {size:.0f} samples a step were left out because their reward raised",
            "reward/skipped",
            "set on_error: raise for the source to see the error",
        )


def kl(facts: Facts) -> Iterator[Finding]:
    for name in ("kl/per_token", "actor/ref_kl"):
        last, first = facts.last(name), facts.first(name)
        if last is not None and last > max(0.5, 20 * abs(first or 0.0)):
            yield Finding(
                "error",
                "KL explosion",
                f"the policy is {last:.3g} nats a token from the reference (at the start {_n(first)})",
                name,
                "lower optimizer.lr, raise kl.coef or take kl.controller=adaptive; read the samples for a reward hack",
            )
            return


def entropy(facts: Facts) -> Iterator[Finding]:
    for name in ("watch/entropy", "actor/entropy"):
        last, first = facts.last(name), facts.first(name)
        if last is not None and first and last < min(0.1, 0.2 * first):
            yield Finding(
                "warning",
                "entropy collapse",
                f"the policy's entropy fell from {first:.3g} to {last:.3g} nats a token: it explores no more",
                name,
                "raise clip_high (0.28), add entropy_coef or a KL term, raise rollout.temperature, lower optimizer.lr",
            )
            return


def log_probs(facts: Facts) -> Iterator[Finding]:
    bound = (facts.settings.get("watch", {}).get("log_prob_gap") or {}).get("warn") or 0.05
    for name in ("watch/log_prob_gap", "rollout/log_prob_gap"):
        series = [(s, v) for s, v in facts.series(name)]
        bad = [(s, v) for s, v in series if not v <= bound]
        if bad:
            worst = max(v for _, v in bad)
            yield Finding(
                "error" if worst > 0.2 or math.isnan(worst) else "warning",
                "training and rollout disagree",
                f"their log-probs differ by up to {worst:.3g} nats a token, from step {bad[0][0]} on",
                f"{name}, bound {bound:g}; effective sample size {_n(facts.last('watch/effective_sample_size'))}",
                f"podium doctor numerics {facts.path} finds the cause; correction.kind=token_truncated bounds the harm",
            )
            return


def staleness(facts: Facts) -> Iterator[Finding]:
    last = facts.last("watch/staleness")
    if last is not None and last > 8:
        yield Finding(
            "warning",
            "old samples",
            f"samples are {last:.1f} updates old on average",
            "watch/staleness",
            "sample again before each step's updates; watch.staleness.stop bounds it",
        )


def lengths(facts: Facts) -> Iterator[Finding]:
    cut, size = facts.last("rollout/cut_share"), facts.last("rollout/response_tokens")
    most = facts.settings.get("rollout", {}).get("max_new_tokens")
    if cut is not None and cut > 0.3:
        yield Finding(
            "warning",
            "truncated responses",
            f"{cut:.0%} of the responses end at rollout.max_new_tokens={most} without an end token",
            "rollout/cut_share",
            "raise rollout.max_new_tokens; check the chat template and the end token; overlong_buffer shapes the length",
        )
    if size is not None and size < 2:
        yield Finding(
            "warning",
            "empty responses",
            f"responses have {size:.1f} tokens on average",
            "rollout/response_tokens",
            "check the prompt's template (does it open an answer?) and rollout.stop",
        )


def gradients(facts: Facts) -> Iterator[Finding]:
    for name in sorted({n for row in facts.steps for n in row if n.endswith("/grad_norm")}):
        values = [v for _, v in facts.series(name) if not math.isnan(v)]
        if len(values) < 4:
            continue
        middle = sorted(values)[len(values) // 2]
        if values[-1] > 50 * max(middle, 1e-12):
            yield Finding(
                "warning",
                "gradient spikes",
                f"{name} is {values[-1]:.3g}, usually {middle:.3g}",
                name,
                "lower optimizer.lr or optimizer.max_grad_norm; look at that step's samples",
            )


def memory(facts: Facts) -> Iterator[Finding]:
    for report in facts.reports:
        used = report.get("memory", {})
        if used.get("gpu_peak_mib") and used["gpu_mib"] > 0.97 * used["gpu_peak_mib"] > 0:
            yield Finding(
                "note",
                "memory at its peak",
                f"{used['gpu_mib']:.0f} MiB of GPU memory were in use when the deadline passed",
                f"reports/{report['file']}",
                f"podium plan {facts.path} says what each phase takes",
            )
            return


def bounds(facts: Facts) -> Iterator[Finding]:
    """Alarms that no other check speaks of."""
    spoken = ("log_prob_gap", "entropy", "skipped_updates", "effective_sample_size")
    for metric in dict.fromkeys(a["metric"] for a in facts.alarms if not a.get("over")):
        if not metric.endswith(spoken):
            first = next(a for a in facts.alarms if a["metric"] == metric)
            yield Finding(
                "warning",
                f"{metric} beyond its bound",
                f"{metric} = {_n(first['value'])} at step {first['step']}",
                "alarms.jsonl",
                "",
            )


Check = Callable[[Facts], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    hangs,
    errors,
    silence,
    nonfinite,
    log_probs,
    equal_rewards,
    broken_rewards,
    kl,
    entropy,
    staleness,
    lengths,
    gradients,
    memory,
    leaks,
    bounds,
)


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
