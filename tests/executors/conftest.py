"""A Ray cluster on this machine, started once for the tests that need it."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from tests.executors.suite import ROLES


def pytest_collection_modifyitems(items):
    """With pytest-xdist's `--dist loadgroup`: tests on the cluster share it, those on two torchrun ranks share their run."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        for group in ("ray_cluster", "spmd"):
            if group in names:
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def ray_cluster():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install podium[ray])")
    from podium.controller.executors.ray_cluster import import_ray

    ray = import_ray()
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_roles(ray_cluster):
    from podium.controller.executors.ray import RayExecutor

    executor = RayExecutor(workers=2)
    yield executor.launch(ROLES)
    executor.shutdown()
