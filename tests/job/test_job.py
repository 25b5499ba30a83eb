"""The resolved job: equality, pickles, related jobs, and facts that do not depend on other options."""

import pickle
from dataclasses import replace

import pytest

from torchtitan.config.job import JobConfig
from torchtitan.config.sections.training import DataSource
from torchtitan.core.errors import JobError, LimitError
from torchtitan.job import ResolvedJob
from torchtitan.rules import hide


def test_jobs_are_equal_by_options_ranks_and_device():
    job, same = ResolvedJob(JobConfig(), 4), ResolvedJob(JobConfig(), 4)
    assert job == same and hash(job) == hash(same)
    different = [ResolvedJob(JobConfig(), 2), ResolvedJob(JobConfig(), 4, "cuda")]
    different.append(job.with_options({"training.seq_len": 17}))
    assert len({job, same, *different}) == 4 and job != job.config


def test_a_pickle_leaves_out_what_was_derived():
    job = ResolvedJob(JobConfig(), 4)
    plain = pickle.dumps(job)
    assert job.layout.dims.dp == 4 and job.model.args is job.model.args
    assert pickle.dumps(job) == plain and pickle.loads(plain) == job


def test_options_are_changed_by_their_dotted_names():
    job = ResolvedJob(JobConfig()).with_options({"training.seq_len": 512, "adapter.relora.every": 7, "debug.seed": 3})
    assert (job.config.training.seq_len, job.config.adapter.relora.every, job.config.debug.seed) == (512, 7, 3)
    assert job.config.training.local_batch_size == JobConfig().training.local_batch_size
    assert job.data.seq_len("training") == 512 and job.data.seq_len("validation") == 512
    with pytest.raises(JobError, match="no option no_such_option; allowed: .*seq_len"):
        job.with_options({"training.no_such_option": 1})


def test_the_degrees_that_do_not_fit_the_ranks_are_refused_where_they_are_read():
    job = ResolvedJob(JobConfig(), 4).with_options({"parallelism.tensor_parallel_degree": 3})
    assert job.layout.tp == 3
    with pytest.raises(LimitError, match="4 ranks"):
        _ = job.layout.dims
    with pytest.raises(LimitError, match="4 ranks"):
        _ = job.layout.samples


def test_a_fact_does_not_read_the_options_behind_another_one():
    job = ResolvedJob(hide(JobConfig(), ["training.local_batch_size", "task.kind"]), 4)
    assert job.layout.tp == 1 and job.layout.shards == 4 and job.data.lengths


def test_batches_count_rows_and_a_pair_has_two():
    options = {"task.kind": "dpo", "training.local_batch_size": 3, "training.global_batch_size": 24}
    layout = ResolvedJob(JobConfig(), 4).with_options(options).layout
    assert (layout.rows_per_sample, layout.batch_rows(), layout.samples, layout.rows) == (2, 6, 24, 48)
    assert layout.batches_per_step == 2 and layout.sample_count(1) == "1 pair (2 answers)" and layout.notice()


def test_sources_take_unset_options_from_the_training_section():
    config = JobConfig()
    sources = [DataSource(dataset="text", weight=3.0), DataSource(dataset="text", text_field="body")]
    config = replace(config, training=replace(config.training, sources=sources, text_field="content"))
    data = ResolvedJob(config).data
    assert [source.text_field for source in data.sources("training").values()] == ["content", "body"]
    assert data.describe_sources("training") == "0.75 text + 0.25 text"


def test_related_jobs():
    job = ResolvedJob(JobConfig(), 4).with_options(
        {"adapter.kind": "lora", "training.neftune_alpha": 5.0, "checkpoint.load_step": 3}
    )
    reference = job.reference().config
    assert (reference.adapter.kind, reference.training.neftune_alpha) == ("none", 0)
    assert job.restarted().config.checkpoint.load_step == -1
    assert job.on_one_rank().world_size == 1 and job.on_one_rank().layout.dims.dp == 1
    on_gpus = job.on_ranks(4, "cuda")
    assert (on_gpus.world_size, on_gpus.device_type, on_gpus.config) == (4, "cuda", job.config)
    assert on_gpus.on_ranks(2).device_type == "cuda" and on_gpus.on_ranks(2).layout.shards == 2
    assert job.with_lasting_options().config.adapter.save == "whole"


def test_sizes_and_microbatches_that_are_wrong_are_refused_by_their_option():
    wrong = ResolvedJob(JobConfig()).with_options({"model.overrides": {"n_layers": 0}, "task.kind": "sft"})
    with pytest.raises(LimitError, match="n_layers = 0; allowed: n_layers > 0") as caught:
        _ = wrong.model.args
    assert caught.value.option == "model.overrides" and wrong.model.labelled_fields is None
    with pytest.raises(LimitError, match="model.hf_folder: given nothing"):
        _ = wrong.with_options({"model.flavor": "from_hf"}).model.sizes
    sizes = {"training.local_batch_size": 4, "parallelism.pipeline_parallel_microbatch_size": 3}
    with pytest.raises(LimitError, match="microbatch_size: given 3"):
        _ = ResolvedJob(JobConfig()).with_options(sizes).layout.microbatches


def test_shards_of_parameters_and_experts():
    degrees = {"parallelism.tensor_parallel_degree": 2, "parallelism.context_parallel_degree": 2}
    layout = ResolvedJob(JobConfig(), 8).with_options(degrees | {"training.local_batch_size": 3}).layout
    assert (layout.shards, layout.fsdp_shards, layout.expert_pool, layout.samples_per_pass) == (2, 4, 8, 6)


def test_related_jobs_share_the_sizes_of_an_unchanged_model():
    """Counting the parameters of a large model takes a fifth of a search over plans."""
    job = ResolvedJob(JobConfig())
    other = job.with_options({"training.seq_len": 512, "parallelism.tensor_parallel_degree": 2})
    assert other.model.args == job.model.args and other.model.args is not job.model.args  # not derived before
    for related in (job.with_options({"training.seq_len": 512}), job.on_ranks(4)):
        assert related.model.args is job.model.args
    deeper = job.with_options({"model.overrides": {"n_layers": 3}})
    assert deeper.model.args.n_layers == 3 != job.model.args.n_layers
