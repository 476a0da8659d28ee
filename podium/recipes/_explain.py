"""The arithmetic that settings imply, before anything is loaded."""

from __future__ import annotations

from podium.core.settings import OnlineSettings, RecipeSettings, SampledSettings
from podium.stages.graph import StageGraph
from podium.trainer.recipe import SOURCES, find_recipe


def explain(settings: RecipeSettings) -> list[tuple[str, str, str]]:
    """(quantity, value, how it comes about) for a step and the whole run.

    Raises GraphError or ConfigError where the settings do not fit together.
    """
    recipe = find_recipe(settings.algorithm)
    graph = StageGraph(recipe.stages(settings), SOURCES[recipe.data])
    batch, steps = settings.batch, settings.run.steps
    per_update = batch.minibatch_sequences or batch.sequences_per_step
    unit = {"prompts": "prompts", "supervised": "rows", "preferences": "pairs", "unpaired": "rows"}[recipe.data]
    rows = [
        (f"{unit} per step", str(batch.prompts_per_step), "batch.prompts_per_step"),
        ("sequences per step", str(batch.sequences_per_step), f"{batch.prompts_per_step} {unit} x {batch.group_size}"),
    ]
    longest = settings.data.max_prompt_tokens
    if isinstance(settings, SampledSettings) and recipe.data == "prompts":
        longest += settings.rollout.max_new_tokens
        rows.append(
            (
                "tokens per sequence",
                f"at most {longest:,}",
                f"data.max_prompt_tokens {settings.data.max_prompt_tokens:,} + "
                f"rollout.max_new_tokens {settings.rollout.max_new_tokens:,}",
            )
        )
        most = longest * batch.sequences_per_step
        rows.append(("tokens per step", f"at most {most:,}", f"{batch.sequences_per_step} sequences x {longest:,}"))
        waves = -(-batch.sequences_per_step // settings.rollout.max_concurrent)
        rows.append(
            (
                "rollout waves",
                f"at least {waves}",
                f"{batch.sequences_per_step} sequences, {settings.rollout.max_concurrent} at once",
            )
        )
        if rounds := getattr(settings, "sampling_rounds", 0):
            rows.append(("rollouts per step", f"at most {rounds}", "sampling_rounds: groups without signal are replaced"))
        micro = -(-(longest * per_update) // batch.planned_microbatch_tokens)
        rows.append(
            (
                "micro-batches per update",
                f"at most about {micro}",
                f"{per_update} sequences x {longest:,} tokens / batch.microbatch_tokens {batch.planned_microbatch_tokens:,}",
            )
        )
    rows += [
        (
            "sequences per update",
            str(per_update),
            "batch.minibatch_sequences" if batch.minibatch_sequences else "all of the step",
        ),
        ("updates per step", str(batch.updates_per_step), f"{batch.sequences_per_step} / {per_update} x {batch.epochs} epochs"),
        ("updates in the run", f"{steps * batch.updates_per_step:,}", f"{steps} steps x {batch.updates_per_step}"),
        ("sequences in the run", f"{steps * batch.sequences_per_step:,}", f"{steps} steps x {batch.sequences_per_step}"),
        ("roles", ", ".join(graph.roles), "those that a stage calls"),
    ]
    return rows + _left_out(settings, graph)


def _left_out(settings: RecipeSettings, graph: StageGraph) -> list[tuple[str, str, str]]:
    """Passes that the settings make needless."""
    labels = {stage.label for stage in graph.stages}
    if not isinstance(settings, OnlineSettings) or "advantages" not in labels:
        return []
    left_out = []
    if "ref_log_probs" not in labels:
        left_out.append(("no reference pass", "-", "kl.coef is 0" if settings.kl.coef == 0 else "kl.controller is none"))
    if "old_log_probs" not in labels:
        left_out.append(("no old-log-prob pass", "-", "one update a step: the ratio is 1 by construction"))
    if "values" not in labels:
        estimator = getattr(settings, "advantage", settings.algorithm)
        left_out.append(("no critic", "-", f"the advantage estimator '{estimator}' needs none"))
    return left_out
