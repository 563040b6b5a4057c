"""Break a module in one place at a time: its tests must fail. Exit code 1 if a mutant survives that is not listed.

    python ci/mutate.py                               # the modules whose survivors are listed
    python ci/mutate.py pdlcheck/primitives/comm.py   # these modules
    python ci/mutate.py --since main                  # those that changed since a commit, or whose tests did
    python ci/mutate.py --sample 40 --seed 7          # some of the mutants

ci/mutation/modules.toml names the tests of each module. ci/mutation/survivors.txt lists the mutants that no test
detects, with reasons. cosmic-ray makes the mutants; some more drop a statement, a call, an argument or a condition.
pytest collects the tests once. Each mutant is a fork in which the functions of the module have the mutated code, so
only tests on simulated ranks see it.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
CALLED: set[str] = set()  # functions that the test has called
HANGS_S = 900
NOT_APPLIED = 77  # exit code: no function has other code: an annotation, or a compiled function
hypothesis.settings.register_profile(  # as the profile ci of conftest.py, but a failure need not become small
    "mutant", max_examples=10, deadline=None, derandomize=True, database=None, phases=tuple(hypothesis.Phase)[:3]
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="FILE", help="a module that ci/mutation/modules.toml names")
    parser.add_argument("--since", metavar="COMMIT", help="only modules that changed since it, or whose tests did")
    parser.add_argument("--sample", type=int, metavar="N", help="this number of mutants, drawn from all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: %(default)s")
    options = parser.parse_args()
    tables = tomllib.loads((ROOT / "ci/mutation/modules.toml").read_text())
    operators = [get_operator(name)() for name in operator_names() if name.removeprefix("core/") in tables["operators"]]
    tests = {name: words.split() for name, words in (tables["listed"] | tables["not_run_yet"]).items()}
    chosen = options.modules or list(tables["listed"])
    if options.since:
        chosen = [name for name in chosen if differs([name, *tests[name]], options.since)]
    work = [(name, *found) for name in chosen for found in mutants((ROOT / name).read_text(), operators)]
    if options.sample is not None:
        work = random.Random(options.seed).sample(work, min(options.sample, len(work)))
    runs = Runs(work, tests, survivors())
    os.environ["CI"] = "1"
    flags = ["-sqx", "-pno:cacheprovider", "--world=sim", "--hypothesis-profile=mutant", f"--rootdir={ROOT}"]
    flags.append("-Wignore::pytest.PytestAssertRewriteWarning")  # hypothesis is imported already
    status = pytest.main([*flags, *(str(ROOT / word) for name in chosen for word in tests[name])], plugins=[runs])
    unlisted = [block for block in runs.survive if block not in runs.listed]
    print(*(f"\n{block}\ngap: " for block in unlisted), sep="\n")
    if options.sample is None:
        gone = [block for block in runs.listed if block.split()[0] in chosen and block not in runs.survive]
        print(*(f"\nremove, it is found:\n{block}" for block in gone), sep="\n")
    counts = f"{runs.found} found, {runs.not_applied} not applied, {len(runs.survive)} survive"
    print(f"{counts}, {len(unlisted)} of them not listed")
    return 1 if unlisted else int(status)


class Runs:
    """A plugin of pytest that runs the collected tests once for each mutant, in a fork."""

    def __init__(self, work: list[Any], tests: dict[str, list[str]], listed: dict[str, str]) -> None:
        self.work, self.tests, self.listed = work, tests, listed
        self.found, self.not_applied, self.survive = 0, 0, []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        modules: dict[str, Any] = {}  # of each: itself, its tests, the functions that each calls, seconds on a core
        for number, (name, line, make) in enumerate(self.work, 1):
            text, broken, start = (ROOT / name).read_text(), make(), time.perf_counter()
            if name not in modules:
                module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
                items = [item for item in session.items if item.nodeid.startswith(tuple(self.tests[name]))]
                code, called, seconds = in_fork(items, module, counting(text), HANGS_S)
                if code:
                    pytest.exit(f"exit code {code} without a mutant: {self.tests[name]}", 1)
                modules[name] = module, items, called, seconds
                start = time.perf_counter()
            module, items, called, seconds = modules[name]
            where = scope(text, line)
            able = [item for item in items if where in called[item.nodeid]]
            code, *_ = in_fork(able, module, broken, 5 + 2 * seconds)
            block = f"{name} {where}\n- {changed(text, broken)}\n+ {changed(broken, text)}"
            verdict = {0: self.listed.get(block, "SURVIVES"), NOT_APPLIED: "not applied"}.get(code, "found")
            print(f"[{number}/{len(self.work)}] {time.perf_counter() - start:.1f} s, {verdict}\n{block}", flush=True)
            self.survive += [] if code else [block]
            self.not_applied += verdict == "not applied"
            self.found += verdict == "found"
        return True


def in_fork(items: list[pytest.Item], module: ModuleType, text: str, limit_s: float) -> tuple[int, Any, float]:
    """Run tests where ``module`` has another text. Return the exit code, the functions that each calls, the seconds."""
    with tempfile.TemporaryFile("w+") as answer:
        process, called = os.fork(), {}
        if not process:
            code = 1
            try:
                become(module, text, limit_s)
                for item, following in zip(items, [*items[1:], None], strict=False):
                    CALLED.clear()
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                    called[item.nodeid] = [*CALLED, "module"]
                    if item.session.testsfailed:
                        break
                else:
                    json.dump(called, answer)
                    answer.flush()
                    code = 0
            finally:
                os._exit(code)
        try:
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        finally:
            os.killpg(process, signal.SIGKILL)  # also what the tests left running
        _, status, usage = os.wait4(process, 0)
        answer.seek(0)
        return os.waitstatus_to_exitcode(status), json.loads(answer.read() or "{}"), usage.ru_utime + usage.ru_stime


def become(module: ModuleType, text: str, limit_s: float) -> None:
    """Leave the group and the output of the parent; give the functions of ``module`` the code in ``text``."""
    os.setsid()
    signal.alarm(HANGS_S)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # of a core, for endless loops
    for stream in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    made = {key: value for key, value in vars(module).items() if key.startswith("__")}
    with contextlib.suppress(SyntaxError):
        exec(compile(text, str(module.__file__), "exec", dont_inherit=True), made)
    if not swap(vars(module), made):
        os._exit(NOT_APPLIED)


def counting(text: str) -> str:
    """Return a module whose functions add their names to CALLED."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body[:0] = ast.parse(f"import __main__; __main__.CALLED.add({scope(text, node.lineno)!r})").body
    return ast.unparse(tree)


def swap(kept: Mapping[str, Any], made: Mapping[str, Any]) -> int:
    """Give the functions in ``kept`` the code of those in ``made``; return how many changed."""
    count = 0
    for name, new in made.items():
        old, new = plain(kept.get(name)), plain(new)
        if isinstance(old, type) and isinstance(new, type) and old is not new:
            count += swap(vars(old), vars(new))
        elif isinstance(old, FunctionType) and isinstance(new, FunctionType):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                if getattr(old, part) != getattr(new, part):
                    setattr(old, part, getattr(new, part))
                    count += 1
        elif isinstance(new, int | float | str | tuple) and old != new and isinstance(kept, dict):
            kept[name] = new
            count += 1
    return count


def plain(value: Any) -> Any:
    for kind, part in ((property, "fget"), (cached_property, "func"), (staticmethod | classmethod, "__func__")):
        value = getattr(value, part) if isinstance(value, kind) else value
    return inspect.unwrap(value) if callable(value) else value


def differs(words: list[str], commit: str) -> bool:
    paths = [word.partition("::")[0] for word in words]
    return bool(subprocess.run(["git", "diff", "--quiet", commit, "--", *paths], cwd=ROOT).returncode)


def survivors() -> dict[str, str]:
    """Return the listed survivors: file and function, the line, the mutated line; and why each survives."""
    blocks = (ROOT / "ci/mutation/survivors.txt").read_text().strip().split("\n\n")
    return dict(block.rsplit("\n", 1) for block in blocks if not block.startswith("#"))


def mutants(text: str, operators: list[Any]) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield the line of each mutant and a function that returns its text: those of cosmic-ray, then some of our own."""
    nodes = list(ast_nodes(get_ast(text)))
    for operator in operators:
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        yield from ((line, partial(mutate_code, text, operator, nth)) for nth, ((line, _), _) in enumerate(places))
    data = text.encode()
    begins = [0, *(match.end() for match in re.finditer(b"\n", data))]

    def begin(node: ast.AST) -> int:
        return begins[node.lineno - 1] + node.col_offset

    def end(node: ast.AST) -> int:
        return begins[node.end_lineno - 1] + node.end_col_offset

    def put(new: bytes, start: int, stop: int) -> str:
        return (data[:start] + new + data[stop:]).decode()

    for node in ast.walk(ast.parse(text)):
        parts = []
        match node:
            case ast.Expr(ast.Call(ast.Name())) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
                yield node.lineno, partial(put, b"pass", begin(node), end(node))
            case ast.Call(args=args, keywords=keywords):  # call(x, y=1) -> call(x)
                parts = [*args, *keywords]
                if isinstance(node.func, ast.Attribute):  # x.clone() -> x
                    yield node.end_lineno, partial(put, b"", end(node.func.value), end(node))
            case ast.BoolOp(values=parts):  # x and y -> y, x and y -> x
                yield node.lineno, partial(put, b"", begin(parts[0]), begin(parts[1]))
        for before, part in pairwise(parts):
            if part is parts[-1] or isinstance(node, ast.BoolOp) or isinstance(part, ast.keyword):
                yield part.lineno, partial(put, b"", end(before), end(part))


def changed(text: str, other: str) -> str:
    """Return the lines of ``text`` that differ from those of ``other``, in one line."""
    lines = text.splitlines()
    matches = difflib.SequenceMatcher(None, lines, other.splitlines(), autojunk=False).get_opcodes()
    found = [line for kind, start, stop, *_ in matches if kind != "equal" for line in lines[start:stop]]
    return " ".join(" ".join(found).split())


def scope(text: str, line: int) -> str:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ".".join(node.name for node in nodes if node.lineno <= line <= node.end_lineno) or "module"


if __name__ == "__main__":
    sys.exit(main())
