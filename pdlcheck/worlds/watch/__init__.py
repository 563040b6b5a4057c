"""The observations that every world can make: operations of each rank, their source lines, and whether they match."""

from pdlcheck.worlds.watch.adopted import rank_by_rendezvous, require_known, require_valid
from pdlcheck.worlds.watch.as_gloo import refuse_as_gloo, refuse_future
from pdlcheck.worlds.watch.callsite import calls_tests, declare_wrappers, end_at_user_line, short, user_call, user_line
from pdlcheck.worlds.watch.counted import uncounted
from pdlcheck.worlds.watch.deadlock import deadlock
from pdlcheck.worlds.watch.default_group import agree_on_number, among_all, members_of_default
from pdlcheck.worlds.watch.group import Engine, WatchedGroup
from pdlcheck.worlds.watch.matcher import Match, Matcher
from pdlcheck.worlds.watch.new_group import is_local, new_group
from pdlcheck.worlds.watch.operation import Operation, Part
from pdlcheck.worlds.watch.refused import refuse
from pdlcheck.worlds.watch.signature import Callers, Signature, key_among
from pdlcheck.worlds.watch.traffic import Count, Traffic
from pdlcheck.worlds.watch.work import FROM_CALLBACK, WatchedWork, is_limit

__all__ = [
    "FROM_CALLBACK",
    "Callers",
    "Count",
    "Engine",
    "Match",
    "Matcher",
    "Operation",
    "Part",
    "Signature",
    "Traffic",
    "WatchedGroup",
    "WatchedWork",
    "agree_on_number",
    "among_all",
    "calls_tests",
    "deadlock",
    "declare_wrappers",
    "end_at_user_line",
    "is_limit",
    "is_local",
    "key_among",
    "members_of_default",
    "new_group",
    "rank_by_rendezvous",
    "refuse",
    "refuse_as_gloo",
    "refuse_future",
    "require_known",
    "require_valid",
    "short",
    "uncounted",
    "user_call",
    "user_line",
]
