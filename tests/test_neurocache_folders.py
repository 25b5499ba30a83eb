"""Adapters of Neurocache as the authors' library keeps them: names, what is refused, a job that starts from one."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.jobs import arguments, train, write_texts
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.remembering import read, remembering, segments
from torchtitan import cli
from torchtitan.adapters.neurocache.authors_format import CONFIG, WEIGHTS, differences
from torchtitan.config.sections.adapter import Neurocache as Options
from torchtitan.core.errors import JobError
from torchtitan.models.llama.model import form

HOW = dict(layers=4, retrieval_map={"1": 2}, attention_layers=[1, 3], beside="lora")
LOW_RANK = dict(rank=2, alpha=4.0, target=["*feed_forward.w2"], layers=[1, 3])


def adapted(**how):
    return remembering(adapter=LOW_RANK, **HOW | how)


def written(folder):
    model, installed = adapted()
    generator = torch.Generator().manual_seed(1)
    for name in installed.added_parameters:
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.randn(model.get_parameter(name).shape, generator=generator) / 10)
    installed.write_folder(folder, form(model.args), installed.full_tensors([model]), "the/model")
    return model, installed


def test_names_and_config_are_those_of_the_authors(tmp_path):
    model, installed = written(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    low_rank = {name for name in stored if "lora" in name}
    assert low_rank == {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_{side}.weight" for layer in (1, 3) for side in "AB"
    }
    assert stored.keys() - low_rank == {"h_proj.weight", "h_norm.weight", "h_norm.bias"} | {
        f"cache_attns.{number}.{each}_proj.weight" for number in (0, 1) for each in "qkvo"
    }
    assert torch.equal(stored["cache_attns.1.k_proj.weight"], model.layers["3"].attention.cache.reading.wk)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config == {
        "cache_size": 24,
        "compression_factor": 4,
        "topk": 3,
        "neighborhood_size": 2,
        "context_size": 2,
        "similarity_fn": "l2",
        "cache_dtype": "float32",
        "cache_type": "FIFO",
        "global_cache": False,
        "retrieval_map": {"1": 2},
        "attention_layers": [1, 3],
        "base_model_name_or_path": "the/model",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }


def test_what_is_written_computes_the_same_when_it_is_read(tmp_path):
    model, installed = written(tmp_path / "adapter")
    other, fresh = adapted()
    fresh.load_tensors([other], fresh.read_folder(tmp_path / "adapter", form(model.args)))
    with torch.no_grad():
        outputs = [read(each.eval(), by, segments(3)) for each, by in ((model, installed), (other, fresh))]
    assert torch.equal(*outputs)
    scrambled, by = adapted(compat_head_layout=True)  # what the authors' program would compute of the same weights
    by.load_tensors([scrambled], by.read_folder(tmp_path / "adapter", form(model.args)))
    with torch.no_grad():
        assert not torch.allclose(read(scrambled.eval(), by, segments(3)), outputs[0])


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(compression=8), "compression_factor = 4, the job's is 8"),
        (dict(window=4), "neighborhood_size = 2, the job's is 4"),
        (dict(retrieval_map={"1": 1}), r"retrieval_map = \{'1': 2\}, attention_layers = \[1, 3\], the job's are"),
    ],
)
def test_an_adapter_of_another_job_is_refused(how, message, tmp_path):
    written(tmp_path / "adapter")
    model, installed = adapted(**how)
    with pytest.raises(JobError, match=message):
        installed.read_folder(tmp_path / "adapter", form(model.args))


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    model, installed = written(tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(file)
    gone = {name: value for name, value in tensors.items() if name != "h_norm.bias"}
    save_file(gone | {"h_proj.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(
        JobError, match=r"h_proj.weight has shape \(3, 3\), the job's is \(8, 32\); it lacks h_norm.bias"
    ):
        installed.read_folder(tmp_path / "adapter", form(model.args))
    save_file({name: value for name, value in tensors.items() if "lora_A" not in name}, file)
    with pytest.raises(JobError, match="it lacks base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"):
        installed.read_folder(tmp_path / "adapter", form(model.args))
    file.unlink()
    with pytest.raises(JobError, match=f"no {WEIGHTS} that can be read.*of a .bin file make one first"):
        installed.read_folder(tmp_path / "adapter", form(model.args))
    (tmp_path / "adapter" / CONFIG).write_text("[]")
    with pytest.raises(JobError, match="holds no JSON object"):
        installed.read_folder(tmp_path / "adapter", form(model.args))
    (tmp_path / "adapter" / CONFIG).unlink()
    os.mkfifo(tmp_path / "adapter" / CONFIG)
    with pytest.raises(JobError, match="is not a regular file"):  # which would be waited for
        installed.read_folder(tmp_path / "adapter", form(model.args))


def test_what_else_was_trained_has_no_place_in_a_folder(tmp_path):
    model, installed = remembering(adapter=dict(train_fully=["norm.weight"]))
    with pytest.raises(JobError, match=r"trained too \(norm.weight\); keep the run's checkpoints"):
        installed.write_folder(tmp_path / "adapter", form(model.args), installed.full_tensors([model]), "the/model")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("config", [dict(retrieval_map={"1": math.inf}), dict(attention_layers=[1, -math.inf])])
def test_layers_without_end_are_another_jobs(config):
    (told,) = differences(config, Options(), 4)
    assert "inf" in told and "the job's are {'3': 3} and [3]" in told


def losses(argv):
    return [row["loss"] for row in train(argv)[0]]


def test_a_run_is_exported_and_another_begins_from_it(tmp_path, capsys):
    texts = write_texts(tmp_path / "data")
    cache = dict(cache_size=64, topk=4, cache_dtype="float32", beside="lora")
    how = {f"adapter__neurocache__{name}": value for name, value in cache.items()}
    how |= dict(task__kind="documents", adapter__kind="neurocache", adapter__rank=2, training__steps=2)
    how |= dict(checkpoint__enable=True, training__local_batch_size=2, training__global_batch_size=4)
    run_ranks(1, losses, arguments(tmp_path / "first", texts, **how))
    assert cli.main(["export", str(tmp_path / "first"), "--to", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / CONFIG).is_file()
    assert capsys.readouterr().out.endswith("the adapter of step-00000002, in the layout of the authors' library\n")
    assert cli.main(["export", str(tmp_path / "first"), "--to", str(tmp_path / "merged"), "--merge"]) != 0
    assert "without a cache" in capsys.readouterr().err
    begun = how | dict(training__steps=1, adapter__initial_path=tmp_path / "adapter")
    (found,) = run_ranks(1, losses, arguments(tmp_path / "second", texts, **begun))
    (plain,) = run_ranks(1, losses, arguments(tmp_path / "third", texts, **how | dict(training__steps=1)))
    assert found != plain
    words = ["--task.kind=documents", "--adapter.kind=neurocache", "--checkpoint.enable"]
    (fault,) = (line for line in lines(*words, f"--adapter.initial_path={tmp_path}") if "initial_path" in line)
    assert f"allowed: a folder with {CONFIG}" in fault
    told = lines(*words, f"--adapter.initial_path={tmp_path / 'adapter'}", "--adapter.neurocache.context=3")
    assert any(f"its {CONFIG} has context_size = 2, the job's is 3" in line for line in told)
