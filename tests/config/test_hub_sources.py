"""Options of a job that name sources on the hub: their folders, what is recorded, and their faults."""

import os
from dataclasses import replace

import pytest

from torchtitan.config import hub_sources, manager
from torchtitan.config.job import as_dict
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError

constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "a" * 40


@pytest.fixture
def cache(monkeypatch):
    """A cache that has every source at one commit; returns what was asked for."""
    asked = []

    def local_path(text, purpose, recorded):
        asked.append((text, purpose, dict(recorded)))
        if "missing" in text:
            raise JobError(f"{text}: not in the cache")
        kind = "datasets" if purpose == "records" else "models"
        name = text.rpartition("/")[2].partition("@")[0]
        return f"/cache/{kind}--owner--{name}/snapshots/{COMMIT}"

    monkeypatch.setattr(hub_sources, "local_path", local_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/cache")
    return asked


SOURCES = {
    "model.hf_folder": ("hf://owner/model", "sizes"),
    "model.tokenizer_path": ("hf://owner/model", "tokenizer"),
    "checkpoint.initial_load_path": ("hf://owner/model", "weights"),
    "adapter.initial_path": ("hf://owner/adapter", "weights"),
    "dpo.reference": ("hf://owner/model", "weights"),
    "training.dataset_path": ("hf://owner/data", "records"),
    "validation.dataset_path": ("hf://owner/data", "records"),
}


def test_every_option_that_takes_a_folder_takes_a_source(cache, tmp_path):
    arguments = [f"--{key}={source}" for key, (source, _) in SOURCES.items()]
    config = manager.load([*arguments, f"--job.dump_folder={tmp_path}"])
    assert [(source, purpose) for source, purpose, _ in cache] == list(SOURCES.values())
    assert config.model.hf_folder == f"/cache/models--owner--model/snapshots/{COMMIT}"
    assert config.training.dataset_path == f"/cache/datasets--owner--data/snapshots/{COMMIT}"
    record = as_dict(config)
    assert record["checkpoint"]["initial_load_path"] == f"hf://owner/model@{COMMIT}"
    assert record["training"]["dataset_path"] == f"hf://datasets/owner/data@{COMMIT}"
    assert f'hf_folder = "hf://owner/model@{COMMIT}"' in manager.to_toml(config)


def test_sources_of_a_mixture(cache, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        '[[training.sources]]\ndataset = "text"\ndataset_path = "local"\n'
        '[[training.sources]]\ndataset = "text"\ndataset_path = "hf://owner/data"\n'
    )
    config = manager.load([str(job), f"--job.dump_folder={tmp_path}"])
    paths = [source.dataset_path for source in config.training.sources]
    assert paths == ["local", f"/cache/datasets--owner--data/snapshots/{COMMIT}"]
    assert manager.load_from(config, {}) == replace(config, job=manager.load_from(config, {}).job)


def test_a_resume_knows_the_commits_that_its_run_recorded(cache, tmp_path):
    arguments = ["--model.tokenizer_path=hf://owner/model", f"--job.dump_folder={tmp_path}"]
    config = manager.load(arguments)
    (tmp_path / "config.toml").write_text(manager.to_toml(config))
    manager.load(arguments)
    assert [recorded for _, _, recorded in cache] == [{}, {"hf://owner/model": COMMIT}]


def test_each_option_goes_on_with_its_commit(cache, tmp_path):
    """Two options, and two sources of a mixture, that name one repository at different commits."""
    first, second = "1" * 40, "2" * 40
    (tmp_path / "config.toml").write_text(
        f'[model]\nhf_folder = "hf://owner/model@{first}"\n[dpo]\nreference = "hf://owner/model@{second}"\n'
        + "".join(
            f'[[training.sources]]\ndataset = "text"\ndataset_path = "hf://datasets/owner/data@{commit}"\n'
            for commit in (first, second)
        )
    )
    job = tmp_path / "job.toml"
    job.write_text(
        "".join(
            f'[[training.sources]]\ndataset = "text"\ndataset_path = "hf://datasets/owner/{name}"\n'
            for name in ("data@v1", "data@v2", "data", "new")
        )
    )
    arguments = ["--model.hf_folder=hf://owner/model", f"--dpo.reference=hf://owner/model@{second}"]
    manager.load([str(job), *arguments, f"--job.dump_folder={tmp_path}"])
    commits = [next(iter(recorded.values())) for _, _, recorded in cache]
    assert commits == [first, second, first, second, second, second]


def test_sources_that_are_not_to_be_had_are_faults_of_their_options(cache, tmp_path):
    arguments = ["--model.tokenizer_path=hf://owner/missing", "--training.dataset_path=hf://owner/missing"]
    with pytest.raises(ConfigError) as error:
        manager.load([*arguments, f"--job.dump_folder={tmp_path}"])
    assert [fault.key for fault in error.value.faults] == ["model.tokenizer_path", "training.dataset_path"]
    assert 'model.tokenizer_path: given "hf://owner/missing"; not in the cache' in str(error.value)


def test_a_job_without_sources_does_not_read_its_run(cache, tmp_path):
    os.mkfifo(tmp_path / "config.toml")
    manager.load([f"--job.dump_folder={tmp_path}"])
    assert not cache
