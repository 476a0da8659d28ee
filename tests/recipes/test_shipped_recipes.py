"""Every recipe file that ships is read, its graph checked, and its arithmetic printed."""

from pathlib import Path

import pytest

from podium.core.config import load_yaml
from podium.recipes import explain, known_recipes, load
from podium.stages.graph import StageGraph
from podium.trainer.recipe import SOURCES, find_recipe

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("podium/quickstart/*.yaml"), *ROOT.glob("examples/**/*.yaml")])


def test_there_is_one_for_every_algorithm():
    assert {path.stem for path in ROOT.glob("recipes/*.yaml")} == set(known_recipes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    values = load_yaml(path)
    mine = "podium.quickstart.task:correct"  # the files name the user's own functions
    overrides = [
        f"{kind}.0.function={mine}"
        for kind in ("rewards", "costs")
        if "score.py" in str(values.get(kind)) and path.parent == ROOT / "recipes"
    ]
    settings = load(path, overrides)
    recipe = find_recipe(settings.algorithm)
    for stages in (recipe.stages(settings), recipe.evaluation(settings)):
        StageGraph(stages, SOURCES[recipe.data])
    assert {"sequences per step", "updates in the run", "roles"} <= {row[0] for row in explain(settings)}
