"""The command `scratchformer mpiexec`: it starts the ranks of a run, and starts them again if one is lost.

Open MPI's mpiexec can start a lost process again, but not let it join the others of an MPI program; so all are ended,
and all are started again from the last snapshot. Open MPI's mpiexec ends ranks a quarter of a second after Ctrl-C or
SIGTERM, but passes SIGUSR1 on to them. So these signals become SIGUSR1 here: the ranks save a snapshot and end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from ..parallel.ranks import LOST
from ..shell.process import SIGNALS, signals_caught
from ..training.snapshot import LAST

SECONDS = 10  # in which a host answers
LOST_HOST = b"lost communication with a remote daemon"  # what mpiexec says then
# Open MPI's mpiexec and its daemon on another host then notice a cut connection within 22 s, and not after minutes.
KEEPALIVE = {
    f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in dict(time="14", intvl="4", probes="2").items()
}
PROGRAM = re.compile(r"python[\d.]*|scratchformer|.*\.py")
COUNTS, HOSTS = ("-n", "-np", "--np", "-c"), ("--host", "-host", "-H")  # options of mpiexec
# Names of its options with one value, which may look like a program.
VALUED = "n np c host H hostfile machinefile rankfile wdir wd path prefix app x".split()


def launch(arguments: list[str], restarts: int = 0) -> int:
    """Run mpiexec with these arguments; returns its exit status.

    restarts: how many times it is started again at most, with --continue, when a rank was killed or hung, or a host was
    lost. An error of the program ends the run, and so does a signal that stops it. It goes on without hosts of --host
    that do not answer to ssh; and with one rank less if ranks were lost twice without a new snapshot in between.
    Raises ValueError if there are restarts and the arguments do not name the run's folder; FileNotFoundError if mpiexec
    is not installed.
    """
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpiexec is None:
        raise FileNotFoundError("mpiexec is not installed: pip install 'scratchformer[distributed]'")
    options, program = divided(arguments)
    folder = value_of(program, "--out", "--resume")
    if restarts and folder is None:
        raise ValueError("--restarts: the program needs --out DIR, so that the run is found again")
    lost_before: Any = ()  # the last snapshot when ranks were lost
    while True:
        status, stopped = run([mpiexec, *options, *program])
        if stopped or restarts == 0 or not lost(status):
            return status
        restarts -= 1
        snapshot = last_snapshot(Path(folder))  # type: ignore[arg-type]  # it is given if there are restarts
        reason = without_silent_hosts(options)
        if not reason and snapshot == lost_before and (count := count_of(options) or 1) > 1:
            put(options, str(count - 1), *COUNTS)
            reason = f", with {count - 1} ranks, since no snapshot was saved in between"
        lost_before = snapshot
        if value_of(program, "--resume") is None and "--continue" not in program:
            each = (["--continue", ":"] if argument == ":" else [argument] for argument in program)
            program = [*chain(*each), "--continue"]
        print(f"\na rank was lost: starting again{reason} ({restarts} restarts left)", file=sys.stderr, flush=True)


def run(command: list[str]) -> tuple[int, bool]:
    """Run mpiexec. Returns its exit status, and whether a signal stopped it: the first asks all ranks to save and end,
    the second ends them.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def stop(number: int, _frame: Any) -> None:
        received.append(number)
        if process is not None:
            first = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows has no SIGUSR1
            process.send_signal(first if len(received) == 1 else signal.SIGTERM)

    with signals_caught(stop):
        # In a process group of its own it gets no Ctrl-C from the terminal, and may not read from it.
        environment = KEEPALIVE | os.environ
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, process_group=0, **streams)
        if received:
            process.terminate()
        last = pass_on(process.stderr)
        status = process.wait()
    if status == 0 and LOST_HOST in last:  # then Open MPI 5 may end without an error
        status = LOST
    return (128 + received[0] if received else status), bool(received)


def pass_on(stream: Any) -> bytes:
    """Copy what is read from a stream to standard error, until it ends. Returns the last part of it."""
    last = b""
    while part := stream.read1():
        os.write(2, part)
        last = (last + part)[-10_000:]
    return last


def lost(status: int) -> bool:
    """Whether mpiexec's exit status says that a rank was killed, other than by a signal that stops it, or hung."""
    return status == LOST or (status > 128 and status - 128 not in SIGNALS)


def last_snapshot(folder: Path) -> list[tuple[str, int]]:
    """The last snapshots in a run's folder, of all stages, and when they were saved."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob(LAST))


def without_silent_hosts(arguments: list[str]) -> str:
    """Take hosts that do not answer out of --host. Returns what was done, in words; "" if all answer."""
    hosts = (value_of(arguments, *HOSTS) or "").split(",")
    answering = [host for host in hosts if answers(host.partition(":")[0])]
    if not answering or answering == hosts:
        return ""
    slots = sum(int(n) if (n := host.partition(":")[2]).isdecimal() else 1 for host in answering)
    count = min(slots, count_of(arguments) or slots)
    put(arguments, ",".join(answering), *HOSTS)
    put(arguments, str(count), *COUNTS)
    return f" without {', '.join(sorted({*hosts} - {*answering}))}, which does not answer, with {count} ranks"


def answers(host: str) -> bool:
    """Whether a command can be run on a host, in the way in which mpiexec does it."""
    if host in ("", "localhost", socket.gethostname()):
        return True
    agent = os.environ.get("PRTE_MCA_plm_ssh_agent", "ssh").split()
    try:
        return subprocess.run([*agent, host, "true"], capture_output=True, timeout=SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of mpiexec, and the program with its own."""
    values = {i + 1 for i, argument in enumerate(arguments) if argument[:1] == "-" and argument.lstrip("-") in VALUED}
    names = [Path(argument).name for argument in arguments]
    places = (i for i, name in enumerate(names) if PROGRAM.fullmatch(name) and i not in values)
    start = next(places, len(arguments))
    return arguments[:start], arguments[start:]


def count_of(arguments: list[str]) -> int | None:
    """The number of ranks; None if it is not given as a number."""
    count = value_of(arguments, *COUNTS) or ""
    return int(count) if count.isdecimal() else None


def value_of(arguments: list[str], *options: str) -> str | None:
    """The value of the first of these options in a command line; None if there is none."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        option, equals, value = argument.partition("=")
        if option in options:
            return value if equals else following
    return None


def put(arguments: list[str], value: str, *options: str) -> None:
    """Replace the value of the first of these options, if there is one."""
    for place, argument in enumerate(arguments):
        option, equals, _ = argument.partition("=")
        if option in options:
            if equals:
                arguments[place] = f"{option}={value}"
            elif place + 1 < len(arguments):
                arguments[place + 1] = value
            return
