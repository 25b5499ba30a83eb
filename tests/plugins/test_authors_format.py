"""Neurocache adapters in the format of the authors' library: names, refused folders, a job that starts from one."""

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
from torchtitan.core.errors import JobError
from torchtitan.models.gated import tensor_map
from torchtitan.plugins.neurocache import authors_format
from torchtitan.plugins.neurocache.authors_format import CONFIG, WEIGHTS, differences
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Options

HOW = dict(layers=4, retrieval_map={"1": 2}, attention_layers=[1, 3], beside="lora")
LOW_RANK = dict(rank=2, alpha=4.0, target=["*feed_forward.w2"], layers=[1, 3])


def adapted_model(**options):
    return remembering(adapter=LOW_RANK, **HOW | options)


def save_adapter(folder):
    """Write an adapter with random weights; return its model and the adapter."""
    model, installed = adapted_model()
    generator = torch.Generator().manual_seed(1)
    for name in installed.added_parameters:
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.randn(model.get_parameter(name).shape, generator=generator) / 10)
    installed.write_folder(folder, tensor_map(model.args), installed.full_tensors([model]), "the/model")
    return model, installed


def test_names_and_config_are_those_of_the_authors_library(tmp_path):
    model, installed = save_adapter(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    low_rank = {name for name in stored if "lora" in name}
    assert low_rank == {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_{side}.weight" for layer in (1, 3) for side in "AB"
    }
    assert stored.keys() - low_rank == {"h_proj.weight", "h_norm.weight", "h_norm.bias"} | {
        f"cache_attns.{number}.{letter}_proj.weight" for number in (0, 1) for letter in "qkvo"
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


def test_an_unknown_key_of_the_config_is_refused_by_name(tmp_path):
    (tmp_path / "neurocache_config.json").write_text('{"cache_type": "FIFO", "decay": 0.5}')
    with pytest.raises(JobError, match="neurocache_config.json has a key .*: decay = 0.5; remove it"):
        authors_format.read(tmp_path)


def test_a_written_adapter_gives_the_same_outputs_when_read(tmp_path):
    model, installed = save_adapter(tmp_path / "adapter")
    other, other_adapter = adapted_model()
    other_adapter.load_tensors([other], other_adapter.read_folder(tmp_path / "adapter", tensor_map(model.args)))
    with torch.no_grad():
        outputs = [
            read(network.eval(), by, segments(3)) for network, by in ((model, installed), (other, other_adapter))
        ]
    assert torch.equal(*outputs)
    scrambled, by = adapted_model(compat_head_layout=True)  # the head layout of the authors' library
    by.load_tensors([scrambled], by.read_folder(tmp_path / "adapter", tensor_map(model.args)))
    with torch.no_grad():
        assert not torch.allclose(read(scrambled.eval(), by, segments(3)), outputs[0])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(compression=8), "compression_factor = 4, the job's is 8"),
        (dict(window=4), "neighborhood_size = 2, the job's is 4"),
        (dict(retrieval_map={"1": 1}), r"retrieval_map = \{'1': 2\}, attention_layers = \[1, 3\], the job's are"),
    ],
)
def test_an_adapter_of_another_job_is_refused(options, message, tmp_path):
    save_adapter(tmp_path / "adapter")
    model, installed = adapted_model(**options)
    with pytest.raises(JobError, match=message):
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))


def test_an_incomplete_folder_is_refused(tmp_path):
    model, installed = save_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(file)
    incomplete = {name: value for name, value in tensors.items() if name != "h_norm.bias"}
    save_file(incomplete | {"h_proj.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(
        JobError, match=r"h_proj.weight has shape \(3, 3\), the job's is \(8, 32\); it lacks h_norm.bias"
    ):
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))
    save_file({name: value for name, value in tensors.items() if "lora_A" not in name}, file)
    with pytest.raises(JobError, match="it lacks base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"):
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))
    file.unlink()
    with pytest.raises(JobError, match=f"no {WEIGHTS} that can be read.*of a .bin file make one first"):
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))
    (tmp_path / "adapter" / CONFIG).write_text("[]")
    with pytest.raises(JobError, match="holds no JSON object"):
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))
    (tmp_path / "adapter" / CONFIG).unlink()
    os.mkfifo(tmp_path / "adapter" / CONFIG)
    with pytest.raises(JobError, match="is not a regular file"):  # opening it would block
        installed.read_folder(tmp_path / "adapter", tensor_map(model.args))


def test_other_trained_weights_cannot_be_written(tmp_path):
    model, installed = remembering(adapter=dict(train_fully=["norm.weight"]))
    with pytest.raises(JobError, match=r"trained too \(norm.weight\); keep the run's checkpoints"):
        installed.write_folder(
            tmp_path / "adapter", tensor_map(model.args), installed.full_tensors([model]), "the/model"
        )
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("config", [dict(retrieval_map={"1": math.inf}), dict(attention_layers=[1, -math.inf])])
def test_infinite_layer_numbers_are_reported_as_differences(config):
    (message,) = differences(config, Options(), 4)
    assert "inf" in message and "the job's are {'3': 3} and [3]" in message


def losses(argv):
    return [row["loss"] for row in train(argv)[0]]


def test_an_exported_adapter_initializes_another_run(tmp_path, capsys):
    texts = write_texts(tmp_path / "data")
    cache = dict(cache_size=64, topk=4, cache_dtype="float32", beside="lora")
    settings = {f"adapter__neurocache__{name}": value for name, value in cache.items()}
    settings |= dict(task__kind="documents", adapter__kind="neurocache", adapter__rank=2, training__steps=2)
    settings |= dict(checkpoint__enable=True, training__local_batch_size=2, training__global_batch_size=4)
    run_ranks(1, losses, arguments(tmp_path / "first", texts, **settings))
    assert cli.main(["export", str(tmp_path / "first"), "--to", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / CONFIG).is_file()
    assert capsys.readouterr().out.endswith("the adapter of step-00000002, in the layout of the authors' library\n")
    assert cli.main(["export", str(tmp_path / "first"), "--to", str(tmp_path / "merged"), "--merge"]) != 0
    assert "without a cache" in capsys.readouterr().err
    from_adapter = settings | dict(training__steps=1, adapter__initial_path=tmp_path / "adapter")
    (continued,) = run_ranks(1, losses, arguments(tmp_path / "second", texts, **from_adapter))
    (plain,) = run_ranks(1, losses, arguments(tmp_path / "third", texts, **settings | dict(training__steps=1)))
    assert continued != plain
    options = ["--task.kind=documents", "--adapter.kind=neurocache", "--checkpoint.enable"]
    (fault,) = (line for line in lines(*options, f"--adapter.initial_path={tmp_path}") if "initial_path" in line)
    assert f"allowed: a folder with {CONFIG}" in fault
    faults = lines(*options, f"--adapter.initial_path={tmp_path / 'adapter'}", "--adapter.neurocache.context=3")
    assert any(f"its {CONFIG} has context_size = 2, the job's is 3" in line for line in faults)
