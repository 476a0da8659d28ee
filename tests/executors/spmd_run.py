"""Runs under torchrun's variables: `python -m tests.executors.spmd_run OUT CHECK...`; outcomes go to OUT.<rank>."""

from __future__ import annotations

import json
import sys
import traceback

from podium.controller.executors.spmd import SpmdExecutor
from tests.executors import trouble
from tests.executors.suite import CHECKS, ROLES, check_state_goes_out_and_in


def main(out: str, names: list[str]) -> None:
    executor = SpmdExecutor(device="cpu", deadline_seconds=30, grace_seconds=2)
    results = {}
    if names and names[0] in trouble.SPMD:
        results[names[0]] = trouble.SPMD[names[0]](executor)
    else:
        roles = executor.launch(ROLES)
        for name in names:
            try:
                if CHECKS[name] is check_state_goes_out_and_in:
                    CHECKS[name](roles, executor.writes)
                else:
                    CHECKS[name](roles)
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
    with open(f"{out}.{executor.rank}", "w") as file:
        json.dump(results, file)
    if names and names[0] not in trouble.SPMD:
        executor.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
