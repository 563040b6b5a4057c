"""Short names of the plugin's options: ``--world`` for ``--pdl-world``, unless another plugin or a conftest has it.

pytest refuses a name that two plugins add. Therefore the parser never receives our short names: they are replaced in
the arguments, after all others have added their names. Does not import torch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Sequence

import pytest

from pdlcheck.compat.pytest.config import parser_of
from pdlcheck.harness.collection.options import SHORT_NAMES

__all__ = ["expanded", "name_of", "replace_short_names"]


def replace_short_names(
    config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Wrap the loading of the first conftest files: replace our short names in ``args``, in place, when it is done.

    Conftest files may add options of these names, and then get them. Other plugins read the original ``args`` before.
    """
    if free := _free(parser, args):
        _read_again(config, parser, expanded(args, free))
    result = yield
    args[:] = expanded(args, _free(parser, args))
    return result


def expanded(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the arguments with the full names of these options.

    Example:
        >>> expanded(["--world=gloo", "-k", "sum", "--isolation", "fresh"], {"--world"})
        ['--pdl-world=gloo', '-k', 'sum', '--isolation', 'fresh']
    """
    end = args.index("--") if "--" in args else len(args)
    return [_full(argument, names) for argument in args[:end]] + list(args[end:])


def name_of(config: pytest.Config, full: str) -> str:
    """Return the name of an option for messages: the short one if it works."""
    short = next((name for name, its in SHORT_NAMES.items() if its == full), full)
    return full if short == full or _is_taken(parser_of(config), short) else short


def _full(argument: str, names: Collection[str]) -> str:
    name, equals, value = argument.partition("=")
    return f"{SHORT_NAMES[name]}{equals}{value}" if name in names else argument


def _free(parser: pytest.Parser, args: Sequence[str]) -> set[str]:
    """Return our short names among these arguments, without those of another plugin."""
    used = {argument.partition("=")[0] for argument in args} & SHORT_NAMES.keys()
    return {name for name in used if not _is_taken(parser, name)}


def _is_taken(parser: pytest.Parser, name: str) -> bool:
    """Return whether this is the option of another plugin; the parser returns a flag without one as unknown."""
    try:
        _, unknown = parser.parse_known_and_unknown_args([f"{name}=1"])
    except pytest.UsageError:  # the option exists, and does not take this value
        return True
    return not unknown


def _read_again(config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Read again the options that pytest needs to load conftest files.

    The first reading took the value of ``--world gloo`` for a path.
    """
    try:
        read = parser.parse_known_args(args, namespace=copy.copy(config.option))
    except pytest.UsageError:  # the value may be valid for a conftest's option; otherwise pytest reports it later
        return
    for name in ("file_or_dir", *(full.lstrip("-").replace("-", "_") for full in SHORT_NAMES.values())):
        setattr(config.known_args_namespace, name, getattr(read, name))
