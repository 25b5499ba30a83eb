"""The sources of the package, parsed."""

from tests.support.jobs import ROOT

PACKAGE = ROOT / "torchtitan"
TORCH_FREE = (
    "cli",
    "config.manager",
    "core.hardware",
    "planner.memory.closed_form",
    "commands.check",
    "commands.list",
    "commands.checkpoints",
    "commands.plan",
    "commands.schedule",
    "commands.why",
    "adapters",
    "datasets",
    "datasets.tokenizer",
    "job",
    "launch",
    "launcher.run_folder",
    "losses.tasks",
    "metrics.trackers",
    "models",
    "parallelisms.pipeline.actions",
    "parallelisms.pipeline.cut",
    "parallelisms.pipeline.simulator",
    "parallelisms.pipeline.tables",
    "planner.time.step_time",
    "process.ranks",
    "process.run_log",
    "train",
)
FILES = sorted(PACKAGE.rglob("*.py"))
