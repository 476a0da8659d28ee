"""A profile as plain values, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.profiling.run import OUTSIDE, Profile, StageTime


def as_plain(profile: Profile) -> dict[str, Any]:
    """Seconds, bytes, FLOP/s, tokens; shares are of 1."""
    return {
        "device": profile.device,
        "dtype": profile.dtype,
        "steps": profile.steps,
        "step_seconds": profile.step_seconds,
        "all_step_seconds": profile.seconds,
        "tokens_per_step": profile.tokens,
        "tokens_per_second": profile.tokens_per_second,
        "matrix_flops_per_second": profile.rate,
        "mfu": profile.mfu,
        "stages": [
            {
                "name": s.name,
                "seconds": s.seconds,
                "share": s.seconds / profile.step_seconds,
                "tokens": s.tokens,
                "tokens_per_second": s.tokens / s.seconds if s.seconds else None,
                "generated_tokens": s.generated,
                "flops": s.flops,
                "mfu": profile.mfu_of(s),
                "peak_bytes": s.peak_bytes,
                "kernel_ms": s.kernels,
                "longest_kernels": [{"name": k.name, "kind": k.kind, "ms": k.ms, "calls": k.calls} for k in s.longest],
            }
            for s in profile.stages
        ],
        "memory": [{"owner": h.owner, "role": h.role, "bytes": h.bytes, "host_bytes": h.host} for h in profile.memory],
        "notes": profile.notes,
    }


def main_stages(profile: Profile, least: float = 0.01) -> list[StageTime]:
    """Those that take at least such a share of the step."""
    return [s for s in profile.stages if s.seconds >= least * profile.step_seconds]


def stage_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Stage, time, share, tokens, tokens/s, TFLOP/s, MFU, peak memory."""
    rows: list[tuple[str, ...]] = []
    for s in profile.stages:
        mfu, per_second = profile.mfu_of(s), s.tokens / s.seconds if s.seconds else 0.0
        rows.append(
            (
                s.name,
                seconds(s.seconds),
                f"{100 * s.seconds / profile.step_seconds:.1f}%",
                f"{s.tokens:,.0f}" if s.tokens else "-",
                f"{per_second:,.0f}" if s.tokens else "-",
                f"{s.flops / s.seconds / 1e12:.3g}" if s.flops and s.seconds else "-",
                f"{100 * mfu:.1f}%" if mfu is not None else "-",
                size(s.peak_bytes) if s.peak_bytes else "-",
            )
        )
    left = profile.step_seconds - sum(s.seconds for s in profile.stages)
    rows.append(("between stages", seconds(max(0.0, left)), f"{100 * max(0.0, left) / profile.step_seconds:.1f}%", *("-",) * 5))
    return rows


def kernel_rows(profile: Profile) -> tuple[list[str], list[tuple[str, ...]]]:
    """The main stages as columns, kinds of kernels as rows: milliseconds, the longest kind first."""
    stages = main_stages(profile)
    kinds: dict[str, float] = {}
    for s in stages:
        for kind, ms in s.kernels.items():
            kinds[kind] = kinds.get(kind, 0.0) + ms
    order = sorted(kinds, key=lambda kind: -kinds[kind])
    return [s.name for s in stages], [(kind, *(_ms(s.kernels, kind) for s in stages)) for kind in order]


def _ms(kernels: Mapping[str, float], kind: str) -> str:
    found = kernels.get(kind, 0.0)
    return f"{found:,.1f}" if found >= 0.05 else "-"


def memory_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Owner, role, bytes on the device, bytes in host memory."""
    return [
        (h.owner, h.role, "not known" if h.bytes is None else size(h.bytes), size(h.host) if h.host else "-")
        for h in profile.memory
    ]


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def size(value: float) -> str:
    """Bytes for reading: GB are 1e9."""
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


def draw(profile: Profile, path: str | Path, title: str) -> Path:
    """Three panels into a PNG: time by stage, kernels by stage, memory by owner."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[1, 1.3, 1])
    stages = main_stages(profile)
    names = [s.name for s in stages]
    _bars(top, names, [s.seconds for s in stages], "seconds a step", "Time by stage")
    for bar, s in zip(top.patches, stages, strict=True):
        mfu = profile.mfu_of(s)
        if mfu is not None:
            top.annotate(
                f" {100 * mfu:.0f}% MFU", (bar.get_width(), bar.get_y() + bar.get_height() / 2), va="center", fontsize=8
            )
    _stacked(middle, stages)
    held = [h for h in profile.memory if h.bytes]
    _bars(bottom, [f"{h.owner} ({h.role})" for h in held], [(h.bytes or 0) / 1e9 for h in held], "GB", "Memory by owner")
    figure.suptitle(f"{title}: {seconds(profile.step_seconds)} a step, {profile.tokens_per_second:,.0f} tokens/s")
    figure.savefig(path, dpi=110)
    return Path(path)


def _bars(axis: Any, names: list[str], values: list[float], unit: str, title: str) -> None:
    axis.barh(range(len(names)), values, color="#4878a8")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(unit, fontsize=9)
    axis.margins(x=0.12)
    _plain(axis)


def _stacked(axis: Any, stages: list[StageTime], most: int = 8) -> None:
    """A bar for each stage, cut by kind: the largest in colours of their own, the rest together; last what is no kernel."""
    total: dict[str, float] = {}
    for s in stages:
        for kind, ms in s.kernels.items():
            total[kind] = total.get(kind, 0.0) + ms
    waits = [kind for kind in OUTSIDE.values() if kind in total]
    ranked = sorted((k for k in total if k not in (*waits, "other")), key=lambda kind: -total[kind])
    groups = {kind: [kind] for kind in ranked[:most]} | {"other": [*ranked[most:], "other"]} | {kind: [kind] for kind in waits}
    lefts = [0.0] * len(stages)
    for number, (name, kinds) in enumerate(groups.items()):
        values = [sum(s.kernels.get(kind, 0.0) for kind in kinds) for s in stages]
        color = "#e4e4e4" if name in waits else "#9a9a9a" if name == "other" else f"C{number}"
        axis.barh(range(len(stages)), values, left=lefts, label=name, color=color)
        lefts = [a + b for a, b in zip(lefts, values, strict=True)]
    axis.set_yticks(range(len(stages)), [s.name for s in stages], fontsize=8)
    axis.invert_yaxis()
    axis.set_title("Kernels by kind, in the recorded step", fontsize=11, loc="left")
    axis.set_xlabel("ms", fontsize=9)
    axis.legend(fontsize=7, ncols=2)
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.3, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
