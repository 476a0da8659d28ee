"""Who may import whom (docs/architecture.md, "The house"). Imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PODIUM = Path(__file__).parents[2] / "podium"

BELOW_STAGES = {"core", "algorithms", "data", "models", "controller", "engines", "hybrid", "rewards", "environments", "workers"}
BELOW_RECIPES = BELOW_STAGES | {"stages", "trainer", "runs", "checkpoints"}

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "algorithms": set(),
    "data": {"core"},
    "models": {"core", "algorithms"},
    "controller": {"core"},
    "runs": {"core"},
    "checkpoints": {"core", "models"},
    "engines": {"core", "algorithms", "models"},
    "hybrid": {"core", "engines", "models"},
    "rewards": {"core", "data", "models"},
    "environments": {"core", "data", "rewards"},
    "workers": {"core", "engines", "hybrid", "rewards", "algorithms", "controller.dispatch"},
    # Of the engines, stages know the interfaces only (SamplingParams): which engine runs is the workers' affair.
    "stages": {"core", "workers", "controller", "algorithms", "data", "environments", "rewards", "engines.base"},
    "trainer": BELOW_RECIPES - {"trainer"},
    "recipes": BELOW_RECIPES,
    "planner": BELOW_RECIPES,
    "doctor": BELOW_RECIPES,
    "profiling": BELOW_RECIPES,
    "quickstart": BELOW_RECIPES | {"recipes"},
    "cli": BELOW_RECIPES | {"recipes", "planner", "doctor", "profiling", "quickstart"},
}
"""Room -> the rooms (or modules) that it may import besides itself."""

BACKENDS = ("ray", "vllm", "sglang", "megatron")
"""Each is imported in one module only, and only when it is used."""


def modules() -> list[Path]:
    return sorted(PODIUM.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a module imports, at any depth of nesting."""
    package = ["podium", *path.relative_to(PODIUM).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(path: Path) -> str | None:
    """The room that a module stands in; None for podium/__init__.py and its like, which only pass names on."""
    parts = path.relative_to(PODIUM).parts
    return parts[0] if len(parts) > 1 else None


def is_allowed(name: str, room: str) -> bool:
    target = name.removeprefix("podium.")
    allowed = ALLOWED[room] | {room}
    # `from podium import __version__` takes a plain value; any other name is fetched from a room behind the rule's back.
    return target == "__version__" or any(target == a or target.startswith(a + ".") for a in allowed)


def test_every_room_has_a_rule() -> None:
    rooms = {room for path in modules() if (room := room_of(path))}
    assert rooms <= set(ALLOWED)


def test_arrows() -> None:
    wrong = [
        f"{path.relative_to(PODIUM.parent)}:{line} imports {name}"
        for path in modules()
        if (room := room_of(path))
        for line, name in imports(path)
        if name.split(".")[0] == "podium" and not is_allowed(name, room)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_refuses(tmp_path: Path) -> None:
    assert not is_allowed("podium.trainer.Trainer", "workers")
    assert not is_allowed("podium.controller.worker_group.WorkerGroup", "workers")
    assert not is_allowed("podium.Trainer", "core")
    assert is_allowed("podium.controller.dispatch.dispatch", "workers")
    assert is_allowed("podium.__version__", "runs")


def test_no_cycle_between_rooms() -> None:
    """The rule itself must be a hierarchy."""
    graph = {room: {name.split(".")[0] for name in names} for room, names in ALLOWED.items()}
    while graph:
        leaves = [room for room, below in graph.items() if not below & set(graph)]
        assert leaves, f"rooms that import each other: {sorted(graph)}"
        for room in leaves:
            del graph[room]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_in_one_module(backend: str) -> None:
    users = {
        str(path.relative_to(PODIUM.parent)) for path in modules() for _, name in imports(path) if name.split(".")[0] == backend
    }
    assert len(users) <= 1, f"{backend} is imported in {sorted(users)}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_only_when_used(backend: str) -> None:
    """Never at the top level of a module."""
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert backend not in {name.split(".")[0] for name in names}, f"{path} imports {backend} at its top level"
