"""Mutants drawn at random from rooms of the package, each with the tests that run its lines.

    python tests/mutations/sample.py FOLDER --cover    # once: which tests run which lines; needs `pip install coverage`
    python tests/mutations/sample.py FOLDER            # plant the mutants that FOLDER/results.jsonl does not have
    python tests/mutations/sample.py FOLDER --again    # plant those that survived; the file is imported afresh

The mutants are those of `scratchformer.testing.mutate` in every function, and besides: numbers of the module and
defaults off by one, truth values negated, arguments exchanged.
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
    """Changes in no function's body, or that no gradient shows; with function "" where the module must be run again."""
    data, starts = source.encode(), [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def walk(node, name, body):
        value = node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None
        if isinstance(value, bool):
            yield name * body, "a truth value negated", node, str(not value).encode()
        elif value is not None and not body:  # `mutants` changes those in bodies
            yield from ((name * body, "off by one", node, repr(value + i).encode()) for i in (1, -1))
        elif isinstance(node, ast.Call):
            for a, b in pairwise(node.args):
                if not any(isinstance(x, ast.Starred) or isinstance(getattr(x, "value", 0), str) for x in (a, b)):
                    (start, end), (i, j), (k, m) = span(node), span(a), span(b)
                    new = data[start:i] + data[k:m] + data[j:k] + data[i:j] + data[m:end]
                    yield name * body, "arguments exchanged", node, new
        inner = body or isinstance(node, ast.FunctionDef)
        if not body and isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{name}.{node.name}".strip(".")
        for field, part in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list") or isinstance(node, ast.ClassDef):
                for child in part if isinstance(part, list) else [part]:
                    if isinstance(child, ast.AST) and not isinstance(child, LEFT_ALONE):
                        yield from walk(child, name, inner and not isinstance(child, ast.arguments))

    for name, what, node, new in walk(ast.parse(source), "", False):
        yield Mutant(name, what, node.lineno, *span(node), new.decode())


def all_mutants():
    """By the JSON text of a list: file, function, kind, lines before, lines after, and which of these it is."""
    every = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / "scratchformer" / room).glob("*.py")):
        seen = {source := path.read_text("utf-8")}
        of_functions = [m for name, _ in functions(ast.parse(source)) for m in mutants(source, name)]
        for mutant in [*of_functions, *more_mutants(source)]:
            if (planted := mutant.plant(source)) not in seen:
                seen.add(planted)
                lines = map("\n".join, mutant.difference(source))
                key = [str(path.relative_to(ROOT)), mutant.function, mutant.what, *lines]
                number = next(n for n in range(99) if json.dumps([*key, n]) not in every)
                every[json.dumps([*key, number])] = mutant
    return every


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
    """The tests that run the lines of a mutant, the fast ones and one of each test function first; those that were added
    come before them if their file is named after the module, else after them.
    """
    end = mutant.line + (ROOT / file).read_bytes()[mutant.start : mutant.end].count(b"\n")
    of_file, known = lines["tests"].get(file, {}), lines["seconds"].keys() & listed
    tests = {test for line in range(mutant.line, end + 1) for test in of_file.get(str(line), ())}
    tests = tests & known or {test for each in of_file.values() for test in each} & known
    cost, groups = {}, collections.Counter()
    for test in sorted(tests, key=lambda test: lines["seconds"][test]):
        groups[function := test.partition("[")[0]] += 1
        cost[test] = lines["seconds"][test] * groups[function]
    new = [test for test in listed if test not in known]
    chosen, spent = [test for test in new if f"/test_{Path(file).stem}.py" in test], 0.0
    for test in sorted(tests, key=cost.__getitem__):
        if (spent := spent + lines["seconds"][test]) > seconds:
            break
        chosen.append(test)
    return list(dict.fromkeys(chosen + new)), spent


def plant_all(folder, again, also, seconds, processes):
    path, every = folder / "results.jsonl", all_mutants()
    lines = json.loads((folder / "lines.json").read_text())
    if not (drawn := folder / "sample.json").exists():
        drawn.write_text(json.dumps([json.loads(key) for key in random.Random(SEED).sample(list(every), COUNT)]))
    dead = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
    sample = map(json.dumps, json.loads(drawn.read_text()))
    left = [text for text in sample if (dead.get(text) == "" if again else text not in dead)]
    command = [sys.executable, "-m", "pytest", "--collect-only", *TESTS, *also]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    listed = dict.fromkeys(line for line in output.splitlines() if "::" in line)
    runners: queue.SimpleQueue[tuple[Runner, Runner]] = queue.SimpleQueue()

    def run(text):
        file = json.loads(text)[0]
        if (mutant := every.get(text)) is None:
            return "no longer in the code"
        code, pair = mutant.plant((ROOT / file).read_text("utf-8")), runners.get()
        tests, spent = choose(mutant, file, lines, listed, seconds)
        try:
            answer, limit = Answer(0, True, "", ""), 20 * spent + 200
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
