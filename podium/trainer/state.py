"""All state of a run at a step's border, and putting it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from podium.checkpoints.store import rng_state, set_rng_state
from podium.core.errors import CheckpointError
from podium.stages.base import Stage
from podium.trainer.changes import Change, ChangedSettings, changes

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer


_EVALUATION = "evaluation/"


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
    """A copy of each stage's state, by label; those that only evaluate as `evaluation/<label>`."""
    return {label: copy.deepcopy(stage.state_dict()) for label, stage in _stages(trainer)}


def _stages(trainer: Trainer) -> list[tuple[str, Stage]]:
    trains = trainer.graph.stages
    evaluates = [stage for stage in trainer.evaluation.stages if stage not in trains]
    return [(s.label, s) for s in trains] + [(f"{_EVALUATION}{s.label}", s) for s in evaluates]


def _weights_mark(trainer: Trainer) -> dict[str, Any]:
    return {name: handle.weights_mark().result() for name, handle in trainer.trained_roles().items()}


def capture(trainer: Trainer, border: Border) -> dict[str, Any]:
    """Everything that the next step depends on: roles, stages, data position, generators, step; and the run's record."""
    return {
        **border.state,
        **_identity(trainer),
        "frozen": trainer.frozen_weights(),
        **{f"role_{name}": handle.state_dict().result() for name, handle in trainer.trained_roles().items()},
    }


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What a resume is compared with."""
    return {
        "settings": trainer.settings.model_dump(mode="json"),
        "stage_arguments": trainer.stage_arguments,
        "data": trainer.loader.extras_digest,
    }


def restore(trainer: Trainer, saved: Mapping[str, Any], *, accept_changes: bool = False) -> list[Change]:
    """Puts back what `capture` gave. Returns what is other than then, and was accepted.

    Raises ChangedSettings where what the run computes has changed and that was not accepted; CheckpointError where
    the state does not fit at all (another model, other rows).
    """
    changed = changes(saved, _identity(trainer))
    if changed and not accept_changes:
        raise ChangedSettings(changed, str(trainer.settings.run.name or trainer.settings.algorithm))
    for name, digest in trainer.frozen_weights().items():
        if name in saved["frozen"] and saved["frozen"][name] == digest:
            continue
        if name not in saved["frozen"] and accept_changes:  # a role that the checkpoint's run did not have
            continue
        raise CheckpointError(
            f"the {name} has other weights than in the run that is resumed",
            where=name,
            remedy="give it the same model; a model in memory that has been trained since is another one",
        )
    for name, handle in trainer.trained_roles().items():
        if f"role_{name}" not in saved:
            raise CheckpointError(f"the checkpoint has no weights of the {name}", where=name, remedy="start a new run")
        handle.load_state_dict(saved[f"role_{name}"]).result()
    _restore_border(trainer, saved)
    return changed


def _restore_border(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    for label, stage in _stages(trainer):
        if label in saved["stages"]:  # one that was added (and accepted) begins anew
            # So does an evaluation that is another than it was: it may change from resume to resume.
            with suppress(CheckpointError) if label.startswith(_EVALUATION) else nullcontext():
                stage.load_state_dict(copy.deepcopy(saved["stages"][label]))
    trainer.loader.load_state_dict(saved["trainer"]["loader"])
    set_rng_state(saved["trainer"]["rng"])
    trainer.step = saved["trainer"]["step"]
    trainer.record = Record(**copy.deepcopy(saved["trainer"]["record"]))
