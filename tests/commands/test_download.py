"""`torchtitan download`, and a job whose model, tokenizer and records are on the hub, as a user starts it."""

import os
import subprocess
import sys

import pytest

from tests.support.hub_server import hub_server
from tests.support.jobs import ROOT, start_new, write_texts
from torchtitan import cli
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.models.spec import MODELS

SIZES = "{dim=64, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=2304, multiple_of=64}"


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """The files of a small model's folder, by name."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    job = ResolvedJob(manager.load([f"--model.overrides={SIZES}", "--model.tokenizer_path=debug"]))
    model = ModelBuilder(job).meta_model().to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    files = parts.hf_extra_files(job.model, job.tokenizer(), "float32")
    MODELS["llama3"].hf.save_hf(folder, model.state_dict(), job.model.args, extra_files=files)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def torchtitan(*arguments, **environment):
    command = [sys.executable, "-m", "torchtitan", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_a_job_from_the_hub_is_checked_downloaded_trained_and_resumed(tmp_path, model_files):
    """The resumed run takes the commit that it began with, though main has moved on, and needs no network."""
    texts = {path.name: path.read_bytes() for path in write_texts(tmp_path / "texts").parent.iterdir()}
    with hub_server() as (hub, address):
        commit = hub.publish("models", "owner/model", model_files | {"pytorch_model.bin": b"pickle"})
        hub.publish("datasets", "owner/texts", texts)
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        run = tmp_path / "run"
        job = [f"--job.dump_folder={run}", "--model.flavor=from_hf", "--training.seq_len=32"]
        job += [f"--model.{name}=hf://owner/model" for name in ("hf_folder", "tokenizer_path")]
        job += ["--checkpoint.initial_load_path=hf://owner/model", "--training.dataset_path=hf://owner/texts"]
        job += ["--training.dataset=text", "--checkpoint.enable", "--training.local_batch_size=2"]
        checked = torchtitan("check", "--no-memory", *job, **environment)
        assert checked.returncode == 2 and "would be downloaded" in checked.stderr, checked.stderr
        assert not hub.transfers("tokenizer.json")
        process = start_new([*job, "--training.steps=1"], ranks=2, **environment)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, output + errors
        names = sorted(name for name in model_files if name != "export.json")
        assert [len(hub.transfers(name)) for name in names] == [1] * len(names) and not hub.transfers(
            "pytorch_model.bin"
        )
        recorded = (run / "config.toml").read_text()
        assert f'initial_load_path = "hf://owner/model@{commit}"' in recorded
        hub.publish("models", "owner/model", {"config.json": b"{}", "model.safetensors": b"", "tokenizer.json": b"{}"})
        moved = torchtitan("download", "hf://owner/model", **environment)
        assert moved.returncode == 0 and f"hf://owner/model@{commit}" not in moved.stdout, moved.stderr
    process = start_new([*job, "--training.steps=2"], ranks=2, **environment)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors
    assert (run / "config.toml").read_text().count(commit) == 3


SCRIPT = """
import sys
from torchtitan.engine import Engine
with Engine.from_job(sys.argv[1]) as engine:
    engine.forward_backward(next(engine.data))
    engine.optim_step()
"""


def test_planners_download_sizes_alone_and_an_engine_all(tmp_path, model_files):
    texts = {path.name: path.read_bytes() for path in write_texts(tmp_path / "texts").parent.iterdir()}
    (weights,) = [name for name in model_files if name.endswith(".safetensors")]
    job = tmp_path / "job.toml"
    job.write_text(f"""
        [job]
        dump_folder = "{tmp_path / "run"}"
        [model]
        flavor = "from_hf"
        hf_folder = "hf://owner/model"
        tokenizer_path = "hf://owner/model"
        [checkpoint]
        enable = true
        initial_load_path = "hf://owner/model"
        [training]
        steps = 1
        seq_len = 32
        local_batch_size = 2
        dataset = "text"
        dataset_path = "hf://owner/texts"
    """)
    with hub_server() as (hub, address):
        hub.publish("models", "owner/model", model_files)
        hub.publish("datasets", "owner/texts", texts)
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}

        def transfers():
            return [len(hub.transfers(name)) for name in ("config.json", weights, *texts)]

        planned = torchtitan("plan", str(job), "--gpus=1", "--gpu=h100-80", **environment)
        assert planned.returncode == 0, planned.stderr
        assert transfers() == [1, 0, *[0] * len(texts)]
        command = [sys.executable, "-c", SCRIPT, str(job)]
        script = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
        assert script.returncode == 0, script.stderr
        assert transfers() == [1] * (2 + len(texts))


def test_download_takes_sources_only(capsys):
    assert cli.main(["download", "owner/name"]) == 2
    assert "owner/name: allowed: hf://owner/name, or hf://datasets/owner/name; write it so" in capsys.readouterr().err
