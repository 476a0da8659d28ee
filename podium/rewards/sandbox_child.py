"""What runs inside the sandbox's process: it gives up rights, one layer after the other, then runs the program.

A script of its own (`python -I -S -B sandbox_child.py PAYLOAD_FD REPORT_FD`), with the standard library alone. The kernel's
layers (limits, Landlock, seccomp, a network namespace) cannot be undone by the program; the audit hook stops honest python
code and names what it tried, and a program that tampers with the interpreter's memory gets past it.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is slow to import, and every program would wait for it
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
EPERM, ENOSYS = 1, 38
KILL, ALLOW = 0x80000000, 0x7FFF0000

# Numbers by architecture: what ends the program, and what is only refused.
CALLS: dict[str, dict[str, Any]] = {
    "x86_64": {
        "arch": 0xC000003E,
        # socket, socketpair, fork, vfork, execve, execveat, ptrace, process_vm_*, io_uring_setup, pidfd_*, bpf
        "kill": (41, 53, 57, 58, 59, 322, 101, 310, 311, 425, 424, 434, 438, 321),
        # chmod and chown, xattr, mknod, limits, priority, affinity, mount, namespaces, keys, shared memory, handles, perf
        "refuse": (
            *(90, 91, 92, 93, 94, 260, 268, 452, 188, 189, 190, 133, 259, 160, 302, 141, 203, 165, 166, 272, 308),
            *(248, 249, 250, 29, 64, 68, 240, 304, 298, 323, 169, 175, 313, 246),
        ),
        "own": (62, 200, 234),  # kill, tkill, tgkill
        "clone": 56,
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "kill": (198, 199, 221, 281, 117, 270, 271, 425, 424, 434, 438, 280),
        "refuse": (
            *(52, 53, 54, 55, 452, 5, 6, 7, 33, 164, 261, 140, 122, 40, 39, 97, 268),
            *(217, 218, 219, 194, 186, 190, 180, 265, 241, 282, 142, 105, 273, 104),
        ),
        "own": (129, 130, 131),
        "clone": 220,
    },
}


def limit(payload: dict[str, Any]) -> None:
    """Kernel limits: they hold on every POSIX system (memory: on Linux)."""
    cpu = int(payload["seconds"]) + 2
    size = payload["file_bytes"]
    wanted = {
        "RLIMIT_CPU": cpu,
        "RLIMIT_AS": payload["memory_bytes"],
        "RLIMIT_FSIZE": size,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if not payload["threads"]:
        wanted["RLIMIT_NPROC"] = 0
    for name, value in wanted.items():
        if hasattr(resource, name):
            try:
                resource.setrlimit(getattr(resource, name), (value, value))
            except (ValueError, OSError):
                continue
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # python ignores it; here it ends a program that writes too much


def new_network() -> bool:
    """A network namespace of its own, without even a loopback that is up."""
    return LIBC.unshare(0x10000000 | 0x40000000 | 0x08000000) == 0  # user, network, IPC


def landlock(readable: Sequence[str], writable: Sequence[str]) -> bool:
    """Files: reading below `readable`, all below `writable`, nothing else (Linux 5.13)."""
    version = LIBC.syscall(444, None, 0, 1)
    if version < 1:
        return False
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    attribute = struct.pack("QQ", rights, 0)
    ruleset = LIBC.syscall(444, attribute, 8, 0)
    if ruleset < 0:
        return False
    for path, allowed in [*((p, 0b1100) for p in readable), *((p, rights) for p in writable)]:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            allowed &= 0b110 | (1 << 14 & rights)  # of a file: read, write, truncate
        LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, folder), 0)
        os.close(folder)
    done = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def seccomp() -> bool:
    """System calls: no socket, no process, no signal to another one; a call of that kind ends the program (SIGSYS)."""
    table = CALLS.get(platform.machine())
    if table is None or sys.byteorder != "little":
        return False
    program = b""

    def add(code: int, k: int, yes: int = 0, no: int = 0) -> None:
        nonlocal program
        program += struct.pack("HBBI", code, yes, no, k)

    load, equal, above, bits, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    add(load, 4)
    add(equal, table["arch"], yes=1)
    add(leave, KILL)
    add(load, 0)
    add(above, 0x40000000, no=1)  # x86's second table of numbers
    add(leave, KILL)
    for number in table["kill"]:
        add(equal, number, no=1)
        add(leave, KILL)
    for number in table["refuse"]:
        add(equal, number, no=1)
        add(leave, 0x00050000 | EPERM)
    add(equal, 435, no=1)  # clone3: its flags cannot be read here; without it libc makes threads by clone
    add(leave, 0x00050000 | ENOSYS)
    for number in table["own"]:
        add(equal, number, no=4)
        add(load, 16)
        add(equal, os.getpid(), no=1)
        add(leave, ALLOW)
        add(leave, KILL)
    add(equal, table["clone"], no=4)
    add(load, 16)
    add(bits, 0x10000, no=1)  # CLONE_THREAD
    add(leave, ALLOW)
    add(leave, KILL)
    add(leave, ALLOW)
    held = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    return LIBC.prctl(22, 2, filters, 0, 0) == 0


REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.kill", "ctypes."),
    *("pty.", "resource.setrlimit", "signal.pthread_kill", "os.setxattr", "os.removexattr", "syslog.", "_posixsubprocess"),
)
CHANGES = ("os.chmod", "os.chown", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
READS = ("os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.glob")


def audit_hook(
    refuse: Callable[[str], NoReturn], readable: Sequence[str], writable: Sequence[str], most_files: int
) -> Callable[[str, tuple[Any, ...]], None]:
    """Refuses what python code tries, by name; `refuse(what)` does not return."""
    realpath, fsdecode, prefixes = os.path.realpath, os.fsdecode, tuple
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    made = [0]

    def inside(path: Any, roots: Sequence[str]) -> bool:
        if isinstance(path, int) or path is None:
            return True  # a descriptor: it was opened by this same rule
        path = realpath(fsdecode(path))
        return any(path == root or path.startswith(root + "/") for root in roots)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = bool((flags or 0) & writing) or any(c in (mode or "") for c in "wax+")
            if writes and not isinstance(path, int):
                made[0] += 1
                if made[0] > most_files:
                    refuse(f"more than {most_files} files written")
            if not inside(path, writable if writes else readable):
                refuse(("write " if writes else "read ") + str(path))
        elif event.startswith(prefixes(REFUSED)):
            refuse(event)
        elif event in CHANGES:
            if not all(inside(a, writable) for a in args if isinstance(a, str | bytes)):
                refuse(f"{event} {args[0]!r}")
        elif event in READS and args and isinstance(args[0], str | bytes) and not inside(args[0], readable):
            refuse(f"{event} {args[0]!r}")

    return hook


def restrict(payload: dict[str, Any], refuse: Callable[[str], NoReturn]) -> list[str]:
    """Gives up rights for good. Returns the names of the layers that are in force."""
    here = os.path.realpath(os.getcwd())
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    readable = [os.path.realpath(p) for p in [*sys.path, *system, "/dev/null", "/dev/urandom", "/dev/zero"] if p] + [here]
    writable = [here, "/dev/null"]
    layers = ["limits"]
    linux = sys.platform == "linux"
    if linux and new_network():
        layers.append("network namespace")
    payload["threads"] = linux and platform.machine() in CALLS
    limit(payload)
    if linux:
        LIBC.prctl(38, 1, 0, 0, 0)  # no new privileges: what the two below ask for
        if landlock(readable, writable):
            layers.append("landlock")
        if seccomp():
            layers.append("seccomp")
    sys.addaudithook(audit_hook(refuse, readable, writable, payload["most_files"]))
    return [*layers, "audit hook"]


def main() -> None:
    payload_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(payload_fd, encoding="utf-8") as file:
        payload = json.load(file)
    nonce, tests, write, leave, dumps = payload.pop("nonce"), payload["tests"], os.write, os._exit, json.dumps
    flush = (sys.stdout.flush, sys.stderr.flush)
    sys.argv = ["solution.py"]

    def report(status: str, **more: Any) -> None:
        write(report_fd, dumps({"nonce": nonce, "status": status, **more}).encode())

    def refuse(what: str) -> NoReturn:
        report("refused", what=what[:200])
        leave(3)

    layers = restrict(payload, refuse)
    name = "__main__" if tests is None else "solution"
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    status, code = "done", 0
    passed: list[Any] = []
    try:
        exec(compile(payload["code"], "solution.py", "exec"), module.__dict__)
        for test in tests or ():
            passed.append(holds(test, module.__dict__))
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        status = "exited"
    except MemoryError:
        status, code = "memory", 1
    except BaseException as error:
        status, code = "error", 1
        passed = [type(error).__name__ + ": " + str(error)[:300]]
    for stream in flush:
        try:
            stream()
        except BaseException:
            code = code or 1
    report(status, passed=passed, layers=layers)
    leave(code & 255)


def holds(test: str, namespace: dict[str, Any]) -> bool:
    """Whether a test runs through."""
    try:
        exec(compile(test, "test.py", "exec"), namespace)
    except MemoryError:
        raise
    except BaseException:
        return False
    return True


if __name__ == "__main__":
    main()
