"""The guided first run: a model is made, imitates, and is then improved; the user sees each part."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from podium.controller.executors import create_executor
from podium.core.config import parse
from podium.core.errors import command_name
from podium.core.jsonable import jsonable
from podium.core.settings import ExecutorSettings
from podium.quickstart import model as quickstart_model
from podium.quickstart import task
from podium.recipes import build, load
from podium.runs.folder import RunFolder
from podium.trainer.trainer import Trainer, TrainResult

HELD_OUT = 600
DEMONSTRATIONS = 14_080
RECIPES = Path(__file__).parent


@dataclass
class Report:
    """What the quick start came to; `--json` prints it."""

    algorithm: str
    seed: int
    accuracy_before: float
    accuracy_after: float
    held_out_problems: int
    seconds: float
    sft_seconds: float
    rl_seconds: float
    tokens_per_second: float
    """Prompt and response tokens of a step over its wall time, the mean over the RL steps."""
    rl_steps: int
    parameters: int
    run_folder: str


def run(
    *,
    algorithm: str = "grpo",
    seed: int = 0,
    steps: int | None = None,
    as_json: bool = False,
    folder: str = "runs",
    executor: Mapping[str, Any] | None = None,
) -> Report:
    """Makes data, tokenizer and model; trains with SFT, then with `algorithm`; shows what changed.

    Args:
        algorithm: "grpo" or "ppo".
        steps: RL steps, where they shall differ from the recipe's.
        as_json: ends with the report as one JSON object on stdout.
        executor: settings of the executor; by default this process.
    """
    players = create_executor(parse(ExecutorSettings, executor or {}, "executor"), deadline=3600.0)
    say = _printer(as_json) if players.writes else _say_nothing
    started = time.perf_counter()
    home = players.same(RunFolder.create(folder, f"quickstart-{algorithm}").path if players.writes else None)
    say("[bold]1. A task, a tokenizer and a small model[/bold], made here")
    parameters = players.same(make_inputs(home, seed) if players.writes else None)
    say(f"   {parameters / 1e6:.1f} million parameters. The task: sort four numbers. The demonstrations often drop repeats.")
    say("[bold]2. SFT[/bold]: the model imitates the demonstrations")
    sft, before = train_recipe(home, "sft", seed, None, model=home / "base", data="demonstrations", players=players)
    say(f"   {before.percent} of {HELD_OUT} held-out problems right, each answered greedily")
    say(f"[bold]3. {algorithm.upper()}[/bold]: the model answers, a checker scores, the better answers become likelier")
    rl, after = train_recipe(home, algorithm, seed, steps, model=sft.run_folder / "model", data="problems", players=players)
    seconds = time.perf_counter() - started
    speeds = [row["speed/tokens_per_second"] for row in RunFolder(rl.run_folder).read_metrics()]
    report = Report(
        algorithm=algorithm,
        seed=seed,
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        held_out_problems=HELD_OUT,
        seconds=round(seconds, 1),
        sft_seconds=round(sft.seconds, 1),
        rl_seconds=round(rl.seconds, 1),
        tokens_per_second=round(sum(speeds) / len(speeds), 1),
        rl_steps=rl.steps,
        parameters=parameters,
        run_folder=str(home),
    )
    players.shutdown()
    if not players.writes:
        return report
    _show(say, report, before, after, rl)
    (home / "report.json").write_text(json.dumps(jsonable(asdict(report)), indent=2) + "\n")
    if as_json:
        print(json.dumps(jsonable(asdict(report))))
    return report


def make_inputs(home: Path, seed: int) -> int:
    """Writes `base/` (model and tokenizer), `demonstrations.jsonl`, `problems.jsonl`, `held_out.jsonl`; the parameters' number.

    Problems and demonstrations share no answer with the held-out ones.
    """
    draw = random.Random(seed)
    source = task.problems(draw, held_out=False)
    shown = [next(source) for _ in range(DEMONSTRATIONS)]
    demonstrations = [_row(problem, task.demonstration(problem, draw)) for problem in shown]
    _write(home / "demonstrations.jsonl", demonstrations)
    _write(home / "problems.jsonl", [_row(problem) for problem in task.distinct(source, 3000)])
    held_out = task.distinct(task.problems(random.Random(seed + 1), held_out=True), HELD_OUT)
    _write(home / "held_out.jsonl", [_row(problem, problem.answer) for problem in held_out])
    texts = [row["prompt"] + row["completion"] for row in demonstrations[:2000]]
    return quickstart_model.save(home / "base", texts, seed)


@dataclass
class Answers:
    """A model's greedy answers to the held-out problems."""

    accuracy: float
    prompts: list[str]
    given: list[str]
    right: list[str]

    @property
    def percent(self) -> str:
        return f"{100 * self.accuracy:.1f}%"


def train_recipe(
    home: Path, recipe: str, seed: int, steps: int | None, *, model: Path, data: str, players: Any = None
) -> tuple[TrainResult, Answers]:
    """Runs one of the quick start's recipes; what it came to, and its answers to the held-out problems at the end."""
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": str(home / f"{data}.jsonl"), "eval_path": str(home / "held_out.jsonl")},
        "run": {"folder": str(home), "name": recipe, "seed": seed},
    }
    if steps is not None:
        values["run"]["steps"] = steps
    settings = load(RECIPES / f"{recipe}.yaml", values=values)
    if players is None or players.writes:
        _write_recipe(home, recipe, settings)
    trainer = build(settings, executor=players)
    result = trainer.train()
    if result.interrupted:
        raise KeyboardInterrupt
    return result, _answers(trainer, result)


def _write_recipe(home: Path, recipe: str, settings: Any) -> None:
    (home / f"{recipe}.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False))


def _answers(trainer: Trainer, result: TrainResult) -> Answers:
    batch = trainer.last_evaluation
    assert batch is not None
    assert result.evaluation_after is not None
    return Answers(result.evaluation_after["eval/accuracy"], batch["prompt"], batch["response"], batch["data.answer"])


def _show(say: Any, report: Report, before: Answers, after: Answers, rl: TrainResult) -> None:
    from rich.table import Table

    table = Table(title=f"{HELD_OUT} held-out problems, answered greedily")
    for column in ("", "after SFT", f"after {report.algorithm.upper()}"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("right", before.percent, after.percent)
    table.add_row("seconds of training", f"{report.sft_seconds:.0f}", f"{report.rl_seconds:.0f}")
    say(table)
    answers = Table(title="Three of them")
    for column in ("problem", "after SFT", f"after {report.algorithm.upper()}", "right answer"):
        answers.add_column(column)
    for i in _telling(before, after):
        answers.add_row(before.prompts[i].strip(), before.given[i].strip(), after.given[i].strip(), before.right[i].strip())
    say(answers)
    say(f"All of it took {report.seconds:.0f} s. Curves: {rl.run_folder / 'plot.png'}")
    say("[bold]What to try next[/bold]")
    podium = command_name()
    say(f"   {podium} chat {rl.run_folder / 'model'} --prompt 'Sort these numbers: 7 2 7 1 ='")
    say(f"   {podium} train {Path(report.run_folder) / (report.algorithm + '.yaml')} run.name=again optimizer.lr=5e-5")
    other = "ppo" if report.algorithm == "grpo" else "grpo"
    say(f"   {podium} quickstart --algorithm {other}")
    say("   docs/overview.md: your own model, data and reward")


def _telling(before: Answers, after: Answers) -> list[int]:
    """Three problems: those whose answer changed first, in the order of the held-out set."""
    changed = [i for i in range(len(before.given)) if before.given[i] != after.given[i]]
    same = [i for i in range(len(before.given)) if before.given[i] == after.given[i]]
    return (changed[:2] + same[:1] + changed[2:])[:3]


def _row(problem: task.Problem, completion: str | None = None) -> dict[str, str]:
    row = {"prompt": problem.prompt, "answer": problem.answer}
    return row if completion is None else {**row, "completion": completion}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _say_nothing(*shown: Any) -> None:
    pass


def _printer(as_json: bool) -> Any:
    """Rich's print: to stderr where stdout is to hold JSON only."""
    from rich.console import Console

    return Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True).print
