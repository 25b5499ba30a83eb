"""Build the observers of a run: guards, metrics and trackers, profiler, time limit."""

from functools import partial
from pathlib import Path

import torch

from torchtitan.adapters.interface import Adapter
from torchtitan.assembly.parts import ModelBuilder, matching_options, model_spec
from torchtitan.checkpoint.folders import LOSS, Metric
from torchtitan.config.job import as_dict, trackers_of
from torchtitan.config.sections.run import EarlyStop, Guard, Profiling
from torchtitan.guards import Guards, Replicas, ShardSums, StepGuard
from torchtitan.guards.stop_conditions import TimeLimit, ValidationResults, seconds_of, shortest
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.launcher import run_folder
from torchtitan.metrics.device import Profiler
from torchtitan.metrics.logger import LogOptions, MetricsLogger, RunConstants
from torchtitan.metrics.stragglers import BlockTimer, Stragglers
from torchtitan.metrics.trackers import TRACKERS
from torchtitan.metrics.trackers.interface import TrackedRun, TrackerThread
from torchtitan.optimizers.build import Optimizers
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.parallelisms.plan import match_blocks
from torchtitan.process.ranks import Ranks, slurm_seconds_left


def time_limit(limit: str | None) -> TimeLimit:
    """Return the limit of job.time_limit or of SLURM, whichever comes first."""
    return TimeLimit(shortest(None if limit is None else seconds_of(limit), slurm_seconds_left()))


def trackers(job: ResolvedJob, ranks: Ranks, resumed_from: int | None) -> list[TrackerThread]:
    """Return the trackers of this rank, each in a separate thread so that it cannot delay the run."""
    config = job.config
    options, folder = config.metrics, Path(config.job.dump_folder)
    events = folder / options.save_tb_folder
    events = events / f"rank_{ranks.rank}" if options.save_for_all_ranks else events
    run = TrackedRun(folder, events, resumed_from, config.job.description, as_dict(config))
    kinds = [TRACKERS[name] for name in trackers_of(config.metrics).values()]
    chosen = [kind for kind in kinds if ranks.is_main or (kind.runs_on_all_ranks and options.save_for_all_ranks)]
    return [TrackerThread(kind.name, partial(kind, run)) for kind in chosen]


def findings(options: EarlyStop, best: Metric | None) -> ValidationResults:
    """Return the results of validations. `best`: the metric that selects the best checkpoint, if any."""
    if best is None or options.metric not in (None, best.name):
        best = Metric.of(options.metric or LOSS, None)
    return ValidationResults(best, options.patience, options.min_delta)


def guards(options: Guard, folder: Path, built: ParallelModel, built_optimizers: Optimizers) -> Guards:
    """Return the guards of a run in this folder."""
    steps = StepGuard(**matching_options(options, StepGuard))
    replicas = Replicas(built.parts, built_optimizers.optimizers)
    record_rollback = partial(run_folder.record_rollback, folder)
    shards = ShardSums(built.named_parameters(), built_optimizers.optimizers) if options.shard_checksums else None
    every = options.replica_check_interval
    return Guards(steps, replicas, built, every, record_rollback, shards, options.replay_every)


def metrics(
    job: ResolvedJob,
    device: torch.device,
    ranks: Ranks,
    resumed_from: int | None,
    tokens_seen: int,
    installed: Adapter | None = None,
) -> MetricsLogger:
    options, args, training = job.config.metrics, job.model.args, job.config.training
    flops = model_spec(job.model).flops_per_token(args, training.seq_len)
    if installed is not None:
        flops = installed.flops_per_token(flops, args.num_matmul_parameters, training.seq_len)
    workload = RunConstants(
        total_steps=training.steps,
        device=device,
        compute_dtype=ModelBuilder(job).parallel_options().param_dtype,
        world_size=ranks.world_size,
        num_parameters=args.num_parameters,
        flops_per_token_full=flops.full,
        flops_per_token_causal=flops.causal,
    )
    log_options = LogOptions(
        log_freq=job.schedule.cadence.log,
        histogram_freq=options.histogram_freq,
        log_lr=options.log_lr,
        color=ranks.on_terminal and not options.disable_color_printing,
    )
    return MetricsLogger(
        Path(job.config.job.dump_folder),
        workload,
        log_options,
        writes=ranks.is_main,
        resume_step=resumed_from,
        tokens_seen=tokens_seen,
        trackers=trackers(job, ranks, resumed_from),
    )


def stragglers(model: JobModel, built: ParallelModel, ranks: Ranks) -> Stragglers:
    """Return the comparison of data-parallel ranks, which does nothing if the whole model is compiled as one."""
    timer, compiled = None, built.options.compile_model
    if built.dims.dp > 1 and not (compiled and built.options.compile_scope == "model"):
        plan = model_spec(model).plan
        blocks = [block for part in built.parts for _, block in match_blocks(part, plan)]
        timer = BlockTimer(blocks, built.device, compiled)
    return Stragglers(timer, ranks.world_size, built.dims.pp)


def profiler(options: Profiling, folder: Path, device: torch.device, ranks: Ranks, step: int) -> Profiler:
    """Return the profiler of a run in this folder, which begins at this step."""
    return Profiler(
        traces=folder / options.save_traces_folder if options.enable_profiling else None,
        snapshots=folder / options.save_memory_snapshot_folder if options.enable_memory_snapshot else None,
        freq=options.profile_freq,
        active=options.profiler_active,
        warmup=options.profiler_warmup,
        device=device,
        rank=ranks.rank,
        start_step=step,
    )
