"""Draws the R1 example's curves: python examples/r1/plot.py [runs/r1]   (writes curves.png there)"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/r1")
figure = Figure(figsize=(11, 6), layout="constrained")
FigureCanvasAgg(figure)
(held_out, heads), (kl, steps) = figure.subplots(2, 2)

# Held-out answers, stage by stage; the reward model answers nothing.
found = {name: row for name, row in json.loads((home / "table.json").read_text()).items() if "reward/overall" in row}
for rule in ("helpful", "honest", "harmless", "overall"):
    held_out.plot(list(found), [100 * row[f"reward/{rule}"] for row in found.values()], marker="o", label=rule)
held_out.set_title("Held-out answers that are right, %")
held_out.set_ylim(0, 102)

# Both PPO runs, one after the other.
rows: list[dict[str, float]] = []
for name in ("3-ppo", "5-ppo"):
    rows += map(json.loads, (home / name / "metrics.jsonl").read_text().splitlines())
    for axis in (heads, kl, steps):
        axis.axvline(len(rows), color="grey", lw=0.5)
for aspect in ("helpfulness", "honesty", "harmlessness"):
    heads.plot([row[f"reward/{aspect}"] for row in rows], label=aspect)
heads.set_title("Scores of the reward model's heads, before scaling")
kl.plot([row["kl/per_sequence"] for row in rows], label="KL, nats per answer (target: 2)")
kl.plot([100 * row["kl/coef"] for row in rows], label="its coefficient x 100")
kl.set_title("KL against the start of the round")
steps.plot([row["step_rewards/per_response"] for row in rows], label="step-wise reward per answer")
steps.set_title("Equations that are not true")
for axis in (heads, kl, steps):
    axis.set_xlabel("PPO step (the grey line: the second round)")
for axis in (held_out, heads, kl, steps):
    axis.legend(fontsize=8)
figure.savefig(home / "curves.png", dpi=100)
