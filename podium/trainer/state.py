"""All state of a run at a step's border, and putting it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podium.checkpoints.store import rng_state, set_rng_state
from podium.core.errors import CheckpointError

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer

# How long a run goes on and what it shows may change at a resume; what it computes may not.
FREE = ("run.", "checkpoint.", "evaluation.")
FIXED = ("run.seed",)


def capture(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next step depends on: roles, stages, data position, generators, step."""
    return {
        "trainer": {"step": trainer.step, "loader": trainer.loader.state_dict(), "rng": rng_state()},
        "stages": {stage.label: stage.state_dict() for stage in trainer.graph.stages},
        "settings": trainer.settings.model_dump(mode="json"),
        **{f"role_{name}": handle.state_dict().result() for name, handle in trainer.trained_roles().items()},
    }


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Puts back what `capture` gave. Raises CheckpointError where settings that matter have changed."""
    changed = differences(saved["settings"], trainer.settings.model_dump(mode="json"))
    bad = [c for c in changed if not c[0].startswith(FREE) or c[0] in FIXED]
    if bad:
        lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in bad)
        raise CheckpointError(f"settings changed since the checkpoint: {lines}", remedy="resume with the same settings")
    for name, handle in trainer.trained_roles().items():
        handle.load_state_dict(saved[f"role_{name}"]).result()
    for stage in trainer.graph.stages:
        stage.load_state_dict(saved["stages"][stage.label])
    trainer.loader.load_state_dict(saved["trainer"]["loader"])
    set_rng_state(saved["trainer"]["rng"])
    trainer.step = saved["trainer"]["step"]


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two nested settings differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = sorted(set(old) | set(new))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{key}.{n}" if key else n)]
    return [] if old == new else [(key, old, new)]
