"""The pytest session of a rank process: created on first use, it collects a file when an item of that file arrives.

The controller sends the phases of an item one by one (``setup``, ``call``, ``teardown``). A failure is returned as the
exception itself. The report that pytest makes of it here, where the source and the values are, is sent as a note, and
so are the output and records of the session's plugins; see ``hooks.py`` in this folder.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import pytest
import torch.distributed as dist

from pdlcheck.compat.pytest.config import (
    ConftestImportFailure,
    configure,
    prepare,
    set_basetemp,
    set_filter_lines,
    tmp_path_factory,
)
from pdlcheck.compat.pytest.fixtures import argument_names
from pdlcheck.compat.pytest.items import (
    begin_request,
    catch_warnings_for_item,
    drop_request,
    has_request,
    results_key,
    set_up_state,
)
from pdlcheck.compat.pytest.reports import TracebackEntry, filter_traceback, saferepr
from pdlcheck.errors import PdlcheckError
from pdlcheck.harness.collection.cases import IN_RANK
from pdlcheck.harness.conftest_hooks import of_conftest_files
from pdlcheck.harness.fastpath.single_message import only_own_teardown
from pdlcheck.harness.fastpath.skip_report import needs_report, note_passed
from pdlcheck.harness.rank_context import RankContext, set_rank_context
from pdlcheck.harness.reporting.rank_reports import as_sent, text_as_sent
from pdlcheck.harness.running.cancelled_fixtures import finish_stopped_fixtures, note_stop
from pdlcheck.harness.running.examples import is_property
from pdlcheck.harness.running.folders import SEEN_FROM, SHARED
from pdlcheck.item_runners.processes.rank import coverage as rank_coverage
from pdlcheck.item_runners.processes.rank import debugger as rank_debugger
from pdlcheck.item_runners.processes.rank.asserts import explain_for
from pdlcheck.item_runners.processes.rank.cache import write_whole_values
from pdlcheck.item_runners.processes.rank.hooks import (
    RankHooks,
    journal_log,
    note_additions,
    note_for_xml,
    note_shown_fixtures,
)
from pdlcheck.item_runners.processes.rank.session_description import SessionDescription
from pdlcheck.item_runners.processes.rank.settings import RankSettings
from pdlcheck.item_runners.processes.rank.terminal import silent_reporter
from pdlcheck.worlds.cuda_as_cpu.hint import hint_about_cuda, note_once
from pdlcheck.worlds.exceptions import shorten
from pdlcheck.worlds.import_streams import drawn_by
from pdlcheck.worlds.journal import note
from pdlcheck.worlds.observe import end_at_user_line
from pdlcheck.worlds.outcome import without_addresses
from pdlcheck.worlds.processes.rank import import_time_rng
from pdlcheck.worlds.processes.rank.cuda_on_cpu import runs_cuda_on_cpu
from pdlcheck.worlds.processes.rank.ending import note_report
from pdlcheck.worlds.processes.rank.own_device import own_device
from pdlcheck.worlds.processes.rank.own_rank import own_rank, own_world_size, users_code
from pdlcheck.worlds.standard_streams import flush_streams

__all__ = ["KEEP", "call", "collect", "finish", "parameters", "run", "setup", "teardown"]

# These plugins repeat a failed test, which each rank cannot do by itself.
_REPEATS = ("pytest-retry", "pytest_retry.retry_plugin")
KEEP = "keep"  # passed instead of the next item if it is not known
_SHOWN = 120  # the greatest number of characters shown of a parameter
_CONFTEST_FILES = "conftest.py"  # all conftest files draw from one random stream
_SHOWN_IN_IDS = (bool, bytes, complex, float, int, str, type(None))


class _RankSession:
    """One pytest configuration and session, with its items by node id."""

    def __init__(self, description: SessionDescription) -> None:
        os.environ.pop("PYTEST_ADDOPTS", None)
        self._python_filters = list(warnings.filters)
        with _quiet():
            with chdir(description.directory):  # the arguments are relative to this directory
                self.config = config = prepare(list(description.arguments))
            config.stash[IN_RANK] = True
            if description.seen_from is not None:
                config.stash[SEEN_FROM] = Path(description.seen_from)
            for name, value in description.options:
                with suppress(Exception):  # the rank's own parser has a default, as for values that cannot be pickled
                    setattr(config.option, name, pickle.loads(value))
            if isinstance(getattr(config.option, "randomly_seed", None), int):
                # Each rank has its own random streams, with pytest-randomly too.
                config.option.randomly_seed += own_rank()
            with silent_reporter(config):
                configure(config)
            for name in _REPEATS:  # keep their marks and options; only the controller runs their hooks
                config.pluginmanager.unregister(name=name)
            write_whole_values(config)
            of_ini_file, config.known_args_namespace.pythonwarnings = description.filters
            set_filter_lines(config, of_ini_file)
            _set_basetemp(config, Path(description.basetemp), f"{description.world}-{own_world_size()}")
            rank_debugger.take_breakpoints()  # pytest's own debugger has just replaced the breakpoint hook
            self._log = journal_log(config, records=description.log_records)
            if description.xml:
                note_for_xml(config)
            note_shown_fixtures(config)
            self.hooks = RankHooks(config, description.outside)
            config.pluginmanager.register(self.hooks, "pdlcheck-rank")
            self.settings = RankSettings()
            config.pluginmanager.register(self.settings, "pdlcheck-rank-settings")
            self.session = pytest.Session.from_config(config)
            self.session.exitstatus = pytest.ExitCode.OK
            config.hook.pytest_sessionstart(session=self.session)
        self.explains = config.pluginmanager.hasplugin("assertion")
        self.items: dict[str, pytest.Function] = {}
        self.drawn: dict[str, tuple[str, ...]] = {}  # the streams from which each file drew when it was imported
        self.around = ExitStack()  # is open from an item's set-up to its teardown

    def item(self, path: str, nodeid: str) -> pytest.Function:
        self.settings.put_back()
        if nodeid not in self.items:
            self.session.testsfailed = 0
            self.hooks.not_collected.clear()
            self.hooks.skipped.clear()
            self.hooks.collected.clear()
            with _quiet(), import_time_rng.streams_of(path):
                try:
                    self.session.perform_collect([path])
                except pytest.UsageError as error:  # a conftest file failed; its own report is used if there is one
                    self.hooks.not_collected[:] = self.hooks.not_collected or [str(error)]
                for item in self.hooks.collected:
                    if isinstance(item, pytest.Function):
                        self.items[item.nodeid] = item
            self.drawn.setdefault(path, drawn_by(path))  # a second collection imports nothing
            self.settings.hold()
        if nodeid not in self.items:
            if self.hooks.skipped and not self.hooks.not_collected:  # the file was skipped on this rank
                raise pytest.skip.Exception("; ".join(self.hooks.skipped))
            raise _not_found(path, nodeid, self.hooks.not_collected, self.drawn[path], self._instead(nodeid))
        return self.items[nodeid]

    def _instead(self, nodeid: str) -> str:
        """Return the first item of the same function that was collected; empty if there is none."""
        function = nodeid.partition("[")[0]
        return next((one for one in self.items if one.partition("[")[0] == function), "")

    @contextmanager
    def warnings_of(self, item: pytest.Item) -> Iterator[None]:
        """Record warnings as pytest does, with its filters on top of Python's own, not of those of the quiet start."""
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(self._python_filters)  # type: ignore[attr-defined]  # in fact a list
            with catch_warnings_for_item(config=item.config, ihook=item.ihook, when="runtest", item=item):
                yield

    @contextmanager
    def one_look_at_loggers(self) -> Iterator[None]:
        """Search the loggers only once in the block, while phases run in a row and no user code runs between them."""
        if self._log is None:
            yield
            return
        self._log.once = True
        try:
            yield
        finally:
            self._log.once = False


def _not_found(path: str, nodeid: str, not_collected: Sequence[str], drawn: Sequence[str], instead: str) -> LookupError:
    """Return the error of an item that the rank did not find; it shows no frames, because none are the user's.

    Args:
        path: the file.
        nodeid: the item.
        not_collected: the reports of what could not be collected.
        drawn: the streams from which the file drew numbers when it was imported.
        instead: an item of the same function that the rank found; empty if there is none.
    """
    what = f"a rank collected {path} and found no {nodeid}{f', but {instead}' if instead else ''}"
    if not not_collected and drawn:
        what += (
            f"; the file draws from {' and '.join(drawn)} when it is imported, which each process does for itself: "
            "seed first, or give ids to the parameters"
        )
    elif not not_collected:
        what += (
            "; test names and ids must be the same in every process, and times, uuids, addresses and orders of sets "
            "are not: give ids to the parameters"
        )
    said = [line for text in not_collected for line in text.splitlines() if line.startswith("E ")]
    message = said[-1].removeprefix("E").strip() if said else what
    note("failure", text_as_sent("\n".join([*not_collected, f"E   LookupError: {what}"]), message))
    return LookupError("\n".join([what, *not_collected]))


def _not_loaded(failure: ConftestImportFailure) -> LookupError:
    """Return the error of a conftest file with the traceback that pytest prints for one."""
    info = pytest.ExceptionInfo.from_exception(failure.cause)
    info.traceback = info.traceback.filter(_is_of_the_user)
    shown = str(info.getrepr(style="short", chain=False)) if info.traceback else info.exconly()
    what = f"a rank could not load {failure.path}"
    note("failure", text_as_sent(f"{shown}\nE   LookupError: {what}", info.exconly()))
    return LookupError(f"{what}\n{shown}")


def _is_of_the_user(entry: TracebackEntry) -> bool:
    return filter_traceback(entry) and "importlib" not in Path(entry.path).parts


_session: _RankSession | None = None


def collect(description: SessionDescription, path: str, nodeid: str) -> dict[str, dict[str, str]]:
    """Create the session of this rank if necessary, and collect the file of an item; return its :func:`parameters`."""
    global _session
    if _session is None:
        with import_time_rng.streams_of(_CONFTEST_FILES):
            try:
                _session = _RankSession(description)
            except ConftestImportFailure as failure:
                raise _not_loaded(failure) from None
    _session.item(path, nodeid)
    return parameters(path)


def parameters(path: str) -> dict[str, dict[str, str]]:
    """Return, by node id, the parameters of a file's items in this rank as text, without those that test ids show."""
    assert _session is not None
    items = [item for item in _session.items.values() if str(item.path) == path and hasattr(item, "callspec")]
    return {
        item.nodeid: {
            name: without_addresses(saferepr(value, maxsize=_SHOWN))
            for name, value in item.callspec.params.items()
            if not isinstance(value, _SHOWN_IN_IDS)
        }
        for item in items
    }


def setup(path: str, nodeid: str, shared: str) -> None:
    """Set up the fixtures of an item in this rank."""
    assert _session is not None
    item = _session.item(path, nodeid)
    item.stash[SHARED] = Path(shared)
    set_rank_context(RankContext(own_rank(), own_world_size(), own_device(), dist.group.WORLD))
    rank_coverage.save()  # save what ran since the last test
    _session.around.close()
    _session.around.enter_context(_session.warnings_of(item))
    if _session.explains:
        explain_for(item)
    set_up_state(_session.session).teardown_exact(item)  # tear down what an earlier item needed and this one does not
    if not has_request(item):
        begin_request(item)
    _phase(item, "setup", partial(item.ihook.pytest_runtest_setup, item=item))


def run(path: str, nodeid: str, shared: str, following: tuple[str, str] | Literal["keep"] | None) -> bool:
    """Set up an item, run its body and, if the body returned, tear the item down: all phases with one message.

    Return False if the teardown is left to :func:`teardown`, because it also ends fixtures that an earlier item has set
    up.
    """
    assert _session is not None
    with _session.one_look_at_loggers():
        setup(path, nodeid, shared)
        call(nodeid)
        item = _session.items[nodeid]
        nextitem = None if following is None else _Next(item, following)
        if not only_own_teardown(item, nextitem):  # type: ignore[arg-type]
            return False
        _tear_down(item, nextitem)
        return True


def call(nodeid: str, /, **drawn: Any) -> None:
    """Run the item's body in this rank; ``drawn`` are the arguments of one example of a property."""
    assert _session is not None
    item = _session.items[nodeid]
    if not is_property(item):
        _phase(item, "call", partial(item.ihook.pytest_runtest_call, item=item))
        return
    from pdlcheck.harness.reporting.hypothesis_notes import hear

    body = item.obj.hypothesis.inner_test
    instance = getattr(item.obj, "__self__", None)
    fixtures = {name: item.funcargs[name] for name in argument_names(item)}
    with hear(partial(note, "example")):
        _phase(item, "call", lambda: body(*([] if instance is None else [instance]), **fixtures, **drawn))


def teardown(nodeid: str, following: tuple[str, str] | Literal["keep"] | None, failed: bool) -> None:
    """Tear down the item's own fixtures, and those of wider scope that the next item does not need.

    Args:
        nodeid: node id of the item.
        following: path and node id of the next item that runs on these ranks; None if there is none.
        failed: whether the test failed, perhaps on another rank; then its temporary folders are kept.
    """
    item = _session.items.get(nodeid) if _session is not None else None
    if _session is None or item is None:  # the set-up failed before the item was collected
        return
    if not has_request(item):  # the item has already ended on this rank, while another rank failed
        return
    if failed and results_key in item.stash:
        item.stash[results_key]["call"] = False
    _tear_down(item, None if following is None else _Next(item, following))


def _tear_down(item: pytest.Function, nextitem: _Next | None) -> None:
    assert _session is not None
    try:
        _phase(item, "teardown", partial(_finish_fixtures, item, nextitem))
    finally:
        _session.settings.after_teardown()
        _session.around.close()
        explain_for(None)
        drop_request(item)
        set_rank_context(None)
        rank_coverage.save()


def _finish_fixtures(item: pytest.Function, nextitem: _Next | None) -> None:
    __tracebackhide__ = True
    with ExitStack() as stack:
        stack.callback(finish_stopped_fixtures, item)
        item.ihook.pytest_runtest_teardown(item=item, nextitem=nextitem)


def finish(exitstatus: int) -> None:
    """Tear down what is still set up, and run the session-end hooks of the user's conftest files.

    The other end-of-session work of pytest and its plugins belongs to the controller, or ends with the process.
    """
    global _session
    if _session is None:
        return
    ending, _session = _session, None
    ending.session.exitstatus = exitstatus if exitstatus > max(pytest.ExitCode) else pytest.ExitCode(exitstatus)
    config, session = ending.config, ending.session
    with ExitStack() as stack:
        stack.callback(of_conftest_files(config, "pytest_unconfigure"), config=config)
        session_finish = of_conftest_files(config, "pytest_sessionfinish")
        stack.callback(session_finish, session=session, exitstatus=session.exitstatus)
        set_up_state(ending.session).teardown_exact(None)


class _Next:
    """A stand-in for the next item: pytest only reads the collectors that it shares with the current item."""

    def __init__(self, item: pytest.Item, following: tuple[str, str] | str) -> None:
        chain = item.listchain()[:-1]
        if not isinstance(following, str):
            self.nodeid = following[1]
            if _parent(self.nodeid) != _parent(item.nodeid):
                path = Path(following[0])
                chain = [node for node in chain if _holds(node, path, self.nodeid)]
        self._chain = chain

    def listchain(self) -> list[Any]:
        """Return the collectors that both items have in common."""
        return self._chain


def _parent(nodeid: str) -> str:
    return nodeid.partition("[")[0].rpartition("::")[0]


def _holds(node: Any, path: Path, nodeid: str) -> bool:
    if isinstance(node, pytest.Session):
        return True
    if node.path == path:
        return bool(nodeid == node.nodeid or nodeid.startswith(f"{node.nodeid}::"))
    return node.path in path.parents


def _phase(item: pytest.Function, when: Literal["setup", "call", "teardown"], run: Callable[[], object]) -> None:
    """Run one phase as pytest does, with a report that plugins receive; raise its failure."""
    if when == "setup":
        item.stash[_marked] = _xfail_marks(item)
    rank_coverage.switch(f"{item.nodeid}|{'run' if when == 'call' else when}")
    with users_code():
        call = pytest.CallInfo.from_call(run, when=when, reraise=(KeyboardInterrupt, pytest.exit.Exception))
    if call.excinfo is not None:
        shorten(call.excinfo.value)
        note_report()
    if call.excinfo is not None and isinstance(call.excinfo.value, MemoryError):
        traceback.clear_frames(call.excinfo.tb)  # free the memory that the test filled, to have room for the report
    if call.excinfo is not None and isinstance(call.excinfo.value, PdlcheckError):
        note_stop(item, call.excinfo.value)
        end_at_user_line(call.excinfo.value)
    if call.excinfo is not None and (hint := hint_about_cuda(call.excinfo.value, is_on=runs_cuda_on_cpu())):
        note_once(call.excinfo.value, hint)
    if call.excinfo is None and not needs_report(item, when):
        note_passed(item, when)
        note_additions(item)
        return
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    note_additions(item)
    if call.excinfo is None:
        if report.failed and (
            _xfail_marks(item) > item.stash[_marked] or not str(report.longrepr).startswith("[XPASS(strict)]")
        ):
            # This is a plugin's verdict; the controller applies the verdicts of marks.
            note("failure", as_sent(item.config, report, by_hook=True))
            pytest.fail(str(report.longrepr), pytrace=False)
        return
    error = call.excinfo.value
    if not isinstance(error, pytest.skip.Exception) and not report.passed:  # a hook may have made it pass
        note("failure", as_sent(item.config, report))
        if not isinstance(error, pytest.xfail.Exception):
            rank_debugger.post_mortem(item.nodeid, error, str(report.longrepr))
    raise error


_marked = pytest.StashKey[int]()


def _xfail_marks(item: pytest.Item) -> int:
    return sum(1 for _ in item.iter_markers("xfail"))


def _set_basetemp(config: pytest.Config, basetemp: Path, pool: str) -> None:
    """Give this rank its own folder inside of the session's folder.

    A rank that replaces another one reuses its folder.
    """
    own = basetemp / f"{pool}-rank{own_rank()}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    factory = tmp_path_factory(config)
    if factory is not None:
        set_basetemp(factory, own.resolve())


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the output of importing test modules, unless the import fails: the controller has already shown it.

    ``sys.stdout`` stays unchanged, because plugins keep writers to it; only the file descriptors are redirected.
    """
    with TemporaryFile() as out, TemporaryFile() as err:
        files = {1: out, 2: err}
        flush_streams()
        before = {descriptor: os.dup(descriptor) for descriptor in files}
        for descriptor, file in files.items():
            os.dup2(file.fileno(), descriptor)
        dropped = False
        try:
            yield
            dropped = True
        finally:
            flush_streams()
            for descriptor, file in files.items():
                os.dup2(before[descriptor], descriptor)
                os.close(before[descriptor])
                if not dropped:
                    file.seek(0)
                    os.write(descriptor, file.read())
