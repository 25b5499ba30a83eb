"""The option task.kind: names of tasks, their requirements on jobs, and groups of samples that stay on one rank.

test_combinations.py compares objectives of pairs under every plan with one device (rows with the model "pairs").
"""

import numpy as np
import pytest
import torch

from tests.support import judged
from tests.support.judged import CP, PP, lines
from tests.support.loaders import loader, write_documents
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.datasets.samples import global_sample_numbers
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.losses.tasks import TASKS, TaskSpec
from torchtitan.models.dropout import token_keys
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.training.batches import BatchPreparer, BatchSpec

anywhere = judged.anywhere


@pytest.fixture
def pairs(monkeypatch):
    monkeypatch.setitem(
        TASKS.data, "pairs", TaskSpec("tests.support.other_families:PairMargin", 2, loss_per_token=False)
    )


def test_the_default_task_is_next_token_prediction():
    assert isinstance(ModelBuilder(ResolvedJob(load([]))).objective(), SummedCrossEntropy)
    (line,) = lines("--task.kind=pretrian")
    assert line.startswith('task.kind: given "pretrian"; allowed: one of "pretrain", ')
    assert line.endswith('; did you mean "pretrain"?')


def test_next_token_prediction_requires_a_causal_model():
    assert lines("--model.name=roberta", "--model.overrides={n_classes = 2}") == [
        'task.kind: given "pretrain"; allowed: masked_lm or seq_cls for model roberta, which has bidirectional '
        "attention; write one of these, or train a decoder, such as gpt2",
        'model.overrides: given n_classes = 2; allowed: n_classes = 0 with task.kind = "pretrain"; leave it out, or '
        'write task.kind = "seq_cls"',
    ]


def test_faults_of_jobs_of_pairs(pairs):
    options = ["--task.kind=pairs", "--training.local_batch_size=4"]
    assert type(ModelBuilder(ResolvedJob(load(options))).objective()).__name__ == "PairMargin"
    assert lines(*options) == []
    odd = ["--training.local_batch_size=3", "--validation.enable", "--validation.local_batch_size=1"]
    assert lines(options[0], *odd) == []
    assert lines(*options, PP + "2") == []
    assert lines(*options, CP + "2") == [
        "context_parallel_degree: given 2; allowed: 1 with task.kind = pairs: its loss is not a sum over tokens, "
        "so ranks cannot split a sample; shard the model further instead (parallelism.data_parallel_shard_degree)"
    ]

    assert lines(*options, "--training.tokens=1000") == [
        'training.tokens: given 1000; allowed: unset with task.kind = "pairs", which counts samples; set '
        "training.epochs or training.steps"
    ]


@pytest.mark.parametrize("ranks, group_size", [(1, 2), (2, 1), (2, 2), (3, 4)])
def test_ranks_get_groups_of_adjacent_samples_and_miss_none(ranks, group_size):
    local_samples = np.arange(3 * group_size)
    all_ranks = [global_sample_numbers(local_samples, rank, ranks, group_size) for rank in range(ranks)]
    assert sorted(np.concatenate(all_ranks).tolist()) == list(range(len(local_samples) * ranks))
    for samples in all_ranks:
        groups = samples.reshape(-1, group_size)
        assert (groups == groups[:, :1] + np.arange(group_size)).all() and (groups[:, 0] % group_size == 0).all()


@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["indexed", "stream"])
def test_two_ranks_get_the_pairs_of_one_rank(suffix, tmp_path):
    path = write_documents(tmp_path / f"a.jsonl{suffix}")
    options = dict(dataset_path=path, local_batch_size=4, group_size=2)
    one_rank = iter(loader(**options, dp_size=1))
    one = torch.cat([next(one_rank)["tokens"] for _ in range(4)])
    two = [iter(loader(**options, dp_rank=rank, dp_size=2)) for rank in range(2)]
    got = [torch.cat([next(batches)["tokens"] for _ in range(2)]) for batches in two]
    for rank in range(2):
        assert torch.equal(got[rank], one[global_sample_numbers(torch.arange(8), rank, 2, 2)])


def test_dropout_keys_depend_on_the_global_sample_numbers():
    spec = BatchSpec(seed=3, group_size=2)
    preparer = BatchPreparer(SummedCrossEntropy(), ParallelDims(2, 1, 2), 1, torch.device("cpu"), spec)
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2, 5, dtype=torch.long)}
    keys = preparer.to_device_for_training(batch, index=1, step=7)["keys"]
    assert torch.equal(keys, token_keys(3, 7, torch.tensor([6, 7]), 5))
