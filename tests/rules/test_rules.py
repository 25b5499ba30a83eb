"""How rules are run: an error of the job's facts ends a rule and is reported once."""

import pytest

from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.rules import Facts, judge

FACTS = Facts(ResolvedJob(JobConfig(), 4).with_options({"parallelism.tensor_parallel_degree": 3}))


def reads_shards(facts):
    yield facts.fault("training.seq_len", "another", "")
    assert facts.layout.shards
    yield facts.fault("training.steps", "another", "")


def reports_shards(facts):
    yield from facts.judged(lambda: facts.layout.shards)


def keys(*rules):
    return [fault.key for fault in judge(FACTS, rules)]


def test_an_error_ends_the_rules_that_read_it_and_is_one_fault():
    degree = "parallelism.data_parallel_shard_degree"
    (reported,) = keys(reports_shards)
    assert reported.startswith("parallelism.") and reported in (degree, "parallelism.tensor_parallel_degree")
    assert keys(reads_shards, reports_shards, reads_shards) == ["training.seq_len", reported, "training.seq_len"]
    assert keys(reads_shards) == ["training.seq_len", reported], "no rule reports it: it is a fault all the same"


def test_other_errors_are_not_swallowed():
    def fails(facts):
        raise JobError("of no option")
        yield

    with pytest.raises(JobError, match="of no option"):
        judge(FACTS, [fails])
