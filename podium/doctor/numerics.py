"""`podium doctor numerics`: a run's samples and weights, replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.checkpoints.store import CheckpointStore
from podium.core.errors import ConfigError, PodiumError
from podium.core.seeding import derive_seed
from podium.doctor.decide import Diagnosis, decide, gap
from podium.doctor.replays import Replayer, Sample
from podium.engines.rollout import create_rollout_engine
from podium.models.loading import load_tokenizer, quiet
from podium.runs.folder import RunFolder, read_jsonl
from podium.trainer.recipe import read_settings
from podium.trainer.role_models import RoleModels, as_policy
from podium.trainer.roles import sampling_of

ROWS, TOKENS = 4, 256
"""Samples that are replayed, and tokens of each."""


@dataclass(frozen=True)
class NumericsReport:
    """A diagnosis and what it rests on."""

    diagnosis: Diagnosis
    version: int
    """Of the policy that sampled."""
    rows: int
    weights: str
    """Where the weights of that version came from; empty: they are not there any more."""
    versions: list[int]
    """Versions whose weights were there to try."""


def examine_numerics(path: str | Path, *, rows: int = ROWS, device: str = "cpu") -> NumericsReport:
    """Replays a few of a run's samples and names the cause of a train/rollout difference.

    Samples whose weights are there (the starting weights, or a checkpoint's) are replayed; newest first. Where none differ,
    samples of other versions are judged by what both sides recorded.

    Raises ConfigError where the run has no samples with tokens, or no model that `transformers` loads.
    """
    run = RunFolder.open(path)
    settings: Any = read_settings(str(run.settings))
    saved = saved_samples(run)
    if not saved:
        raise ConfigError(
            f"'{run.path}' has no samples with their tokens",
            where="samples",
            remedy="run.log_samples=8 (the default) keeps some of each step; only runs that generate have them",
        )
    quiet()
    model, tokenizer = _load(settings, device)
    versions = {0: _copy(model), **checkpoint_weights(run, model)}
    sampling = sampling_of(settings.rollout)
    replayer = Replayer(model, tokenizer, sampling, as_policy(model, sampling.temperature or 1.0))
    engine = _engine(settings, model, tokenizer)
    reports = []
    for version in _order(saved, versions):
        # Those first that training was recorded of.
        samples = sorted(saved[version], key=lambda s: s.train_log_probs is None)[:rows]
        there = version in versions
        _put(model, versions[version if there else max(versions)])
        replayer.older = {v: w for v, w in versions.items() if v < version} if there else {}
        evidence = replayer.evidence(samples, weights_there=there, rollout_engine=engine)
        weights = ("the starting weights" if version == 0 else f"the checkpoint of version {version}") if there else ""
        report = NumericsReport(decide(evidence), version, len(samples), weights, sorted(versions))
        if report.diagnosis.cause not in ("none", "unknown"):
            return report
        reports.append(report)
    return next((r for r in reports if r.diagnosis.cause == "unknown" and r.diagnosis.side), reports[0])


def saved_samples(run: RunFolder) -> dict[int, list[Sample]]:
    """The samples that can be replayed, by version of the policy; newest steps first."""
    found: dict[int, list[Sample]] = {}
    for file in sorted(run.samples.glob("step_*.jsonl"), reverse=True):
        for row in read_jsonl(file):
            sample = _sample(row)
            if sample is not None:
                found.setdefault(sample.version, []).append(sample)
    return found


def _sample(row: Mapping[str, Any]) -> Sample | None:
    """A saved row; None without its tokens, or where the environment wrote some of them."""
    ids, log_probs = row.get("response_ids"), row.get("rollout_log_probs")
    if not ids or not log_probs or not row.get("prompt_ids") or not all(row.get("response_mask", ())):
        return None
    trained = row.get("old_log_probs") or row.get("train_log_probs")
    return Sample(
        tuple(row["prompt_ids"]),
        tuple(ids[:TOKENS]),
        _numbers(log_probs),
        _numbers(trained) if trained else None,
        int(row.get("policy_version", 0)),
        row.get("prompt"),
    )


def _numbers(values: list[float | None]) -> Tensor:
    return torch.tensor([float("nan") if v is None else v for v in values[:TOKENS]])


def _order(saved: Mapping[int, list[Sample]], versions: Mapping[int, Any]) -> list[int]:
    """First samples of trained weights that are there; then those that both sides recorded, the widest apart first; then 0."""
    there = sorted((v for v in saved if v in versions and v > 0), reverse=True)
    both = [v for v in saved if v not in versions and all(s.train_log_probs is not None for s in saved[v][:1])]
    apart = {v: gap([saved[v][0].rollout_log_probs], [saved[v][0].train_log_probs]) for v in both}  # type: ignore[list-item]
    order = [*there, *sorted(both, key=lambda v: -apart[v])[:2], *([0] if 0 in saved else [])]
    return order or [max(saved)]


def checkpoint_weights(run: RunFolder, model: Any) -> dict[int, dict[str, Tensor]]:
    """The actor's weights in each whole checkpoint, by version, under the model's own names."""
    store = CheckpointStore(run.checkpoints, writes=False)
    names = dict(model.named_parameters())
    found: dict[int, dict[str, Tensor]] = {}
    for step in store.steps():
        try:
            _, state = store.load(run.checkpoints / f"step_{step:06d}")
        except PodiumError:
            continue
        engine = state.get("role_actor", {}).get("engine", {})
        tensors = {_own_name(name, names): t for name, t in engine.get("model", {}).items()}
        tensors.pop("", None)
        if tensors:
            found[int(engine["policy_version"])] = tensors
    return found


def _own_name(name: str, names: Mapping[str, Any]) -> str:
    """A parameter's name in the policy as one in the model inside it; "" where there is none."""
    if name.removeprefix("model.") in names:
        return name.removeprefix("model.")
    return name if name in names else ""


def _load(settings: Any, device: str) -> tuple[Any, Any]:
    if not settings.model.path:
        raise ConfigError(
            "the run was given a model in memory, so it cannot be loaded again",
            where="model.path",
            remedy="set model.path in its settings.yaml to the folder of the starting weights",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(settings.run.seed, "role", "actor"))
        model = RoleModels(settings, {}, device).actor(trains=True)
    options = {"chat_template": settings.model.chat_template, "trust_remote_code": settings.model.trust_remote_code}
    return model, load_tokenizer(settings.model.path, **options)


def _engine(settings: Any, model: Any, tokenizer: Any) -> Any:
    rollout = settings.rollout
    options = {"max_concurrent": min(ROWS, rollout.max_concurrent), **rollout.backend_options}
    return create_rollout_engine(rollout.engine, model, tokenizer, **options)


def _copy(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def _put(model: Any, weights: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if name in weights:
            p.copy_(weights[name])


def as_plain(report: NumericsReport) -> dict[str, Any]:
    """The report as plain values."""
    found = report.diagnosis
    return {
        "cause": found.cause,
        "side": found.side,
        "detail": found.detail,
        "gap_nats_per_token": found.gap,
        "left_nats_per_token": found.left,
        "version": report.version,
        "rows": report.rows,
        "weights": report.weights,
        "versions": report.versions,
        "tried": [{"cause": c, "detail": d, "left": left} for c, d, left in found.table],
    }


__all__ = ["NumericsReport", "as_plain", "checkpoint_weights", "examine_numerics", "saved_samples"]
