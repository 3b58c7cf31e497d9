"""Mutants drawn at random from rooms of the package, each with only the tests that run its lines.

    python tests/mutations/sample.py FOLDER --cover    # once: which tests run which lines; needs `pip install coverage`
    python tests/mutations/sample.py FOLDER            # plant the mutants that results.jsonl in the folder lacks
    python tests/mutations/sample.py FOLDER --again    # plant those that survived; tests added since then run first

The mutants are those of `scratchformer.testing.mutate` in every function, and besides: defaults and numbers of the
module changed, truth values negated, arguments exchanged. A survivor is run once more in a process that imports the
changed file afresh, since some functions run when their module is imported.
"""

import argparse
import ast
import collections
import json
import os
import queue
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

import pytest

from scratchformer.testing.mutate import Mutant, Runner, mutants
from scratchformer.testing.mutate.run import Answer
from scratchformer.testing.mutate.source import LEFT_ALONE, functions

ROOT = Path(__file__).parents[2]
ROOMS, COUNT, SEED = ("ops", "nn", "optim"), 1000, 54
TESTS = [f"tests/{room}" for room in ROOMS]
IMPORTS = ["hypothesis.extra.numpy", "numpy", "scipy.special", "safetensors.numpy", "threadpoolctl", "tokenizers"]


def more_mutants(source):
    """Changes that are in no function's body, or that a mistake in a gradient would not be."""
    tree, lines = ast.parse(source), [0]
    for line in source.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return source.encode()[slice(*span(node))].decode()

    def walk(node, name, body):
        """body: whether this is code of a function, whose numbers `mutants` changes."""
        if isinstance(node, ast.FunctionDef):
            name = name if body else [*name, node.name]
            below = [(node.args, False), *((part, True) for part in node.body)]
        elif isinstance(node, ast.arguments):
            below = [(part, False) for part in (*node.defaults, *node.kw_defaults) if part]
        elif isinstance(node, ast.AnnAssign):
            below = [(node.value, body)] if node.value else []
        elif isinstance(node, (*LEFT_ALONE, ast.arg)):
            return
        else:
            name = [*name, node.name] if isinstance(node, ast.ClassDef) else name
            below = [(part, body) for part in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield name, body, "a truth value negated", node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not body:
            yield name, body, "off by one", node, repr(node.value + 1)
            yield name, body, "off by one", node, repr(node.value - 1)
        elif isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
            for a, b in pairwise(node.args):
                if any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (a, b)):
                    continue  # a name for messages: no call would run
                (start, end), (i, j), (k, m) = span(node), span(a), span(b)
                data = source.encode()
                parts = data[start:i], data[k:m], data[j:k], data[i:j], data[m:end]
                yield name, body, "arguments exchanged", node, b"".join(parts).decode()
        for part, inside in below:
            yield from walk(part, name, inside)

    for name, body, what, node, new in walk(tree, [], False):
        if text(node) != new and new.count("\n") == text(node).count("\n"):
            yield Mutant(".".join(name) if body else "", what, node.lineno, *span(node), new)


def all_mutants():
    """{(file, function, kind, lines before, lines after, which of these): mutant}"""
    found = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / "scratchformer" / room).glob("*.py")):
        source, file, seen = path.read_text("utf-8"), str(path.relative_to(ROOT)), set()
        every = [m for name, _ in functions(ast.parse(source)) for m in mutants(source, name)]
        for mutant in [*every, *more_mutants(source)]:
            if (planted := mutant.plant(source)) not in seen:
                seen.add(planted)
                key = (file, mutant.function, mutant.what, *map("\n".join, mutant.difference(source)))
                number = next(n for n in range(99) if (*key, n) not in found)
                found[(*key, number)] = mutant
    return found


class Cover:
    """A pytest plugin that notes the lines and the time of each test."""

    def __init__(self, coverage):
        self.coverage, self.seconds = coverage, {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        start = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - start
        return result


def cover(folder):
    import coverage

    watch = coverage.Coverage(str(folder / "lines"), include=[f"{ROOT}/scratchformer/{room}/*" for room in ROOMS])
    plugin = Cover(watch)
    watch.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *TESTS], plugins=[plugin])
    watch.stop()
    data, tests = watch.get_data(), collections.defaultdict(dict)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests[str(Path(file).relative_to(ROOT))][line] = [c for c in contexts if c in plugin.seconds]
    (folder / "lines.json").write_text(json.dumps({"seconds": plugin.seconds, "tests": tests}))


def choose(mutant, file, lines, listed, seconds):
    """The tests that run the lines of a mutant, the fast ones and one of each test function first; before them those
    that were added, after them those from elsewhere.
    """
    end = mutant.line + (ROOT / file).read_bytes()[mutant.start : mutant.end].count(b"\n")
    of_file, known = lines["tests"].get(file, {}), lines["seconds"].keys() & listed
    tests = {test for line in range(mutant.line, end + 1) for test in of_file.get(str(line), ())}
    tests = tests & known or {test for each in of_file.values() for test in each} & known
    cost, groups = {}, collections.Counter()
    for test in sorted(tests, key=lambda test: lines["seconds"][test]):
        groups[function := test.partition("[")[0]] += 1
        cost[test] = lines["seconds"][test] * groups[function]
    chosen, spent = [test for test in listed if test not in known and test.startswith(tuple(TESTS))], 0.0
    for test in sorted(tests, key=cost.__getitem__):
        if (spent := spent + lines["seconds"][test]) > seconds:
            break
        chosen.append(test)
    return chosen + [test for test in listed if not test.startswith(tuple(TESTS))], spent


def plant_all(folder, again, also, seconds, processes):
    path, every = folder / "results.jsonl", all_mutants()
    lines = json.loads((folder / "lines.json").read_text())
    if not (drawn := folder / "sample.json").exists():
        drawn.write_text(json.dumps(random.Random(SEED).sample(list(every), COUNT)))
    dead = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
    left = [
        text for key in json.loads(drawn.read_text()) if not dead.get(text := json.dumps(key), "" if again else None)
    ]
    command = [sys.executable, "-m", "pytest", "--collect-only", *TESTS, *also]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    listed = dict.fromkeys(line for line in output.splitlines() if "::" in line)
    runners: queue.SimpleQueue[tuple[Runner, Runner]] = queue.SimpleQueue()

    def run(text):
        file = json.loads(text)[0]
        if (mutant := every.get(tuple(json.loads(text)))) is None:
            return "no longer in the code"
        code, pair = mutant.plant((ROOT / file).read_text("utf-8")), runners.get()
        tests, spent = choose(mutant, file, lines, listed, seconds)
        try:
            answer, limit = Answer(0, True, "", ""), 10 * spent + 60
            if mutant.function:
                answer = pair[0].run_function([*TESTS, *also], ROOT / file, mutant.function, code, limit, chosen=tests)
            if answer.status == 0 and (again or not mutant.function):
                answer = pair[1].run(tests, ROOT / file, code, limit)
        finally:
            runners.put(pair)
        return answer.failed or ("" if answer.status == 0 else f"{answer.status}: {answer.output[-500:]}")

    environment = os.environ | {"HYPOTHESIS_PROFILE": "unshrunk"}
    with ThreadPoolExecutor(processes) as pool, path.open("a") as file:
        for _ in range(processes):
            runners.put((Runner(environment, ROOT, IMPORTS), Runner(environment, ROOT, IMPORTS)))
        jobs = {pool.submit(run, text): text for text in left}
        for job in as_completed(jobs):
            print(json.dumps([jobs[job], job.result()]), file=file, flush=True)
    print("\n".join(text for text in left if not dict(map(json.loads, path.read_text().splitlines()))[text]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cover", action="store_true")
    parser.add_argument("--also", nargs="*", default=[], help="more tests, which run last")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="tests of at most so many seconds for a mutant")
    parser.add_argument("-j", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    if options.cover:
        cover(options.folder)
    else:
        plant_all(options.folder, options.again, options.also, options.seconds, options.j)
