"""The machines of a plan: devices and their rates, nodes, a cluster described in YAML, this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, model_validator

from podium.controller.placement import Node
from podium.core.config import Settings, load_yaml, parse
from podium.core.errors import ConfigError, did_you_mean

GB = 1e9


@dataclass(frozen=True)
class Device:
    """A device and what it reaches in practice.

    Attributes:
        memory: bytes.
        flops: dense 16-bit matrix products, FLOP/s as measured, not as printed on the box.
        bandwidth: of its memory, bytes/s read and written.
        link: to a device of the same node, bytes/s one way.
        network: to a device of another node, bytes/s one way.
        host_link: to the host's memory, bytes/s one way.
        reserved: bytes that no tensor can have (the driver's context, kernels, gaps of the allocator).
        fp32: how many times slower a product in fp32 is.
        train_share, decode_share: what training and decoding reach of the roofline in practice.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float = 25e9
    network: float = 12e9
    host_link: float = 25e9
    reserved: float = 2e9
    fp32: float = 8.0
    train_share: float = 0.45
    decode_share: float = 0.55

    @property
    def usable(self) -> float:
        return self.memory - self.reserved

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"


# H200: measured (matrix product of 8192 cubed; device copy). Others: their data sheets, times what the H200 reaches of its own
# (0.8 of the products, 0.9 of the bandwidth).
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("H200", 150.7e9, 790e12, 4.3e12, 400e9, 50e9, 50e9),
        Device("H100", 85.5e9, 790e12, 3.0e12, 400e9, 50e9, 50e9),
        Device("B200", 191e9, 1800e12, 7.2e12, 800e9, 50e9, 50e9),
        Device("A100", 85.2e9, 250e12, 1.8e12, 270e9, 25e9, 22e9),
        Device("A100-40", 42.3e9, 250e12, 1.4e12, 270e9, 25e9, 22e9),
        Device("L40S", 48.3e9, 290e12, 0.77e12, 22e9, 12e9, 22e9),
        Device("A10", 24.1e9, 100e12, 0.54e12, 22e9, 12e9, 22e9),
        Device("T4", 15.8e9, 52e12, 0.27e12, 12e9, 6e9, 11e9),
    )
}
_CPU_FLOPS, _CPU_BANDWIDTH = 40e9, 10e9
"""One core: products in fp32 (in 16 bits about the same, without hardware for them), and memory."""


def cpu_device(memory: float, threads: int = 1) -> Device:
    """A CPU process of so many threads as a device."""
    rates = {"flops": _CPU_FLOPS * threads, "bandwidth": _CPU_BANDWIDTH * min(threads, 8)}
    link = _CPU_BANDWIDTH / 2
    return Device("CPU", memory, **rates, link=link, network=1e9, host_link=link, reserved=0.5e9, fp32=1.0)


@dataclass(frozen=True)
class Machine:
    """A node: its devices, CPUs and memory. `disk` is what is free for run folders, in bytes; None: not known."""

    name: str
    device: Device | None
    devices: int
    cpus: int
    memory: float
    disk: float | None = None


@dataclass(frozen=True)
class Cluster:
    """The machines that a plan is for."""

    machines: tuple[Machine, ...]
    title: str

    @property
    def nodes(self) -> list[Node]:
        """As placement takes them."""
        return [
            Node(m.name, m.cpus, tuple(range(m.devices)), m.device.name, m.device.memory / GB)
            if m.device is not None
            else Node(m.name, m.cpus)
            for m in self.machines
        ]

    @property
    def devices(self) -> int:
        return sum(m.devices for m in self.machines)

    def machine(self, name: str) -> Machine:
        return next(m for m in self.machines if m.name == name)


class RateSettings(Settings):
    """Of a device, where it is other than the table's (`podium.planner.devices`)."""

    memory_gb: float | None = Field(default=None, gt=0)
    """Memory of a device, in GB (1e9 bytes)."""
    flops: float | None = Field(default=None, gt=0)
    """Dense 16-bit products, FLOP/s as measured."""
    bandwidth: float | None = Field(default=None, gt=0)
    """Of the device's memory, bytes/s."""
    link: float | None = Field(default=None, gt=0)
    """To devices of the same node, bytes/s one way."""
    network: float | None = Field(default=None, gt=0)
    """To devices of other nodes, bytes/s one way."""
    train_share: float | None = Field(default=None, gt=0, le=1)
    """What training reaches of the roofline."""
    decode_share: float | None = Field(default=None, gt=0, le=1)
    """What decoding reaches of the roofline."""


class NodeSettings(RateSettings):
    """A kind of node and how many of it there are."""

    count: int = Field(default=1, ge=1)
    """Nodes of this kind."""
    device: str = "CPU"
    """A name of the table (`H200`, `H100`, `A100`, `A100-40`, `B200`, `L40S`, `A10`, `T4`), `CPU`, or your own."""
    devices: int = Field(default=0, ge=0)
    """Devices of a node."""
    cpus: int = Field(default=64, ge=1)
    """CPUs of a node."""
    host_memory_gb: float = Field(default=512.0, gt=0)
    """Memory of a node, in GB (1e9 bytes)."""
    disk_gb: float | None = Field(default=None, gt=0)
    """Free disk for run folders, in GB."""

    @model_validator(mode="after")
    def _has_devices(self) -> NodeSettings:
        if (self.device.upper() == "CPU") != (self.devices == 0):
            raise ValueError(f"device={self.device} with devices={self.devices}: give both, or neither for a node of CPUs")
        return self


class ClusterSettings(Settings):
    """`nodes:` is a list of kinds; or the one kind's settings stand at the top."""

    nodes: list[NodeSettings] = Field(min_length=1)
    """Kinds of nodes."""


def load_cluster(path: str | Path) -> Cluster:
    """A cluster from YAML. Raises ConfigError for an unknown key, or a device that is neither known nor fully described."""
    values = load_yaml(path, "--cluster")
    given = values.get("nodes")
    if not isinstance(given, list):  # one kind
        values = dict(values)
        count = values.pop("nodes", 1)
        if "devices_per_node" in values:
            values["devices"] = values.pop("devices_per_node")
        values = {"nodes": [{"count": count, **values}]}
    settings = parse(ClusterSettings, values, str(path))
    machines: list[Machine] = []
    for kind in settings.nodes:
        device = None if kind.device.upper() == "CPU" else _device(kind)
        for _ in range(kind.count):
            disk = None if kind.disk_gb is None else kind.disk_gb * GB
            name = f"node{len(machines)}"
            machines.append(Machine(name, device, kind.devices, kind.cpus, kind.host_memory_gb * GB, disk))
    parts = [f"{k.count} x ({k.devices} {k.device})" if k.devices else f"{k.count} x {k.cpus} CPUs" for k in settings.nodes]
    return Cluster(tuple(machines), " + ".join(parts))


def find_device(name: str) -> Device | None:
    """The table's device whose name is in `name` (`NVIDIA H100 80GB HBM3`); the longest wins."""
    known = sorted(DEVICES, key=len, reverse=True)
    return next((DEVICES[k] for k in known if k.lower() in name.lower()), None)


def _device(kind: NodeSettings) -> Device:
    base = find_device(kind.device)
    given = {n: getattr(kind, n) for n in ("flops", "bandwidth", "link", "network", "train_share", "decode_share")}
    given = {n: v for n, v in given.items() if v is not None}
    if kind.memory_gb is not None:
        given["memory"] = kind.memory_gb * GB
    if base is not None:
        return replace(base, name=kind.device, **given)
    missing = [n for n in ("memory_gb", "flops", "bandwidth") if getattr(kind, n) is None]
    if missing:
        raise ConfigError(
            f"the device '{kind.device}' is not in the table, and {', '.join(missing)} is not given",
            where="nodes.device",
            remedy=did_you_mean(kind.device, DEVICES),
        )
    return Device(kind.device, **given)


def this_machine(run_device: str = "auto", disk_of: str | Path = ".") -> Cluster:
    """The machine that this runs on, as a cluster of one node."""
    import torch

    memory = float(_host_memory())
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    disk = float(_free_disk(Path(disk_of)))
    if run_device == "cpu" or not torch.cuda.is_available():
        return Cluster((Machine("this machine", None, 0, cpus, memory, disk),), f"this machine: {cpus} CPUs")
    properties = torch.cuda.get_device_properties(0)
    base = find_device(properties.name) or Device(properties.name, 0, 100e12, 1e12)
    device = replace(base, memory=float(properties.total_memory))
    count = torch.cuda.device_count()
    title = f"this machine: {count} x {properties.name}"
    return Cluster((Machine("this machine", device, count, cpus, memory, disk),), title)


def _host_memory() -> int:
    """Bytes of memory: the machine's, or what the container may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _free_disk(folder: Path) -> int:
    import shutil

    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
