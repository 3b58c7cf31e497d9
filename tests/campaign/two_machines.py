"""Two network namespaces as two machines: a run of two ranks over TCP, with a delay, and with a cut connection.

    python tests/campaign/two_machines.py [--delay 50]

It needs root and Linux, and changes nothing outside its two namespaces, which are deleted in the end. Each is joined to
this process by a TUN device; the process passes packets on, after half of the delay each way. mpiexec runs in one
namespace and starts its daemon in the other by `nsenter` instead of `ssh`, with a host name of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import importlib.util
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from kills import _finish, _lines, _wait
from power import differences
from ranks import IN_TIME, MPIEXEC
from runs import command, make_data

NAMES = ("near", "far")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # of linux/if_tun.h
PACKET = 65536
STEPS = 20


class Wire:
    """Two namespaces, near and far, with the addresses 10.77.0.1 and 10.77.0.2, and a wire between them.

    delay: seconds from one to the other. cut: whether packets are lost.
    """

    def __init__(self) -> None:
        self.delay, self.cut, self.ended = 0.0, False, False
        self.names = [f"scratchformer-{name}-{os.getpid()}" for name in NAMES]
        self.devices = []
        for number, name in enumerate(self.names, 1):
            subprocess.run(["ip", "netns", "add", name], check=True)
            self.devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            device = f"sf{number}-{os.getpid()}"[:15]
            fcntl.ioctl(self.devices[-1], TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            subprocess.run(["ip", "link", "set", device, "netns", name], check=True)
            peer = f"10.77.0.{3 - number}"
            for line in (
                f"addr add 10.77.0.{number} peer {peer} dev {device}",
                f"link set {device} mtu 60000 up",
                "link set lo up",
            ):
                subprocess.run(["ip", "-n", name, *line.split()], check=True)
        self.thread = threading.Thread(target=self.carry)
        self.thread.start()

    def carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self.ended:
            patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for device in select.select(self.devices, [], [], min(0.1, patience))[0]:
                packet, count = os.read(device, PACKET), count + 1
                other = self.devices[1 - self.devices.index(device)]
                heapq.heappush(waiting, (time.monotonic() + self.delay, count, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                if not self.cut:
                    try:
                        os.write(device, packet)
                    except BlockingIOError:  # the queue is full: TCP sends it again
                        pass

    def delete(self) -> None:
        self.ended = True
        self.thread.join()
        for device, name in zip(self.devices, self.names, strict=True):
            os.close(device)
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", name], check=True)


def start(wire: Wire, folder: Path, data: Path, run: Path, *options: object) -> subprocess.Popen:
    """Start a run of two ranks, one in each namespace, or resume it."""
    agent = folder / "agent"
    enter = f"ip netns exec {wire.names[1]} unshare -u"
    inside = 'hostname far; exec sh -c "$*"'
    agent.write_text(f"#!/bin/sh\nshift\nexec {enter} sh -c '{inside}' - \"$@\"\n")
    agent.chmod(0o755)
    settings = {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_if_include": "10.77.0.0/24",
        "PMIX_MCA_ptl_tcp_if_include": "lo",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl_tcp_if_include": "10.77.0.0/24",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    launcher = [
        sys.executable,
        "-m",
        "scratchformer",
        "mpiexec",
        "--allow-run-as-root",
        "--host",
        "10.77.0.1:1,10.77.0.2:1",
        "-n",
        "2",
        "--map-by",
        "node",
    ]
    launcher += [part for name in ("PYTHONPATH", "PATH") for part in ("-x", name)]
    arguments = ["--resume", run] if (run / "settings.json").exists() else ["--out", run, "--data", data, *options]
    own = command("plain", *arguments, "--device", "cpu")
    near = ["ip", "netns", "exec", wire.names[0], "unshare", "-u", "sh", "-c", 'hostname near; exec "$@"', "-"]
    with open(run.with_name("output"), "w") as output:
        streams = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
        return subprocess.Popen([*near, *map(str, launcher), *own], env=os.environ | settings, **streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", action="store_true", help="only the cut connection")
    parser.add_argument("--delay", type=float, default=50, help="milliseconds there and back (default: 50)")
    args = parser.parse_args()
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        sys.exit("two_machines: skipped, since it needs root and /dev/net/tun")
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        sys.exit("two_machines: skipped, since mpi4py or mpiexec is not installed")
    with tempfile.TemporaryDirectory() as name:
        wire = Wire()
        try:
            try_all(wire, Path(name), args.delay / 1000)
        finally:
            wire.delete()


def try_all(wire: Wire, folder: Path, delay: float) -> None:
    data, runs = make_data(folder)["plain"], {}
    options = ("--steps", STEPS, "--replicas", 1)
    for name in ("alone", "together", "delayed", "cut"):
        (folder / name).mkdir()
        runs[name] = folder / name / "run"
    with open(folder / "alone" / "output", "w") as output:
        arguments = ("--out", runs["alone"], "--data", data, *options, "--device", "cpu")
        _finish(subprocess.Popen(command("plain", *arguments), stdout=output, stderr=output), runs["alone"])
    for name in () if "--cut" in sys.argv else ("together", "delayed"):
        wire.delay = delay / 2 if name == "delayed" else 0.0
        begun = time.monotonic()
        _finish(start(wire, folder, data, runs[name], *options), runs[name])
        what = f"two machines, {2000 * wire.delay:.0f} ms there and back"
        compare(f"{what}, {time.monotonic() - begun:.1f} s", runs[name], runs["alone"])
    wire.delay = 0.0
    process = start(wire, folder, data, runs["cut"], *options)
    _wait(process, lambda: _lines(runs["cut"]) > 5)
    wire.cut, begun = True, time.monotonic()
    try:
        status = process.wait(2 * IN_TIME)
        print(f"cut: ended after {time.monotonic() - begun:.1f} s with status {status}")
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"cut: NOT ended after {2 * IN_TIME} s")
    text = (folder / "cut" / "output").read_text(errors="replace")
    print("\n".join(f"    {line}" for line in re.split(r"[\r\n]+", text) if re.search("rank|error|lost", line)))
    time.sleep(10)
    far = subprocess.run(["ip", "netns", "pids", wire.names[1]], capture_output=True, text=True).stdout.split()
    print(f"cut: {len(far)} processes left on the other machine {time.monotonic() - begun:.1f} s later")
    wire.cut = False
    _finish(start(wire, folder, data, runs["cut"]), runs["cut"])
    compare("cut, and resumed", runs["cut"], runs["alone"])


def compare(what: str, run: Path, alone: Path) -> None:
    different = list(differences(run, alone))
    print(f"{what}: {'the bits of one process' if not different else different}", flush=True)


if __name__ == "__main__":
    main()
