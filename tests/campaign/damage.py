"""Ways to damage a file: its bytes, its JSON, or its kind. Each function also returns in words what it did."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

_RAW = "raw text in place of a value: "  # before a text that json.dumps cannot write
STRANGE = (
    None, True, False, -1, 0, 1, 7, 2**31, 2**31 - 1, 2**32, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.5, 1.5, 2.0,
    1e-300, float("nan"), float("inf"), float("-inf"), 1e308, "", " ",
    "text", "1", "None", "\ud800", "\0", "\ufeff", "é" * 5,
    "a" * 100_000, [], {}, [[]], [0], [None], {"a": 1}, {"": None}, [1, "a", None], list(range(1000)),
    _RAW + "[" * 100_000 + "]" * 100_000, _RAW + '{"a":' * 100_000 + "1" + "}" * 100_000, _RAW + "9" * 100_000,
    _RAW + "-" + "9" * 5000, _RAW + "1e400", _RAW + "1e99999999999999999999", _RAW + "0." + "3" * 100_000,
    _RAW + "[" + "{}," * 10_000 + "{}]",
)  # fmt: skip
NOT_FILES = ("FIFO", "folder", "loop", "dangling", "zero", "null", "full", "random", "socket", "hole", "forbidden")


def damage_bytes(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """`data` with something wrong in it."""
    n = max(1, len(data))
    i = draw.randrange(n)
    length = min(draw.choice((1, 2, 8, 100, 512, 4096, n)), n - i)
    kind = draw.choice(
        ("bit", "byte", "bytes", "cut", "cut", "head", "delete", "insert", "twice", "swap", "zeros", "after", "empty",
         "noise", "end")
    )  # fmt: skip
    part = data[i : i + length]
    noise = draw.randbytes(length)
    match kind:
        case "bit":
            new = data[:i] + bytes([data[i] ^ 1 << draw.randrange(8)] if data else b"") + data[i + 1 :]
        case "byte":
            new = data[:i] + draw.choice((b"\0", b"\xff", b" ", b"\n", b"9", b'"', draw.randbytes(1))) + data[i + 1 :]
        case "bytes":
            new = data[:i] + noise + data[i + length :]
        case "cut":
            new = data[:i]
        case "end":
            new = data[: -draw.randrange(1, 20)]
        case "head":
            new = data[i:]
        case "delete":
            new = data[:i] + data[i + length :]
        case "insert":
            new = data[:i] + noise + data[i:]
        case "twice":
            new = data[:i] + part + data[i:]
        case "swap":
            j = draw.randrange(n)
            i, j = min(i, j), max(i, j)
            length = min(length, j - i, len(data) - j)
            new = data[:i] + data[j : j + length] + data[i + length : j] + data[i : i + length] + data[j + length :]
        case "zeros":
            new = data[:i] + bytes(length) + data[i + length :]
        case "after":
            new = data + draw.choice((noise, data, bytes(draw.randrange(1, 2000)), b"\n"))
        case "empty":
            new = b""
        case _:
            new = draw.randbytes(draw.randrange(1, 2000))
    return f"{kind} of {length} at byte {i} of {len(data)}", new


def damage_json(draw: random.Random, value: Any) -> tuple[str, str]:
    """The JSON text of `value` with one to three places changed."""
    value = copy.deepcopy(value)
    words = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = [((), None, None), *_places(value)]
        path, holder, name = draw.choice(places)
        if holder is None:
            if draw.random() < 0.9 and len(places) > 1:
                path, holder, name = draw.choice(places[1:])
        strange = copy.deepcopy(draw.choice(STRANGE))
        if holder is None:
            value, words = strange, ["everything"]
            break
        where = ".".join(map(str, path))
        match draw.choice(("replace", "replace", "replace", "replace", "remove", "add", "similar", "exchange")):
            case "remove":
                del holder[name]
                words.append(f"{where} removed")
            case "add" if isinstance(holder, dict):
                holder["another"] = strange
                words.append(f"{where} with another: {str(strange)[:40]!r}")
            case "similar" if isinstance(holder[name], int | float) and not isinstance(holder[name], bool):
                holder[name] = draw.choice((holder[name] * 10, holder[name] + 1, holder[name] - 1, str(holder[name])))
                words.append(f"{where} = {holder[name]!r}")
            case "exchange":
                _, other, key = draw.choice(_places(value))
                if not isinstance(other[key], dict | list) and not isinstance(holder[name], dict | list):
                    other[key], holder[name] = holder[name], other[key]
                words.append(f"{where} and {key} exchanged")
            case _:
                holder[name] = strange
                words.append(f"{where} = {str(strange)[:40]!r}")
    return ", ".join(words), json_text(value)


def json_text(value: Any) -> str:
    """The JSON text of `value`, with the raw texts of STRANGE written as they are."""
    text = json.dumps(value)
    for raw in (json.dumps(x) for x in STRANGE if isinstance(x, str) and x.startswith(_RAW)):
        text = text.replace(raw, raw[1 + len(_RAW) : -1].replace('\\"', '"'))
    return text


def _places(value: Any, path: tuple = ()) -> list[tuple[tuple, Any, Any]]:
    """Every place in a JSON value: its path, the object or list that holds it, and its name or number there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for name, inner in list(items)[:200]:
        found += [((*path, name), value, name), *_places(inner, (*path, name))]
    return found


def replace_by_no_file(draw: random.Random, path: Path) -> str:
    """Replace the file `path` by something that is not a regular file, or cannot be read."""
    kinds = NOT_FILES[:-1] if os.geteuid() == 0 else NOT_FILES  # nothing is forbidden to root
    kind = draw.choice(kinds)
    if path.is_dir():
        path.rename(path.with_name(path.name + ".away"))
    elif kind != "forbidden":
        path.unlink(missing_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "zero" | "null" | "full" | "random":
            path.symlink_to(f"/dev/{kind}")
        case "socket":
            before = os.getcwd()
            os.chdir(path.parent)  # a socket's path has at most 108 characters
            socket.socket(socket.AF_UNIX).bind(path.name)
            os.chdir(before)
        case "hole":
            with open(path, "wb") as file:
                file.truncate(1 << draw.choice((33, 40, 43)))
        case "forbidden":
            path.chmod(0)
    return f"{path.name} is a {kind}"


def size_of(folder: Path) -> int:
    """How many bytes the files in a folder take on the disk, without holes."""
    found = (file.lstat() for file in folder.rglob("*") if not file.is_dir())
    return sum(min(s.st_size, 512 * s.st_blocks) for s in found)
