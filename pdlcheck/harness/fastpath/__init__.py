"""The fast paths: each does the work of pytest's own code in less time, and ``--pdl-plain`` switches all of them off.

=================== ==============================================================================================
``single_message``  all phases of an item on processes share one message to the ranks
``prefetch``        the next item begins on the ranks while the controller still reports the previous one
``skip_report``     a phase that passed in a rank makes no report if no hook would read it
``log_handlers``    pytest's log handlers are attached in one pass over the loggers
=================== ==============================================================================================

Each of them has a condition: where a plugin, a hook or a fixture could see the difference, the plain way is taken.
"""
