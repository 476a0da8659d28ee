"""Errors that a user meets: each names the value, the place and the remedy."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path


class PodiumError(Exception):
    """Base of every error that Podium raises on purpose. The command line shows it without a traceback.

    Args:
        what: what is wrong, with the value.
        where: the place (a setting's dotted name, a file and row, a stage).
        remedy: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        parts = [f"{where}: {what}" if where else what]
        if remedy:
            parts.append(f"  -> {remedy}")
        super().__init__("\n".join(parts))


class ConfigError(PodiumError):
    """A setting is unknown, has the wrong type, or contradicts another."""


class DataError(PodiumError):
    """A data set is missing, empty, or has a row that cannot be used."""


class ModelError(PodiumError):
    """A model or tokenizer cannot be loaded or lacks what training needs."""


class RewardError(PodiumError):
    """A reward function raised, or returned something that is not a finite number per sample."""


class GraphError(PodiumError):
    """The stages do not fit together."""


class BatchError(PodiumError):
    """A batch column is unknown, has the wrong shape, or clashes with another."""


class ResourceError(PodiumError):
    """A pool, device or backend that was asked for is not there."""


class WorkerError(PodiumError):
    """A role's worker failed, or its workers do not agree. It may be that of one rank while the others wait."""


class WorkerLost(WorkerError):
    """A worker's process is gone, or its group was stopped because it did not answer in time."""


class DeadlineError(PodiumError):
    """Something that the run waited for did not end within its deadline; a report lies in the run folder."""


class CheckpointError(PodiumError):
    """A checkpoint is missing, damaged, or belongs to other settings."""


class RolloutError(PodiumError):
    """A generation request cannot be served, or the model gave logits that are not finite."""


class NumericsError(PodiumError):
    """A run was stopped because a watched number passed its bound (settings section `watch`)."""


def command_name() -> str:
    """How this installation's command is called from a shell here: `podium`, or its path where that is not on PATH."""
    own = Path(sys.executable).with_name("podium")
    found = shutil.which("podium")
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return "podium"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy line: the nearest known name, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return "known: " + ", ".join(known) if known else "none is known"
