"""Which roles a run's graph calls and what for; each as numbers (`RoleSpec`) on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.controller.resource_pool import ResourcePool
from podium.core.ranks import Ranks
from podium.core.settings import RecipeSettings
from podium.planner.devices import Device
from podium.planner.memory import RoleSpec
from podium.planner.shapes import ModelShape, shape_at

CRITICS = ("critic", "cost_critic")
_NO_BF16 = ("T4", "V100")


@dataclass(frozen=True)
class Needs:
    """What a graph asks of its roles.

    Attributes:
        roles: in order of first use.
        trained: those with an optimizer.
        generates: responses are sampled.
        forward: the labels of the stages that run a role's model without training it.
        order: labels of all stages ("update_actor" as "update actor"), as they run.
        unit: rows of one unit of the data (2 for preference pairs).
        models: paths of models that stages were given, by role.
    """

    roles: list[str]
    trained: set[str]
    generates: bool
    forward: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    unit: int = 1
    models: dict[str, Any] = field(default_factory=dict)

    def sequences(self, settings: RecipeSettings) -> int:
        """Rows of a step."""
        return settings.batch.prompts_per_step * (settings.batch.group_size if self.generates else self.unit)


def needs_of(graph: Any, kind: str) -> Needs:
    """Of a `StageGraph` over data of a kind (`prompts`, `supervised`, ...)."""
    forward: dict[str, list[str]] = {}
    for stage in graph.order:
        if stage.updates or "rollout_log_probs" in stage.writes or stage.label == "watch":
            continue
        for role in stage.roles:
            forward.setdefault(role, []).append(stage.label)
    models = {role: model for stage in graph.stages for role, model in stage.models().items()}
    return Needs(
        roles=graph.roles,
        trained=set(graph.updated),
        generates=any("rollout_log_probs" in stage.writes for stage in graph.stages),
        forward=forward,
        order=[f"update {s.updates}" if s.updates else s.label for s in graph.order],
        unit=2 if kind == "preferences" else 1,
        models={role: model for role, model in models.items() if isinstance(model, str)},
    )


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens: the longest (memory is planned for these) and the mean (time is)."""

    prompt: int
    response: int
    mean_prompt: float
    mean_response: float

    @classmethod
    def of(cls, settings: RecipeSettings, prompt: float | None = None, response: float | None = None) -> Sizes:
        """From the settings; `prompt` and `response` are means, where they are known (else the longest)."""
        longest = settings.data.max_prompt_tokens
        most = getattr(settings, "rollout", None)
        answer = most.max_new_tokens if most is not None else longest
        return cls(longest, answer, prompt or longest, response or answer)


def role_spec(
    settings: RecipeSettings, needs: Needs, role: str, ranks: Ranks, device: Device, workers: int, together: Sequence[str]
) -> RoleSpec:
    """A role on each device of its pool. Raises ModelError where its model's config cannot be read, ConfigError where heads do
    not divide.

    Args:
        together: the roles of the pool: with LoRA one base serves all that start from the actor's weights.
    """
    model, trains = settings.model, role in needs.trained
    own = _own_path(settings, needs, role)
    shape = _shape(settings, needs, role, own)
    lora = model.lora.rank if model.lora is not None and (trains or role == "reference") else 0
    shares = "actor" if lora and own is None and role in ("reference", *CRITICS) and "actor" in together else ""
    backend = _backend(settings, role)
    single = backend == "single" or workers == 1 or (backend == "auto" and not trains)
    if not single and ranks.tensor * ranks.sequence > 1:
        _check_divides(settings, own or _actor_path(settings, needs), ranks, role)
    if role == "actor" and needs.generates:
        pool = ResourcePool(settings.resource_pool)
        pool.check_rollout(ranks.workers)
        _check_divides(settings, own or _actor_path(settings, needs), Ranks(tensor=pool.rollout_tensor), "rollout")
    optimizer = getattr(settings, "critic", None) if role in CRITICS else None
    optimizer = optimizer or settings.optimizer
    return RoleSpec(
        role=role,
        shape=shape,
        itemsize=_itemsize(model.dtype, device),
        trains=trains,
        ranks=ranks,
        lora=lora,
        quantization=model.quantization if own is None and lora else "none",
        shares=shares,
        offload=trains and optimizer.offload,
        moment_bytes=2 + 8 / 256 if optimizer.states == "8bit" else 8.0,
        recompute=settings.batch.activation_checkpointing,
        cuda=not device.is_cpu,
        single=single,
    )


def _check_divides(settings: RecipeSettings, path: str, ranks: Ranks, role: str) -> None:
    from podium.engines.train.tensor_parallel import check_divides
    from podium.models.loading import load_config

    if ranks.tensor * ranks.sequence > 1:
        config = load_config(path, trust_remote_code=settings.model.trust_remote_code)
        check_divides(config, ranks, f"resource_pool.{role}.parallel")


def reads_parts(settings: RecipeSettings, needs: Needs, spec: RoleSpec) -> bool:
    """Whether each worker of a role that is cut over ranks reads its own part of the weights (`models.parts`)."""
    own = _own_path(settings, needs, spec.role)
    path = Path(own or _actor_path(settings, needs)).expanduser()
    loads = spec.role in ("actor", "reference", "teacher") or (spec.role in CRITICS and own is None)
    return loads and settings.model.lora is None and spec.quantization == "none" and path.is_dir()


def _own_path(settings: RecipeSettings, needs: Needs, role: str) -> str | None:
    """The model of a role that does not start from the actor's."""
    model = settings.model
    given = needs.models.get(role)
    kind = role.split("_")[0]
    paths = {
        "reference": model.reference_path,
        "critic": model.critic_path,
        "cost_critic": model.critic_path,
        "teacher": getattr(model, "teacher_path", None),
    }
    if role in paths:
        return given or paths[role]
    if kind == "reward":
        return given or (model.reward_path if role not in needs.trained else None)
    return given or (getattr(model, "cost_path", None) if kind == "cost" else None)


def _actor_path(settings: RecipeSettings, needs: Needs) -> str:
    from podium.core.errors import ConfigError

    path = needs.models.get("actor") or settings.model.path
    if not path:
        raise ConfigError("'model.path' must be set", where="model.path", remedy="a folder with config.json will do")
    return path


def _shape(settings: RecipeSettings, needs: Needs, role: str, own: str | None) -> ModelShape:
    shape = shape_at(own or _actor_path(settings, needs), settings.model.trust_remote_code)
    if role in CRITICS:
        return shape.with_scores(1)
    if role.split("_")[0] in ("reward", "cost"):
        return shape.with_scores(max(1, len(getattr(settings, "heads", None) or settings.model.reward_heads)))
    return shape


def _itemsize(dtype: str, device: Device) -> int:
    if dtype == "auto":
        if device.is_cpu:
            from podium.models.loading import native_bfloat16

            return 2 if native_bfloat16("cpu") else 4
        return 4 if any(old in device.name for old in _NO_BF16) else 2
    return 4 if dtype == "float32" else 2


def _backend(settings: RecipeSettings, role: str) -> str:
    given = settings.resource_pool.get(role)
    return str(given.get("backend", "auto")) if isinstance(given, dict) else "auto"
