"""Hostile files are refused at once in one line, without showing other files of this machine.

test_safe_unpickle.py covers checkpoints; the tokenizers' tests cover tokenizers.
"""

import gzip
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import jobs
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from torchtitan.config.manager import ConfigError, load
from torchtitan.core.errors import JobError
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.sources.files import text
from torchtitan.models import CONFIG_CONVERTERS
from torchtitan.models.hf import config
from torchtitan.models.hf import load as hf_load
from torchtitan.models.hf.packed import PackedFormat


def faults(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load([f"--job.config_file={file}"])
    return [str(fault) for fault in caught.value.faults]


def test_jobs_that_extend_one_another_widely_are_read_no_further(tmp_path):
    """Seven levels of eight files each would be read two million times."""
    for depth in range(7):
        bases = [f"{depth + 1}.toml"] * 8 if depth < 6 else []
        (tmp_path / f"{depth}.toml").write_text(f"extends = {json.dumps(bases)}\n")
    (line,) = faults(tmp_path / "0.toml")
    assert "allowed: at most 64 files in all; merge some" in line


@pytest.mark.parametrize("linked", [False, True])
def test_a_job_does_not_show_other_files(tmp_path, linked, monkeypatch):
    """The first line that is no TOML would be quoted."""
    secret = tmp_path / "environ"
    secret.write_text("TOKEN=s3cr3t and more")
    base = secret
    if linked:
        base = tmp_path / "base.toml"
        base.symlink_to(secret)
    (tmp_path / "job.toml").write_text(f'extends = "{base}"\n')
    (line,) = faults(tmp_path / "job.toml")
    assert "a file with a name in .toml, after following links" in line and "s3cr3t" not in line
    (tmp_path / "job.toml").write_text('extends = "/proc/self/environ"\n')
    (line,) = faults(tmp_path / "job.toml")
    assert "a name in .toml" in line and "PATH" not in line


@pytest.mark.parametrize("unit", ["record", "line"])
def test_a_small_file_that_becomes_a_huge_line_is_taken_for_damage(tmp_path, unit):
    """40 MiB of one letter are 40 kB; tokenized they would be gigabytes."""
    content = b'{"text": "' + b"a" * (40 * 2**20) + b'"}\n' if unit == "record" else b"a" * (40 * 2**20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content, 1))
    (document,) = [item for item in text(str(tmp_path / "a.jsonl.gz"), "text").documents()]
    assert isinstance(document, DataError) and "more than 32 MiB without a line end" in str(document)


def test_a_model_that_no_machine_holds_is_refused():
    (line,) = lines("--model.overrides={dim = 1048576, n_layers = 100000, n_heads = 16, n_kv_heads = 16}")
    assert "parameters; allowed: at most 1e+14; check the sizes for a typing error" in line


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "part.safetensors"])
def test_a_pipe_in_a_folder_of_hugging_face_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(JobError, match=f"{name} is not a regular file"):
        if name == "config.json":
            config.read_json(tmp_path / name)
        elif name == "model.safetensors":
            hf_load.tensor_files(tmp_path)
        else:
            hf_load.Shards(tmp_path, {"w": name}, PackedFormat(), ExitStack())


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_not_finite_are_not_started_from(tmp_path, ranks):
    texts = jobs.write_texts(tmp_path / "texts")
    save_options = dict(
        checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True
    )
    run_ranks(1, jobs.train, jobs.arguments(tmp_path / "a", texts, training__steps=1, **save_options))
    (file,) = (tmp_path / "a" / "model_hf").glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.3.mlp.up_proj.weight"][-1, -1] = torch.nan  # the last rank's
    save_file(weights, file, metadata={"format": "pt"})
    load_options = dict(
        checkpoint__enable=True, checkpoint__initial_load_in_hf=True, training__local_batch_size=8 // ranks
    )
    load_options |= dict(checkpoint__initial_load_path=tmp_path / "a" / "model_hf", training__steps=1)
    with pytest.raises(RankFailed, match=r"NotFinite: .*model_hf: model.layers.3.feed_forward.\S+ holds NaN"):
        run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "b", texts, **load_options))


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize("theta", [1e4, 1e6, 2_804_339_835.0, 45_830_000_000.0])
def test_published_constants_of_a_config_are_taken(theta):
    args = CONFIG_CONVERTERS["llama3"].args_from_config(LLAMA | {"rope_theta": theta, "rms_norm_eps": 1e-12})
    assert (args.rope_theta, args.norm_eps) == (theta, 1e-12)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_theta": 1e308}, r"rope_theta = 1e\+308; allowed: from 1 to 1e\+12"),
        ({"rope_theta": 0.0}, "rope_theta = 0.0; allowed: from 1 to"),
        ({"rope_theta": -1e4}, "rope_theta = -10000.0; allowed"),
        ({"rms_norm_eps": 3.0}, "rms_norm_eps = 3.0; allowed: from 1e-20 to 0.1; take the config.json of the model"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06; allowed"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0; allowed"),
        ({"rope_scaling": LLAMA31 | {"factor": 1e300}}, r"factor = 1e\+300; allowed"),
        ({"rope_scaling": LLAMA31 | {"low_freq_factor": 0.0}}, "low_freq_factor = 0.0; allowed|low_freq_factor"),
    ],
    ids=str,
)
def test_absurd_constants_of_a_config_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        CONFIG_CONVERTERS["llama3"].args_from_config(LLAMA | change)
