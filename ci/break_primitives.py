"""Break one line of a primitive at a time; check that a suite fails, and show the failure that a user then reads.

Usage: python ci/break_primitives.py [--only TEXT] [--world sim]

Each mutation in ci/mutations/ names a file, a line in it, the broken line, and the suite that must fail.
The suite runs on a copy of the project; the working tree is not touched. Exit code 1 if a mutation survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutations whose file or line contains this text")
    parser.add_argument("--world", default="sim")
    options = parser.parse_args()
    files = sorted((ROOT / "ci" / "mutations").glob("*.json"))
    mutations = [mutation for file in files for mutation in json.loads(file.read_text())]
    chosen = [m for m in mutations if options.only in m["file"] + m["old"]]
    survived = 0
    for number, mutation in enumerate(chosen, 1):
        found, report = _run(mutation, options.world)
        survived += not found
        verdict = "found" if found else "SURVIVED"
        print(f"[{number}/{len(chosen)}] {verdict}  {mutation['file']}")
        print(f"    - {mutation['old'].strip()}\n    + {mutation['new'].strip()}")
        print("\n".join(f"      {line}" for line in report), flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutations found")
    return 1 if survived else 0


def _run(mutation: dict[str, str], world: str) -> tuple[bool, list[str]]:
    with tempfile.TemporaryDirectory(prefix="pdlcheck-broken-") as folder:
        copy = Path(folder)
        for name in ("benchmarks", "ci", "pdlcheck", "suites", "conftest.py", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        path = copy / mutation["file"]
        text = path.read_text()
        if text.count(mutation["old"]) != 1:
            return False, [f"the line stands {text.count(mutation['old'])} times in the file: update ci/mutations/"]
        path.write_text(text.replace(mutation["old"], mutation["new"]))
        suite, *chosen = mutation["tests"].split()
        suites = sorted(map(str, copy.glob(suite))) or [suite]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--world", world]
        done = subprocess.run(
            [*command, *suites, *chosen],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "CI": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    lines = done.stdout.splitlines()
    told = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    replay = [f"replay          {line}" for line in lines if line.startswith("pytest ")]
    killed = [f"the suite died by signal {-done.returncode}"] if done.returncode < 0 else []  # after a memory error
    return done.returncode == 1 or bool(killed), killed + told[:7] + replay[:1]


if __name__ == "__main__":
    sys.exit(main())
