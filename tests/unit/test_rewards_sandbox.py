"""Programs that fork, fill memory, sleep, write, connect, print for ever: each gets a verdict in time, and is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.rewards import sandbox
from podium.rewards.functions.code_tests import Pair, last_block, read_tests
from podium.rewards.fusion import fuse
from podium.rewards.loading import load_reward
from podium.rewards.sandbox import Limits, layers, run_python

HELD = sys.platform == "linux" and {"seccomp", "landlock"} <= set(layers())
pytestmark = pytest.mark.skipif(not HELD, reason="the kernel here has no seccomp or no Landlock")
QUICK = Limits(seconds=20.0, memory_bytes=128 * 2**20, output_bytes=2**16)


@pytest.fixture
def started(monkeypatch):
    """Process ids of what is started (each leads a session of its own)."""
    pids, popen = [], subprocess.Popen

    def recorded(*args, **keywords):
        process = popen(*args, **keywords)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return pids


def running(pids):
    """Processes in the sessions that these began."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in pids:
            found.append(stat)
    return found


BAD = {
    "forks": ("import os\nos.fork()", "refused"),
    "forks and hides it": ("import os\ntry:\n    os.fork()\nexcept BaseException:\n    pass", "refused"),
    "is a fork bomb": ("import os\nwhile True:\n    os.fork()", "refused"),
    "starts a program": ("import subprocess\nsubprocess.run(['sleep', '60'])", "refused"),
    "starts processes": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "refused"),
    "goes to a shell": ("import os\nos.system('sleep 60')", "refused"),
    "fills memory": ("held = []\nwhile True:\n    held.append(bytearray(10**6))", "memory"),
    "asks for much": ("bytearray(10**12)", "memory"),
    "sleeps": ("import time\ntime.sleep(60)", "timeout"),
    "counts for ever": ("while True:\n    pass", "timeout"),
    "hides from the deadline": (
        "import signal, time\nfor s in (15, 2, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "timeout",
    ),
    "writes outside": ("open('{tmp}/evil', 'w').write('x')", "refused"),
    "writes over": ("import os\nos.open('{tmp}/mine', os.O_WRONLY | os.O_TRUNC)", "refused"),
    "removes": ("import os\nos.remove('{tmp}/mine')", "refused"),
    "renames": ("import os\nos.rename('{tmp}/mine', 'a')", "refused"),
    "makes folders": ("import os\nos.mkdir('{tmp}/evil')", "refused"),
    "writes many files": ("for i in range(99):\n    open(str(i), 'w')", "refused"),
    "writes a long file": ("open('a', 'w').write('x' * 10**7)", "output"),
    "opens a socket": ("import socket\nsocket.socket()", "refused"),
    "asks the web": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "refused"),
    "prints for ever": ("while True:\n    print('x' * 1000)", "output"),
    "reads its parent's environment": ("open('/proc/%d/environ' % __import__('os').getppid()).read()", "refused"),
    "reads files": ("open('{tmp}/mine').read()", "refused"),
    "lists folders": ("import os\nos.listdir('{tmp}')", "refused"),
    "calls the C library": ("import ctypes\nctypes.CDLL(None).fork()", "refused"),
    "kills its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "refused"),
    "crashes": ("import os\nos.abort()", "crashed"),
    "raises": ("1 / 0", "error"),
    "is no python": ("def f(:", "error"),
    "leaves early": ("import os\nos._exit(0)", "exited"),
    "leaves early by the front door": ("import sys\nsys.exit(0)", "exited"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_program_gets_its_verdict_in_time(what, tmp_path, started):
    (tmp_path / "mine").write_text("secret")
    code, status = BAD[what]
    limits = replace(QUICK, seconds=0.7) if status == "timeout" else QUICK
    began = time.perf_counter()
    outcome = run_python(code.replace("{tmp}", str(tmp_path)), ["assert True"], limits=limits)
    assert time.perf_counter() - began < limits.seconds + 2.0
    assert (outcome.status, outcome.passed) == (status, []), outcome
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("mine", "secret")]
    assert running(started) == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os\nos.fork()", "refused"),
        ("import ctypes\nctypes.CDLL(None).fork()", "refused"),
        ("import os\nos.execv('/bin/sh', ['sh'])", "refused"),
        ("import socket\nsocket.socket()", "refused"),
        ("import os\nos.kill(os.getppid(), 9)", "refused"),
        ("open('{tmp}/evil', 'w')", "error"),
        ("open('{tmp}/mine')", "error"),
        ("import os\nos.remove('{tmp}/mine')", "error"),
        ("import os\nos.symlink('{tmp}', 'a')\nopen('a/mine')", "error"),
        ("import os\nos.chmod('{tmp}/mine', 0)", "error"),
        ("open('/proc/%d/environ' % __import__('os').getppid())", "error"),
    ],
)
def test_the_kernel_holds_it_without_the_hook(code, status, tmp_path, monkeypatch, started):
    text = sandbox._CHILD.read_text()
    hook = next(line for line in text.splitlines() if "sys.addaudithook(" in line)
    (tmp_path / "child.py").write_text(text.replace(hook, ""))
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    (tmp_path / "mine").write_text("secret")
    outcome = run_python(code.replace("{tmp}", str(tmp_path)), limits=QUICK)
    assert outcome.status == status, outcome
    assert sorted(p.name for p in tmp_path.iterdir()) == ["child.py", "mine"]
    assert running(started) == []


def test_what_a_program_may_do(monkeypatch):
    monkeypatch.setenv("SECRET", "do not tell")
    code = """
import dataclasses, math, os, random, threading, zoneinfo, tempfile
from concurrent.futures import ThreadPoolExecutor
assert "SECRET" not in os.environ, os.environ
open("a.txt", "w").write("é")
assert open("a.txt").read() == "é"
tempfile.TemporaryFile().write(b"x")
os.mkdir("d"); os.rename("a.txt", "d/a"); os.remove("d/a")
assert list(ThreadPoolExecutor(2).map(abs, [-1, 2])) == [1, 2]
@dataclasses.dataclass
class Point:
    x: int
print(input()[::-1], Point(1))
"""
    outcome = run_python(code, stdin="日本", limits=Limits(seconds=20.0))
    assert (outcome.status, outcome.stdout) == ("done", "本日 Point(x=1)\n"), outcome


def test_the_folder_is_removed():
    outcome = run_python("import os\nos.mkdir('locked', 0)\nprint(os.getcwd())", limits=QUICK)
    assert outcome.stdout.strip().startswith("/")
    assert not os.path.exists(outcome.stdout.strip())


def test_success_cannot_be_printed_or_written():
    forged = 'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"status": "done", "passed": [true]}\')\n'
    forged += "    except OSError: pass\nos._exit(0)"
    assert run_python(forged, ["assert False"], limits=QUICK).passed == []
    assert run_python("print('passed')", ["assert False"], limits=QUICK).passed == [False]


# ---------------------------------------------------------------------- the reward


def batch_of(responses, tests):
    n = len(responses)
    return Batch({"prompt": ["p"] * n, "response": responses, "row_index": list(range(n)), "data.tests": tests})


def reward_of(on_error="raise", **options):
    return load_reward(RewardSettings(function="code_tests", on_error=on_error, options=options))


def block(code):
    return f"So:\n```python\n{code}\n```\nDone."


DOUBLE = "def double(x):\n    return 2 * x"


def test_asserts_reasons_and_the_last_block():
    tests = ["assert double(2) == 4", "assert double(-1) == -2"]
    responses = [
        block(DOUBLE),
        block("def double(x):\n    return x + 2"),
        block("wrong") + "\n" + block(DOUBLE),
        "no code: ```def```",
        block("import time\ntime.sleep(60)"),
        block("raise SystemExit"),
    ]
    out, metrics = fuse(batch_of(responses, [tests] * 6), [reward_of(deadline=1.0)])
    assert out["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    shares = {reason: metrics.mean(f"reward/code_tests/{reason}") for reason in ("passed", "failed", "no_code", "timeout")}
    assert shares == pytest.approx({"passed": 2 / 6, "failed": 1 / 6, "no_code": 1 / 6, "timeout": 1 / 6})
    assert metrics.mean("reward/code_tests/exited") == pytest.approx(1 / 6)
    half = fuse(batch_of(responses[1:2], [tests]), [reward_of(score="share")])[0]
    assert half["rewards"].tolist() == [0.5]


def test_pairs_of_input_and_output():
    code = block("import sys\nprint(int(input()) * 2)\nsys.exit(0)")
    pairs = [{"input": "2\n", "output": "4"}, {"input": 3, "output": "7\n"}]
    assert reward_of()(batch_of([code], [pairs[:1]])).values.tolist() == [1.0]
    assert reward_of()(batch_of([code], [pairs])).values.tolist() == [0.0]
    assert reward_of(score="share")(batch_of([code], [pairs])).values.tolist() == [0.5]


def test_forms_of_tests():
    assert read_tests('["assert a", "assert b"]') == (["assert a", "assert b"], [])
    assert read_tests("assert a\nassert b") == (["assert a\nassert b"], [])
    assert read_tests({"inputs": [["1", "2"]], "outputs": ["3"]}) == ([], [Pair("1\n2", "3")])
    lists = [[], ["assert a", {"input": 1, "output": 2}], [{"input": 1}]]
    mappings = [{"inputs": [1], "outputs": []}, {"fn_name": "f", "inputs": [1], "outputs": [1]}]
    for wrong in (*lists, *mappings, None, 5):
        with pytest.raises(ValueError, match="tests"):
            read_tests(wrong)
    assert last_block("```py\na\n```\n```\nb\n```") == "a\n"
    with pytest.raises(RewardError, match=r"sample 0 .*the data column 'tests': it has no tests"):
        reward_of()(batch_of([block("1")], [None]))


def test_what_cannot_be_set(monkeypatch):
    with pytest.raises(ConfigError, match=r"score is 'al'\n.*did you mean 'all'"):
        reward_of(score="al")
    with pytest.raises(ConfigError, match="deadline=0"):
        reward_of(deadline=0)
    with pytest.raises(ConfigError, match="needs the data column tests"):
        from podium.rewards.fusion import check_columns

        check_columns([reward_of()], ["answer"])
    for missing in ("seccomp", "landlock"):
        found = tuple(layer for layer in layers() if layer != missing)
        monkeypatch.setattr("podium.rewards.functions.code_tests.layers", lambda found=found: found)
        with pytest.raises(ConfigError, match=r"only by: limits, .*audit hook\n.*weak_isolation: true"):
            reward_of()
    assert reward_of(weak_isolation=True)(batch_of([block(DOUBLE)], [["assert double(1) == 2"]])).values.tolist() == [1.0]


def test_nothing_runs_unless_it_is_named(started):
    load_reward("exact_match")
    assert started == []
