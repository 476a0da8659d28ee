"""All state of a run at a step's border, and putting it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from podium.checkpoints.store import rng_state, set_rng_state
from podium.core.errors import CheckpointError

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer

# How long a run goes on and what it shows may change at a resume; what it computes may not.
FREE = ("run.", "checkpoint.", "evaluation.", "executor.", "resource_pool")
FIXED = ("run.seed",)


@dataclass
class Record:
    """What the run has measured so far, in all its parts; it is kept with the state, so a resumed run knows it."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The last step's."""
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None
    evaluated: int = 0
    """The step after which `after` was measured: where one was due later, it is still owed."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Border:
    """A run between two steps: a copy of all state but the roles' weights, and how to see that these are still the same."""

    state: dict[str, Any]
    weights: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer) -> Border:
        state = {
            "trainer": {
                "step": trainer.step,
                "loader": trainer.loader.state_dict(),
                "rng": rng_state(),
                "record": asdict(trainer.record),
            },
            "stages": stage_states(trainer),
        }
        return cls(state, _weights_mark(trainer))

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["trainer"]["step"]

    def holds(self, trainer: Trainer) -> bool:
        """No trained role's weights or optimizer state have changed since."""
        return _weights_mark(trainer) == self.weights

    def return_to(self, trainer: Trainer) -> None:
        """Puts everything but the weights back."""
        _restore_border(trainer, self.state)


def stage_states(trainer: Trainer) -> dict[str, Any]:
    """A copy of each stage's state, by label."""
    return {stage.label: copy.deepcopy(stage.state_dict()) for stage in trainer.graph.stages}


def _weights_mark(trainer: Trainer) -> dict[str, Any]:
    return {name: handle.weights_mark().result() for name, handle in trainer.trained_roles().items()}


def capture(trainer: Trainer, border: Border) -> dict[str, Any]:
    """Everything that the next step depends on: roles, stages, data position, generators, step; and the run's record."""
    return {
        **border.state,
        "settings": trainer.settings.model_dump(mode="json"),
        "frozen": trainer.frozen_weights(),
        **{f"role_{name}": handle.state_dict().result() for name, handle in trainer.trained_roles().items()},
    }


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Puts back what `capture` gave. Raises CheckpointError where settings that matter have changed."""
    changed = differences(saved["settings"], trainer.settings.model_dump(mode="json"))
    bad = [c for c in changed if not c[0].startswith(FREE) or c[0] in FIXED]
    if bad:
        lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in bad)
        raise CheckpointError(f"settings changed since the checkpoint: {lines}", remedy="resume with the same settings")
    for name, digest in trainer.frozen_weights().items():
        if saved["frozen"].get(name) != digest:
            raise CheckpointError(
                f"the {name} has other weights than in the run that is resumed",
                where=name,
                remedy="give it the same model; a model in memory that has been trained since is another one",
            )
    for name, handle in trainer.trained_roles().items():
        handle.load_state_dict(saved[f"role_{name}"]).result()
    _restore_border(trainer, saved)


def _restore_border(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    for stage in trainer.graph.stages:
        stage.load_state_dict(copy.deepcopy(saved["stages"][stage.label]))
    trainer.loader.load_state_dict(saved["trainer"]["loader"])
    set_rng_state(saved["trainer"]["rng"])
    trainer.step = saved["trainer"]["step"]
    trainer.record = Record(**copy.deepcopy(saved["trainer"]["record"]))


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two nested settings differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = sorted(set(old) | set(new))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{key}.{n}" if key else n)]
    return [] if old == new else [(key, old, new)]
