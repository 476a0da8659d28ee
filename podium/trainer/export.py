"""A Hugging Face folder from a checkpoint: at any time, while a run goes on or long after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from podium.checkpoints.store import CheckpointStore, read_part
from podium.core.config import load_yaml
from podium.core.errors import CheckpointError, ConfigError
from podium.core.imports import load_module
from podium.core.settings import RecipeSettings
from podium.engines.train.single import own_tensors
from podium.models.loading import load_tokenizer, quiet
from podium.runs.folder import RunFolder
from podium.trainer.recipe import read_settings
from podium.trainer.role_models import RoleModels, as_policy


def export_checkpoint(run: str | Path, destination: str | Path, *, step: int | None = None, role: str | None = None) -> int:
    """Writes a trained role of a run's checkpoint as a Hugging Face folder (an adapter merged, and alone in `adapter/`).

    Only reads the run: it may be going on. The optimizer's state is not read. The base model is loaded from where the run's
    settings say, on the CPU.

    Args:
        run: the run's folder.
        destination: a folder that does not exist yet, or is empty.
        step: whose checkpoint; by default the newest whole one.
        role: "actor", "critic" ...; by default the actor, else the only one that was trained.

    Returns:
        the step.

    Raises CheckpointError (no such step, damaged, no such role), ConfigError (the destination; a model that was in memory).
    """
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"'{target}' is there already", where="export", remedy="name a new folder")
    folder = RunFolder.open(run)
    settings = read_settings(load_yaml(folder.settings), where=str(folder.settings))
    checkpoint, step = _checkpoint(folder, step)
    role = role or _main_role(checkpoint)
    prefix = "engine/model" if role == "actor" else "model"
    tensors = read_part(checkpoint, f"role_{role}", prefix)
    model, tokenizer = _model(settings, role)
    _load(model, tensors, role)
    model.save_pretrained(str(target), tokenizer)
    return step


def _checkpoint(folder: RunFolder, step: int | None) -> tuple[Path, int]:
    steps = CheckpointStore(folder.checkpoints).steps()
    if not steps or (step is not None and step not in steps):
        what = f"no checkpoint of step {step}" if steps else "no whole checkpoint"
        have = "it has: " + ", ".join(map(str, steps))
        remedy = have if steps else "wait for the first (checkpoint.every_steps=N), or stop the run with Ctrl-C"
        raise CheckpointError(what, where=str(folder.checkpoints), remedy=remedy)
    step = steps[-1] if step is None else step
    return folder.checkpoints / f"step_{step:06d}", step


def _main_role(checkpoint: Path) -> str:
    roles = sorted(p.name.removeprefix("role_").removesuffix(".json") for p in checkpoint.glob("role_*.json"))
    if "actor" in roles or len(roles) == 1:
        return "actor" if "actor" in roles else roles[0]
    raise CheckpointError(f"the run trained {', '.join(roles) or 'no role'}", where=str(checkpoint), remedy="give --role")


def _model(settings: RecipeSettings, role: str) -> tuple[Any, Any]:
    """The role's model as the run began with it, and the run's tokenizer."""
    for module in settings.imports:
        load_module(module, "imports")
    given = settings.model
    if not given.path:
        raise ConfigError(
            "the run's model was in memory, so its shape is known to the program that made it alone",
            where="model.path",
            remedy="resume the run there; with checkpoint.export it writes a model at its end",
        )
    quiet()
    models = RoleModels(settings, {}, "cpu")
    kind = role.split("_")[0]
    if role == "actor":
        model: Any = as_policy(models.actor(trains=True), 1.0)
    elif role in ("critic", "cost_critic"):
        model = models.critic(role, trains=True, actor_trains=True)
    elif kind in ("reward", "cost"):
        model = models.reward(role, trains=True)
    else:
        raise CheckpointError(f"'{role}' is no role that is exported", where="--role", remedy="actor, critic, reward")
    return model, load_tokenizer(given.path, chat_template=given.chat_template, trust_remote_code=given.trust_remote_code)


@torch.no_grad()
def _load(model: Any, tensors: dict[str, torch.Tensor], role: str) -> None:
    mine = own_tensors(model)
    odd = sorted(set(tensors) - set(mine)) or sorted(n for n, t in tensors.items() if t.shape != mine[n].shape)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    odd = odd or sorted(trains - set(tensors))
    if odd:
        raise CheckpointError(
            f"the checkpoint's weights do not fit the {role}'s model: {', '.join(odd[:3])}",
            where="model.path",
            remedy="the model that the run began with is needed where its settings say",
        )
    for name, tensor in tensors.items():
        mine[name].copy_(tensor)
