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


def choose(mutant, file, lines, known, new, seconds):
    """The tests that run the lines of a mutant, the fast ones and one of each test function first."""
    end = mutant.line + (ROOT / file).read_bytes()[mutant.start : mutant.end].count(b"\n")
    of_file = lines["tests"].get(file, {})
    tests = {test for line in range(mutant.line, end + 1) for test in of_file.get(str(line), ())}
    tests = tests & known or {test for each in of_file.values() for test in each} & known
    groups = collections.defaultdict(list)
    for test in sorted(tests, key=lambda test: lines["seconds"][test]):
        groups[test.partition("[")[0]].append(test)
    cost = {t: lines["seconds"][t] * (i + 1) for group in groups.values() for i, t in enumerate(group)}
    chosen, spent = list(new), 0.0
    for test in sorted(tests, key=lambda test: cost[test]):
        if (spent := spent + lines["seconds"][test]) > seconds:
            break
        chosen.append(test)
    return chosen, spent


def plant_all(folder, again, seconds, processes):
    path, every = folder / "results.jsonl", all_mutants()
    lines = json.loads((folder / "lines.json").read_text())
    if not (drawn := folder / "sample.json").exists():
        drawn.write_text(json.dumps(random.Random(SEED).sample(list(every), COUNT)))
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    dead = {tuple(result["key"]): result["dead"] for result in results}
    keys = [key for key in map(tuple, json.loads(drawn.read_text())) if not (dead.get(key) if again else key in dead)]
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *TESTS], capture_output=True, text=True, cwd=ROOT, check=True
    )
    known = set(listed.stdout.splitlines())
    print(f"{len(known & set(lines['seconds']))} tests", flush=True)
    new = sorted(test for test in known - set(lines["seconds"]) if "::" in test)
    runners: queue.SimpleQueue[tuple[Runner, Runner]] = queue.SimpleQueue()

    def run(key):
        file, mutant = key[0], every.get(key)
        if mutant is None:
            return "no longer in the code"
        code = mutant.plant((ROOT / file).read_text("utf-8"))
        tests, spent = choose(mutant, file, lines, known, new, seconds)
        limit, pair = 10 * spent + 60, runners.get()
        try:
            if again or not mutant.function:
                answer = pair[1].run(tests or TESTS, ROOT / file, code, limit)
            else:
                answer = pair[0].run_function(TESTS, ROOT / file, mutant.function, code, limit, chosen=tests)
        finally:
            runners.put(pair)
        return answer.failed or ("" if answer.status == 0 else f"{answer.status}: {answer.output[-500:]}")

    environment = os.environ | {"HYPOTHESIS_PROFILE": "unshrunk"}
    with ThreadPoolExecutor(processes) as pool, path.open("a") as file:
        for _ in range(processes):
            runners.put((Runner(environment, ROOT, IMPORTS), Runner(environment, ROOT, IMPORTS)))
        jobs = {pool.submit(run, key): key for key in keys}
        for job in as_completed(jobs):
            print(json.dumps({"key": jobs[job], "dead": job.result()}), file=file, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cover", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="tests of at most so many seconds for a mutant")
    parser.add_argument("-j", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    cover(options.folder) if options.cover else plant_all(options.folder, options.again, options.seconds, options.j)
