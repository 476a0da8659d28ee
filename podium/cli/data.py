"""`podium data`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.console import print_json, print_table
from podium.core.errors import ConfigError, PodiumError

if TYPE_CHECKING:
    from podium.core.settings import RecipeSettings
    from podium.data.inspection import Inspection

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look at data before training on them.")

BAR = 40
TEXT = 400


@app.command("inspect")
def inspect_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSONL, JSON or parquet file, a datasets folder or name, reasoning_gym:TASK.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings of the run, for example data.prompt_column=question."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or name: its tokenizer and chat template. Without: lengths in words.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Check the rows for this algorithm. By default: for what they look like most.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Look at the first N rows only.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the lengths.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Show at most so many problems.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Show what Podium understands of a data set, and what is wrong with which row.

    Format, columns, and the algorithms that can use the rows.

    The first row as the model sees it, and what of it is learnt.

    Lengths with a histogram, prompts over the limit, and duplicates.

    Every problem with its row, column, value and remedy: a run stops at the
    first one, this goes on.

    Exit status: 0 when a run can use the data as they are, 1 when there are
    problems.

    [bold]Examples[/bold]

      podium data inspect rows.jsonl

      podium data inspect rows.jsonl --model ./my-model --plot lengths.png

      podium data inspect chats.parquet --model ./my-model --algorithm sft data.train_on=assistant

      podium data inspect reasoning_gym:chain_sum --rows 100 --json
    """
    from podium.data.inspection import inspect
    from podium.trainer.recipe import find_recipe

    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError(f"'{plot}' does not end in .png", where="--plot", remedy="the picture is a PNG file")
    settings = _settings(file, algorithm, model, overrides or [])
    found = inspect(
        settings.data.path,
        settings.data,
        _tokenizer(settings),
        kind=find_recipe(settings.algorithm).data if algorithm else None,
        heads=getattr(settings, "heads", None) or (),
        rows=rows,
        limit=problems,
    )
    _show(found, settings, problems)
    if plot is not None:
        _plot(found, settings, plot)
    if as_json:
        print_json(_as_json(found, settings, problems))
    if found.problems:
        raise typer.Exit(1)


def _settings(file: str, algorithm: str | None, model: str | None, overrides: list[str]) -> RecipeSettings:
    from podium.core.config import apply_overrides, parse
    from podium.core.settings import StagesSettings
    from podium.trainer.recipe import read_settings

    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"'{text}' is not KEY=VALUE", where="command line", remedy="give one file, then settings")
    values: dict[str, Any] = {"data": {"path": file}, "model": {"path": model}}
    if algorithm is None:
        return parse(StagesSettings, apply_overrides(values, overrides), "command line")
    return read_settings({"algorithm": algorithm, **values}, overrides, "command line")


def _tokenizer(settings: RecipeSettings) -> Any:
    if settings.model.path is None:
        return None
    from podium.models.loading import load_tokenizer, quiet

    quiet()
    model = settings.model
    return load_tokenizer(
        str(model.path),
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
        needs_end_token=False,  # missed where a row needs it
    )


def _algorithms() -> dict[str, list[str]]:
    """Names of the recipes, by the kind of data that they train on."""
    from podium.trainer.recipe import find_recipe, known_recipes

    out: dict[str, list[str]] = {}
    for name in known_recipes():
        out.setdefault(find_recipe(name).data, []).append(name)
    return out


# ---------------------------------------------------------------------- the report


def _show(found: Inspection, settings: RecipeSettings, limit: int) -> None:
    if found.format is not None:
        print(f"{found.source}: {found.format.description}")
        print(f"{found.usable} of {found.rows} rows can be used" + (f" as {found.kind}" if found.kind else ""))
        for line in _facts(found, settings):
            print(line)
        print()
        _show_uses(found)
        print_table("Columns", ("column", "used as"), found.columns.items())
        print()
    if found.example:
        _show_example(found)
    if found.lengths:
        _show_lengths(found)
    _show_problems(found, limit)


def _facts(found: Inspection, settings: RecipeSettings) -> list[str]:
    out = []
    if found.over_limit:
        becomes = {"drop": "dropped", "truncate": "cut on the left", "error": "an error"}[settings.data.too_long]
        limit = settings.data.max_prompt_tokens
        out.append(f"{_counted(found.over_limit, 'prompt')} longer than {limit} tokens (data.max_prompt_tokens): {becomes}")
    if found.duplicates:
        here, there = found.duplicates[0]
        count = _counted(len(found.duplicates), "row")
        out.append(f"{count} the same as an earlier row; for example {here} is {there} again")
    if found.repeated_prompts > len(found.duplicates):
        out.append(f"{_counted(found.repeated_prompts, 'row')} with a prompt that an earlier row has too")
    shown = ("rows used", "dropped: prompt", "cut on the left: prompt", "extra columns")  # said above and below
    return out + [note for note in found.notes if not any(part in note for part in shown)]


def _show_uses(found: Inspection) -> None:
    assert found.format is not None
    algorithms = _algorithms()
    rows = []
    for kind in found.format.uses:
        checked = "checked here" if kind == found.kind else ""
        rows.append((kind, checked, ", ".join(algorithms.get(kind, [])) or "-"))
    print_table("Who can use them", ("as", "", "algorithms"), rows, fixed=2)
    print()


def _show_example(found: Inspection) -> None:
    rows = []
    for part in found.example:
        text = part.text if len(part.text) <= TEXT else f"{part.text[: TEXT // 2]} ... {part.text[-TEXT // 2 :]}"
        count = "" if part.tokens is None else str(len(part.tokens))
        rows.append((part.name, count, "learnt" if part.learnt else "-", text.replace("\n", "\\n")))
    how = "as the model sees it" if found.unit == "tokens" else "as text (--model shows it as the model sees it)"
    print(f"The first usable row, {how}")
    print_table("", ("part", "tokens", "loss", "text"), rows, fixed=3)
    print()


def _show_lengths(found: Inspection) -> None:
    from podium.data.lengths import Lengths

    figures = {name: Lengths.of(values) for name, values in found.lengths.items()}
    rows = [
        (name, *(str(n) for n in (f.count, f.min, f.median)), f"{f.mean:.1f}", *(str(n) for n in (f.p95, f.max, f.total)))
        for name, f in figures.items()
    ]
    unit = found.unit if found.unit == "tokens" else "words (--model gives tokens)"
    print(f"Lengths in {unit}")
    print_table("", ("part", "count", "min", "median", "mean", "p95", "max", "sum"), rows, fixed=8)
    for name, figure in figures.items():
        print(f"\n{name}, {found.unit}")
        most = max(count for _, _, count in figure.bins)
        width = max(len(_range(low, high)) for low, high, _ in figure.bins)
        for low, high, count in figure.bins:
            bar = "\u2588" * round(BAR * count / most) or ("\u258f" if count else "")
            print(f"  {_range(low, high):>{width}}  {bar} {count}")
    print()


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _show_problems(found: Inspection, limit: int) -> None:
    if not found.problems:
        print("No problem found.")
        return
    print(f"{_count(found)} (a run stops at the first):" if len(found.problems) > 1 else f"{_count(found)}:")
    for problem in found.problems[:limit]:
        print(f"  {str(problem).replace(chr(10), chr(10) + '  ')}")
    if len(found.problems) > limit:
        print(f"  ... and {len(found.problems) - limit} more (--problems {len(found.problems)} shows them)")


def _count(found: Inspection) -> str:
    return ("" if found.all_found else "At least ") + _counted(len(found.problems), "problem")


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _plot(found: Inspection, settings: RecipeSettings, path: Path) -> None:
    from podium.data.lengths import plot_lengths

    if not found.lengths:
        print("No lengths to draw.")
        return
    limit = settings.data.max_prompt_tokens if found.unit == "tokens" else None
    try:
        plot_lengths(found.lengths, found.unit, path, f"{Path(found.source).name}: lengths in {found.unit}", limit)
    except OSError as error:
        raise ConfigError(
            f"cannot write '{path}': {error.strerror or error}", where="--plot", remedy="give a folder that exists"
        ) from None
    print(f"Drawn into {path}.")


def _as_json(found: Inspection, settings: RecipeSettings, limit: int) -> dict[str, Any]:
    from podium.data.lengths import Lengths

    algorithms = _algorithms()
    fmt = found.format
    return {
        "source": found.source,
        "format": fmt and fmt.kind.name.lower(),
        "description": fmt and fmt.description,
        "chat": fmt and fmt.chat,
        "columns": found.columns,
        "kind": found.kind,
        "algorithms": {kind: algorithms.get(kind, []) for kind in (fmt.uses if fmt else ())},
        "rows": found.rows,
        "usable": found.usable,
        "over_limit": found.over_limit,
        "max_prompt_tokens": settings.data.max_prompt_tokens,
        "duplicates": len(found.duplicates),
        "repeated_prompts": found.repeated_prompts,
        "unit": found.unit,
        "lengths": {name: Lengths.of(values).as_dict() for name, values in found.lengths.items()},
        "example": [{"part": p.name, "learnt": p.learnt, "text": p.text, "tokens": p.tokens} for p in found.example],
        "notes": found.notes,
        "problems": [_problem(problem) for problem in found.problems[:limit]],
        "problem_count": len(found.problems),
        "all_found": found.all_found,
    }


def _problem(problem: PodiumError) -> dict[str, str | None]:
    return {"where": problem.where, "what": problem.what, "remedy": problem.remedy}
