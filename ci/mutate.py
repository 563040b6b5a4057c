"""Break a module in one place at a time: its tests must fail. Exit code 1 if a mutant survives that is not listed.

    python ci/mutate.py                               # the modules whose survivors are listed
    python ci/mutate.py pdlcheck/primitives/comm.py   # these modules
    python ci/mutate.py --since main                  # those that changed since a commit, or whose tests did
    python ci/mutate.py --sample 40 --seed 7          # some of the mutants

ci/mutation/modules.toml names the tests of each module. ci/mutation/survivors.txt lists the mutants that no test
detects, with reasons. cosmic-ray makes the mutants; some more drop a call or an argument. The tests run on a copy of
the project, in forks of one process that has imported torch.
"""

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy  # noqa: F401 - imported once, not in each fork
import pytest
import torch.distributed  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="FILE", help="a module that ci/mutation/modules.toml names")
    parser.add_argument("--since", metavar="COMMIT", help="only modules that changed since it, or whose tests did")
    parser.add_argument("--sample", type=int, metavar="N", help="this number of mutants, drawn from all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: %(default)s")
    options = parser.parse_args()
    tables = tomllib.loads((ROOT / "ci/mutation/modules.toml").read_text())
    operators = [get_operator(name)() for name in operator_names() if name.removeprefix("core/") in tables["operators"]]
    tests = {name: shlex.split(words) for name, words in (tables["listed"] | tables["not_run_yet"]).items()}
    chosen = options.modules or list(tables["listed"])
    if options.since:
        chosen = [name for name in chosen if differs([name, *tests[name]], options.since)]
    work = [(name, *found) for name in chosen for found in mutants((ROOT / name).read_text(), operators)]
    if options.sample is not None:
        work = random.Random(options.seed).sample(work, min(options.sample, len(work)))
    listed, survive, detected = survivors(), [], 0
    for number, (block, code, seconds) in enumerate(outcomes(work, tests), 1):
        verdict = "found" if code else listed.get(block, "SURVIVES")
        print(f"[{number}/{len(work)}] {seconds:.1f} s, {verdict}\n{block}", flush=True)
        detected += bool(code)
        survive += [] if code else [block]
    unlisted = [block for block in survive if block not in listed]
    print(f"{detected} found, {len(survive)} survive, {len(unlisted)} of them are not listed")
    print(*(f"\n{block}\ngap: " for block in unlisted), sep="\n")
    gone = [block for block in listed if block.split()[0] in chosen and block not in survive and options.sample is None]
    print(*(f"\nremove, it is found:\n{block}" for block in gone), sep="\n")
    return bool(unlisted)


def outcomes(work: list[Any], tests: dict[str, list[str]]) -> Iterator[tuple[str, int, float]]:
    """Run the tests on each mutant; yield what it changes, the exit code and the seconds."""
    limits_s: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="pdlcheck-mutants-") as folder:
        copy = shutil.copytree(ROOT, Path(folder) / "copy", ignore=shutil.ignore_patterns(".*"))
        for name, line, make in work:
            text, broken = (ROOT / name).read_text(), make()
            if means_the_same(text, broken):
                continue
            if name not in limits_s:
                start = time.perf_counter()
                if code := exit_code(copy, tests[name], limit_s=900):
                    sys.exit(f"exit code {code} without a mutant: pytest {shlex.join(tests[name])}")
                limits_s[name] = 10 + 5 * int(time.perf_counter() - start)
            (copy / name).write_text(broken)
            start, code = time.perf_counter(), exit_code(copy, tests[name], limits_s[name], broken=True)
            shutil.copy2(ROOT / name, copy / name)
            block = f"{name} {scope(text, line)}\n- {changed(text, broken)}\n+ {changed(broken, text)}"
            yield block, code, time.perf_counter() - start


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


def means_the_same(text: str, broken: str) -> bool:
    """Return whether only annotations differ, or ``broken`` is no Python."""
    try:
        trees = ast.parse(text), ast.parse(broken)
    except SyntaxError:
        return True
    for node in (node for tree in trees for node in ast.walk(tree)):
        node.annotation = node.returns = None
    return ast.dump(trees[0]) == ast.dump(trees[1])


def changed(text: str, other: str) -> str:
    """Return the lines of ``text`` that differ from those of ``other``, in one line."""
    differences = difflib.ndiff(other.splitlines(), text.splitlines(), charjunk=None)
    return " ".join(word for line in differences if line.startswith("+ ") for word in line[2:].split())


def scope(text: str, line: int) -> str:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ".".join(node.name for node in nodes if node.lineno <= line <= node.end_lineno) or "module"


def exit_code(copy: Path, tests: list[str], limit_s: int, *, broken: bool = False) -> int:
    """Return the exit code of the tests, negative after a signal."""
    process = os.fork()
    if not process:
        os.setsid()
        signal.alarm(limit_s)
        os.chdir(copy)
        sys.path[0], sys.dont_write_bytecode = str(copy), broken
        numba = copy / f"numba-{time.time()}" if broken else copy / "numba"  # its cache does not see inlined functions
        os.environ |= {"CI": "1", "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(numba)}
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if broken else ""
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        loaded = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis is
        with contextlib.suppress(BaseException):
            os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", "-W", loaded, "--world", "sim", *tests]))
        os._exit(3)
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    finally:
        os.killpg(process, signal.SIGKILL)  # also what the tests left running
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
