"""Jobs with guards, under several plans."""

from tests.support.expert_jobs import EP
from tests.support.expert_jobs import JOB as DEEPSEEK


def options(**more):
    return dict(training__local_batch_size=4, training__steps=8, checkpoint__enable=True, checkpoint__interval=3) | more


DDP = dict(parallelism__data_parallel_replicate_degree=2, parallelism__data_parallel_shard_degree=1)
PLANS = {
    "FSDP": {},
    "DDP": DDP,
    "PP": dict(parallelism__pipeline_parallel_degree=2),
    "TP": dict(parallelism__tensor_parallel_degree=2),
    "EP": DEEPSEEK | EP,
}
