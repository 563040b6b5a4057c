"""A program as the command line names it: a script or a module, with arguments."""

from __future__ import annotations

import io
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pdlcheck.errors import PdlcheckError

__all__ = ["Program", "ProgramExit", "find_program"]


class ProgramExit(PdlcheckError):
    """A rank whose program ended with an exit code other than 0. Fields: ``rank``, ``code``."""

    rank: int
    code: int


@dataclass(frozen=True)
class Program:
    """A program to run as ``python`` runs it.

    Args:
        target: the path of a script, or the name of a module.
        arguments: the arguments of the program.
        is_module: whether ``target`` names a module, as after ``python -m``.
        path: the absolute path of the script.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    path: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the program as words of a command line."""
        return (*(("-m",) if self.is_module else ()), self.target, *self.arguments)

    def prepare(self) -> None:
        """Set the arguments and the search path of the calling process, or rank, as ``python`` sets them."""
        sys.argv[:] = [self.target, *self.arguments]
        sys.path.insert(0, os.getcwd() if self.is_module else os.path.dirname(self.path))

    def run(self) -> None:
        """Run the program, after :meth:`prepare`. Whatever it raises passes through."""
        self._run("__main__")

    def import_anew(self) -> None:
        """Import the program without running it, as ``multiprocessing`` does in a process that it spawns."""
        module = ModuleType("__mp_main__")
        vars(module).update(self._run("__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module

    def _run(self, name: str) -> dict[str, Any]:
        if self.is_module:
            return runpy.run_module(self.target, run_name=name, alter_sys=True)
        if not os.path.isfile(self.path):
            return runpy.run_path(self.path, run_name=name)  # a folder with a __main__.py
        module = ModuleType(name)
        module.__file__ = self.path
        sys.modules[name] = module
        with io.open_code(self.path) as file:
            code = compile(file.read(), self.path, "exec", dont_inherit=True)
        exec(code, vars(module))
        return vars(module)


def find_program(target: str, arguments: tuple[str, ...], *, is_module: bool) -> Program:
    """Return the program.

    Raises:
        ValueError: there is no such script or module.
    """
    if is_module:
        sys.path.insert(0, os.getcwd())
        try:
            found = find_spec(target)
        except (ImportError, ValueError) as error:
            raise ValueError(f"module {target} cannot be imported: {error}") from None
        finally:
            del sys.path[0]
        if found is None:
            raise ValueError(f"there is no module {target} in {os.getcwd()} or among the installed packages")
    elif not os.path.exists(target):
        cure = "for a module, use -m" if "/" not in target and not target.endswith(".py") else "check the path"
        raise ValueError(f"there is no script {target} in {os.getcwd()}; {cure}")
    return Program(target, arguments, is_module, "" if is_module else os.path.abspath(target))
