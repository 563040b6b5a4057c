"""The observations that every world can make: operations of each rank, their source lines, and whether they match."""

from pdlcheck.operations.gloo import refuse_future, validate_for_gloo
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.signature import Signature
from pdlcheck.operations.validation import refuse
from pdlcheck.worlds.observe.callsite import (
    calls_tests,
    declare_wrappers,
    end_at_user_line,
    short,
    user_call,
    user_line,
)
from pdlcheck.worlds.observe.comm_debug_mode import uncounted
from pdlcheck.worlds.observe.deadlock import deadlock
from pdlcheck.worlds.observe.default_group import agree_on_number, among_all, members_of_default
from pdlcheck.worlds.observe.differences import Callers, key_among
from pdlcheck.worlds.observe.group import Engine, WatchedGroup
from pdlcheck.worlds.observe.init_arguments import rank_by_rendezvous, require_known, require_valid
from pdlcheck.worlds.observe.matcher import Match, Matcher
from pdlcheck.worlds.observe.new_group import is_local, new_group
from pdlcheck.worlds.observe.traffic import Count, Traffic
from pdlcheck.worlds.observe.work import FROM_CALLBACK, WatchedWork, is_limit

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
    "refuse_future",
    "require_known",
    "require_valid",
    "short",
    "uncounted",
    "user_call",
    "user_line",
    "validate_for_gloo",
]
