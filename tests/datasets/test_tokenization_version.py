"""Runs go on with the rules of tokenization that they began with."""

import json
from itertools import islice

import pytest

from tests.support.conversations import ANSWER, USER, qwen_like
from tests.support.loaders import loader
from torchtitan.checkpoint import base_weights
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob


def config_of(tmp_path, *options):
    return load([f"--job.dump_folder={tmp_path}", *options])


@pytest.mark.parametrize(
    "job, version", [(None, 3), ({}, 2), ({"data": {"train_on": "all"}}, 2), ({"data": {"tokenization_version": 3}}, 3)]
)
def test_the_version_is_that_of_the_newest_checkpoint(job, version, tmp_path, monkeypatch):
    newest = None if job is None else tmp_path / "step-1"
    monkeypatch.setattr(base_weights, "newest_complete", lambda root: (newest, []))
    monkeypatch.setattr(base_weights, "read_state", lambda folder: {"trainer": {"job": job}})
    enabled = "--checkpoint.enable=true"
    assert ResolvedJob(config_of(tmp_path, enabled)).saving.tokenization_version == version
    assert ResolvedJob(config_of(tmp_path, enabled, "--data.tokenization_version=2")).saving.tokenization_version == 2
    assert ResolvedJob(config_of(tmp_path, enabled, "--job.clean_start=always")).saving.tokenization_version == 3
    assert ResolvedJob(config_of(tmp_path)).saving.tokenization_version == 3


@pytest.mark.parametrize("records", ["conversations", "texts"])
def test_a_position_of_version_2_is_resumed_bit_equal(records, tmp_path):
    folder, path = qwen_like(tmp_path / "t"), tmp_path / "a.jsonl"
    record = {"messages": [USER, ANSWER]} if records == "conversations" else {"text": "def main(args):"}
    path.write_text("".join(json.dumps(record) + "\n" for _ in range(40)))
    earlier = build_tokenizer(str(folder), version=2)
    first = loader(path, tokenizer=earlier, seq_len=24)
    batches = [batch["tokens"].tolist() for batch in islice(first, 6)]
    begun = loader(path, tokenizer=earlier, seq_len=24)
    assert [batch["tokens"].tolist() for batch in islice(begun, 3)] == batches[:3]
    state = merge_states([begun.state_dict()])
    resumed = loader(path, tokenizer=build_tokenizer(str(folder), version=2), seq_len=24, state=state)
    assert [batch["tokens"].tolist() for batch in islice(resumed, 3)] == batches[3:]
    with pytest.raises(JobError, match="tokenizer: .* in the checkpoint, .* now"):
        loader(path, tokenizer=build_tokenizer(str(folder)), seq_len=24, state=state)


def test_the_option_that_goes_on_is_named(tmp_path):
    folder, path = qwen_like(tmp_path / "t", bos_token="<|endoftext|>"), tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    state = merge_states([loader(path, tokenizer=build_tokenizer(str(folder), version=2), seq_len=24).state_dict()])
    with pytest.raises(
        JobError, match="the run began with other rules of tokenization: set data.tokenization_version = 2"
    ):
        loader(path, tokenizer=build_tokenizer(str(folder)), seq_len=24, state=state)
