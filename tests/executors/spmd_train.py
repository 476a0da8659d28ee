"""A run under torchrun's variables: `python -m tests.executors.spmd_train FOLDER`; its path goes to FOLDER/path."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.executors.test_runs import trained

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer, result = trained(folder, executor={"kind": "spmd"}, checkpoint={"every_steps": 1, "export": True})
    if trainer.executor.writes:
        (folder / "path").write_text(str(result.run_folder))
    trainer.close()
