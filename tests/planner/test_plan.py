"""Options of a job that the formulas describe, refuse or leave to its own plan."""

import json
import re

import pytest

from torchtitan.commands import plan as command
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.models.flops import causal_keys
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time.step_time import StepTimer

SMALL = ("debug_model", "--training.global_batch_size=16", "--gpus=4", "--quick")


def timer_of(*options):
    job = ResolvedJob(manager.load(["--job.config_file", "llama3_8b", *options]), 8, "cuda")
    return StepTimer(Workload.of(job, 64), load_hardware("h100-80"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.name=deepseek", "--model.overrides={n_mtp_layers = 1}"], "n_mtp_layers .* multi-token prediction"),
        (["--model.s2_group_size=64"], "model.s2_group_size: the formulas .* shifted groups"),
        (
            ["--memory=80GiB", "--model.name=seed_oss", "--model.overrides={attention_dropout = 0.1}"],
            "attention_dropout",
        ),
        (["--memory.limit=200GiB"], "memory.limit: given 200 GiB; allowed: at most the 79.10 GiB"),
    ],
)
def test_options_that_no_formula_describes_are_refused(options, message):
    with pytest.raises(JobError, match=message):
        command.main([*SMALL, *options])


def test_the_memory_limit_of_a_job_is_the_memory_of_its_plans(capsys):
    total = load_hardware("h100-80").memory_gib * 2**30
    for limit, expected in (("0.5", 0.5 * total), ("20GiB", 20 * 2**30)):
        assert command.main([*SMALL, "--json", f"--memory.limit={limit}"]) == 0
        assert json.loads(capsys.readouterr().out)["memory"] == pytest.approx(expected)


def test_a_pipeline_of_a_jobs_own_stages_is_not_predicted(capsys):
    modules = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    pipeline = ("--parallelism.pipeline_parallel_degree=2", "--model.overrides={n_layers = 2}")
    assert command.main([*SMALL, *pipeline, f"--parallelism.module_fqns_per_model_part={json.dumps(modules)}"]) == 0
    assert re.search(r"^job  is not predicted: .*module_fqns_per_model_part", capsys.readouterr().out, re.MULTILINE)


def test_without_a_balance_the_last_rank_has_the_most_keys():
    """Of two ranks: its queries see 3/4 of the sequence in the mean, instead of a half."""
    balanced, in_order = timer_of(), timer_of("--parallelism.context_parallel_load_balancer=none")
    plan, length = Plan(cp=2, shards=4), balanced.workload.seq_len
    assert in_order.workload.most_keys(plan) == pytest.approx(0.75 * length, rel=1e-3)
    assert in_order.workload.most_keys(plan) == 2 * causal_keys(length, length) - causal_keys(length // 2, length // 2)
    assert in_order.step_time(plan).parts["attention"] > 1.4 * balanced.step_time(plan).parts["attention"]
    for other in (Plan(shards=8), Plan(cp=2, shards=4, cp_method="ulysses")):
        assert in_order.workload.most_keys(other) == balanced.workload.mean_keys


def test_tensor_parallel_ranks_that_keep_all_tokens_or_logits_move_more():
    plan = Plan(tp=8, microbatch=2)
    usual, whole, gathered = (
        timer_of(*options)
        for options in (
            (),
            ("--parallelism.disable_sequence_parallel=true",),
            ("--parallelism.disable_loss_parallel=true",),
        )
    )
    assert whole.workload.local_tokens(plan) == 8 * usual.workload.local_tokens(plan)
    assert whole.step_time(plan).parts["memory"] > 2 * usual.step_time(plan).parts["memory"]
    (product, logits), (same_product, more) = usual.head(plan), gathered.head(plan)
    assert product == same_product and more > 4 * logits
    assert gathered.messages.of_ends(plan, 16384, False, True).transfer > 10 * (
        usual.messages.of_ends(plan, 16384, False, True).transfer
    )
