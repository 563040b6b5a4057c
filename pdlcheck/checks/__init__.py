"""The checks: functions that take the user's code and raise ``AssertionError`` where a property fails.

A check needs no test framework. It computes the reference itself.
"""

from pdlcheck.checks.checkpoint.resume import check_resume
from pdlcheck.checks.checkpoint.resumed_run import check_resumed_run
from pdlcheck.checks.checkpoint.torn import check_torn_files
from pdlcheck.checks.comm.collectives import (
    check_all_gather,
    check_all_reduce,
    check_all_reduce_agrees,
    check_broadcast,
    check_reduce_scatter,
    check_ring_pass,
)
from pdlcheck.checks.data.digests import check_digest, check_gathered_digests
from pdlcheck.checks.data.epoch_loop import check_epoch_loop
from pdlcheck.checks.data.sampler import check_sampler, check_sampler_resumes
from pdlcheck.checks.data.shards import check_epochs_differ, check_shards
from pdlcheck.checks.data_parallel.comm_hook import check_comm_hook
from pdlcheck.checks.data_parallel.replicated import check_replicated_module
from pdlcheck.checks.data_parallel.wrapper import check_data_parallel
from pdlcheck.checks.gradients.derivative import check_derivative
from pdlcheck.checks.gradients.same import check_same_gradients
from pdlcheck.checks.gradients.single_process import check_gradients_equal_single_process
from pdlcheck.checks.metrics.metric import check_metric
from pdlcheck.checks.pagerank.over_ranks import check_halo_bytes, check_pagerank_over_ranks, check_pagerank_rounds
from pdlcheck.checks.pagerank.scores import (
    check_error_bound,
    check_pagerank,
    check_pagerank_agreement,
    check_pagerank_relabelling,
    check_transition_matrix,
)
from pdlcheck.checks.pipeline.pipedream import check_pipedream
from pdlcheck.checks.pipeline.schedule import check_schedule
from pdlcheck.checks.pipeline.whole_batch import check_pipeline
from pdlcheck.checks.precision.clip import check_clip_grad_norm
from pdlcheck.checks.precision.scaler import check_grad_scaler, check_low_precision_sum
from pdlcheck.checks.randomness.streams import check_random_streams
from pdlcheck.checks.replicas.in_sync import check_replicas_in_sync, check_same_start
from pdlcheck.checks.replicas.local_sgd import check_local_sgd
from pdlcheck.checks.replicas.sync import check_average_parameters, check_broadcast_parameters
from pdlcheck.checks.sharded_layer.layer import check_sharded_layer
from pdlcheck.checks.training.check import check_training
from pdlcheck.checks.trajectories.trajectory import check_same_trajectory, check_world_size_does_not_matter

__all__ = [
    "check_all_gather",
    "check_all_reduce",
    "check_all_reduce_agrees",
    "check_average_parameters",
    "check_broadcast",
    "check_broadcast_parameters",
    "check_clip_grad_norm",
    "check_comm_hook",
    "check_data_parallel",
    "check_derivative",
    "check_digest",
    "check_epoch_loop",
    "check_epochs_differ",
    "check_error_bound",
    "check_gathered_digests",
    "check_grad_scaler",
    "check_gradients_equal_single_process",
    "check_halo_bytes",
    "check_local_sgd",
    "check_low_precision_sum",
    "check_metric",
    "check_pagerank",
    "check_pagerank_agreement",
    "check_pagerank_over_ranks",
    "check_pagerank_relabelling",
    "check_pagerank_rounds",
    "check_pipedream",
    "check_pipeline",
    "check_random_streams",
    "check_reduce_scatter",
    "check_replicas_in_sync",
    "check_replicated_module",
    "check_resume",
    "check_resumed_run",
    "check_ring_pass",
    "check_same_gradients",
    "check_same_start",
    "check_same_trajectory",
    "check_sampler",
    "check_sampler_resumes",
    "check_schedule",
    "check_sharded_layer",
    "check_shards",
    "check_torn_files",
    "check_training",
    "check_transition_matrix",
    "check_world_size_does_not_matter",
]
