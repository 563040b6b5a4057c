"""All times that worlds and the harness wait for something: each with its seconds and its purpose.

There are three kinds. A **pause** is the time between two looks; it changes how fast something is seen, and never what
is seen. A **limit** ends something that will most probably never happen: it is generous, since a machine may be loaded.
**Own seconds** are those of a rank: its clock stands still while the rank waits for a core, see ``own_time.py``. What a
report contains depends on own seconds and on the rank's answers, never on a few wall-clock seconds.

Two programs that need only the standard library keep their own: ``mpi/seat.py`` and ``mpi/supervisor.py``.
"""

from __future__ import annotations

__all__ = [
    "ANSWER_PAUSE_S",
    "ANSWER_S",
    "ATEXIT_S",
    "BUSY_S",
    "CAUSE_LIMIT_S",
    "CAUSE_S",
    "DEBUGGER_S",
    "DESCENDANTS_S",
    "DRAIN_S",
    "GOODBYE_S",
    "GRANT_S",
    "HELLO_S",
    "HESITATION_S",
    "INTERRUPT_S",
    "JOIN_GROUP_S",
    "JOIN_NOTICE_S",
    "LAUNCHED_ANSWER_S",
    "LAUNCHED_INTERRUPT_S",
    "LAUNCHED_JOIN_S",
    "LEAST_LIMIT_S",
    "LEAVES_S",
    "LEAVE_S",
    "LIMIT_S",
    "LIVE_OUTPUT_S",
    "LONGEST_PAUSE_S",
    "LONG_NAP_S",
    "LOOK_S",
    "MEETING_NOTICE_S",
    "MEETING_S",
    "MPIEXEC_END_S",
    "MPIEXEC_START_S",
    "MPI_ERRORS_S",
    "MPI_FUTURE_S",
    "MPI_IDLE_S",
    "MPI_NAP_S",
    "MPI_SPIN_S",
    "NAP_S",
    "NOTICE_PAUSE_S",
    "OUTPUT_BOUND_S",
    "PATIENCE_S",
    "POLLS_S",
    "RAY_ROOM_S",
    "REMINDER_S",
    "REMOTE_END_S",
    "REMOTE_JOIN_S",
    "REMOTE_LOOK_S",
    "REPORTS_S",
    "SERVER_ANSWER_S",
    "SERVER_LOOK_S",
    "SERVER_STOP_S",
    "SILENT_S",
    "SIMULATED_INTERRUPT_S",
    "SLEEPERS_S",
    "STACKS_S",
    "STILL_S",
    "TIMED_LIMIT_S",
    "TIMEOUT_MARGIN_S",
    "UNDER_WAY_S",
    "WATCHED_STILL_S",
]

# -- after a failure: what the other ranks still report --------------------------------------------

# Pause between two answers of a rank that was told to stop: it may still end the call by itself.
ANSWER_PAUSE_S = 0.02
# Own seconds without such an answer: native code keeps Python from running.
SILENT_S = 2.0
# Own seconds, and as many answers, of a rank that still runs its function: it may be about to reach the operation that
# raises the verdict.
BUSY_S = 0.25
# The same of a rank that leaves its function by an error: ``finally`` blocks may have work to do.
LEAVES_S = 2.0
# The same at one instruction of a communication call: the rank is blocked in it.
STILL_S = 0.02
# The same where operations are watched: a watched wait ends by itself, so only the real group can block.
WATCHED_STILL_S = 0.1
# Own seconds, after ranks mismatch, for the other ranks to post what they post; the verdict names it.
HESITATION_S = 1.0
# Limit for the reports of all other ranks, even if the first failure comes just before the limit of the call. Only a
# rank that reports for ever reaches it.
REPORTS_S = 60.0
# Own seconds of a rank to answer where it is.
STACKS_S = 0.5
# Limit for these answers after Ctrl-C: a person waits. Ranks that can answer do so in STACKS_S.
INTERRUPT_S = 2.0
# Margin of pytest-timeout's own timer behind the limit of the ranks, which report more.
TIMEOUT_MARGIN_S = 10.0

# -- a call ----------------------------------------------------------------------------------------

# Limit for one call on simulated ranks, the same as on processes.
LIMIT_S = 60.0
# Limit for a call whose ranks are timed.
TIMED_LIMIT_S = 600.0
# Least limit that is left for a call, however late it begins.
LEAST_LIMIT_S = 0.1
# Limit for a call with a debugger: ten days.
DEBUGGER_S = 10 * 24 * 3600.0
# Limit for data of an operation that no rank has waited for.
UNDER_WAY_S = 30.0

# -- the agreement on watched operations -----------------------------------------------------------

# Patience of a rank before it asks the controller: most ranks arrive sooner.
PATIENCE_S = 0.02
# Patience for a grant that is on its way.
GRANT_S = 0.001
# Longest pause between two looks after the controller was asked.
LONGEST_PAUSE_S = 0.05
# First pause between two looks at the board; sched_yield would take more of the core from gloo's threads.
NAP_S = 0.00002
# Longest of these pauses.
LONG_NAP_S = 0.0005
# Pause until an operation is reminded that C++ code may wait for; by then, most are launched on all ranks.
REMINDER_S = 0.05

# -- processes that start and end ------------------------------------------------------------------

# Limit for a new rank to join the default group: the first import of torch may take long on a slow disk.
JOIN_GROUP_S = 120.0
# Own seconds of an idle rank, or of a template, to end by itself.
LEAVE_S = 1.5
# Own seconds of an idle rank to answer that it is there.
ANSWER_S = 2.0
# Own seconds of a process that closed its pipe, to end.
DRAIN_S = 2.0
# Own seconds for the functions that were registered with atexit.
ATEXIT_S = 1.0
# Limit for the end of templates, and of the descendants of ranks.
DESCENDANTS_S = 5.0
# Limit for the fork server to end after each signal.
SERVER_STOP_S = 0.5
# Limit for the fork server to fork: it may have to import much from a slow disk before.
SERVER_ANSWER_S = 120.0
# Pause between two looks whether the fork server lives.
SERVER_LOOK_S = 0.5
# Pause between two looks at processes that are about to end or to answer.
LOOK_S = 0.1
# Pause between two reads of the ranks' output, if it is shown live.
LIVE_OUTPUT_S = 0.05
# Pause between two bounds of the memory that a rank's output takes.
OUTPUT_BOUND_S = 0.1

# -- launched ranks --------------------------------------------------------------------------------

# Limit for rank 0 to listen: it may import much before.
MEETING_S = 300.0
# Pause until a rank reports that it waits for rank 0, which may collect many tests before it listens.
MEETING_NOTICE_S = 15.0
# Limit for all launched ranks to join.
LAUNCHED_JOIN_S = 300.0
# Pause until rank 0 reports that it waits for other ranks.
JOIN_NOTICE_S = 5.0
# Longest pause between two such reports.
NOTICE_PAUSE_S = 60.0
# Limit for an agent to answer.
LAUNCHED_ANSWER_S = 10.0
# Limit for a new connection to prove that it knows the key.
HELLO_S = 20.0
# Limit for the controller to close the connection of an agent that has ended.
GOODBYE_S = 60.0
# Limit for an agent to end after an interrupt.
LAUNCHED_INTERRUPT_S = 5.0

# -- remote ranks ----------------------------------------------------------------------------------

# Limit for the processes of a remote world to reach the controller: a cluster may have to start a machine.
REMOTE_JOIN_S = 120.0
# Limit for such processes to end after they were killed.
REMOTE_END_S = 5.0
# Pause between two looks whether such a process still runs.
REMOTE_LOOK_S = 0.2
# Limit for a Ray cluster to find room for the ranks: it may start a machine.
RAY_ROOM_S = 30.0

# -- MPI -------------------------------------------------------------------------------------------

# Limit for mpiexec to start its ranks.
MPIEXEC_START_S = 30.0
# Limit for mpiexec to end.
MPIEXEC_END_S = 5.0
# Limit for all ranks to end by their own errors: each one prints its error and keeps its exit code.
MPI_ERRORS_S = 2.0
# Time in which a waiting rank only yields its core; most operations complete in it.
MPI_SPIN_S = 0.001
# Pause between two looks of a waiting rank after that.
MPI_NAP_S = 0.0001
# Pause of the thread for operations without a waiting rank.
MPI_IDLE_S = 0.002
# The same if a future exists, for which a rank may wait.
MPI_FUTURE_S = 0.0002

# -- simulated ranks -------------------------------------------------------------------------------

# Limit for ranks to end after an interrupt.
SIMULATED_INTERRUPT_S = 0.5
# Limit for ranks that sleep after another rank has failed.
SLEEPERS_S = 5.0
# Limit for ranks that sleep between polls, because they may wait for something outside the run.
POLLS_S = 60
# Seconds of this process on a core, for the trials that find the globals to blame.
CAUSE_S = 20.0
# Limit for these trials, if they sleep.
CAUSE_LIMIT_S = 120.0
