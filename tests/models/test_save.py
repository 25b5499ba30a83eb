"""Round trips in every family: transformers writes a folder, and we load it by its config.json, train and export.

transformers opens the exported model and tokenizer, and continues a text like `torchtitan generate`.
"""

import dataclasses
import io
import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support import jobs
from tests.support.family_folders import SHAPES
from tests.support.hf_parity import eager
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.commands.generate import CONTROLS
from torchtitan.config.manager import load
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.models.hf.save import SourceConfigs, build_extra_files, read_source
from torchtitan.models.llama import CONFIG
from torchtitan.models.spec import MODELS

TOKENIZER = jobs.ROOT / "tests/assets/tokenizer/tiktoken.model"
FAMILIES = [
    "llama3.2",
    "deepseek v2",
    "deepseek v3",
    "falcon_h1",
    "gemma3",
    "granite4",
    "gpt2",
    "lfm2_moe",
    "llama4",
    "mistral",
    "nemotron_h",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "opt 350M",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]


def write_hf_model(shape: str, folder: Path) -> None:
    """Write a transformers model with tokenizer, chat template, two end tokens and keys that our models do not use."""
    args, config_class = SHAPES[shape]
    args = dataclasses.replace(args, vocab_size=2048)
    config = MODELS[shape.split()[0]].hf.config_to_hf(args)
    config |= {"max_position_embeddings": 77, "router_aux_loss_coef": 0.125, "eos_token_id": [1793, 1801]}
    config |= {"bos_token_id": 1792, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**config), **eager(args))
    model.generation_config = GenerationConfig(temperature=0.25, do_sample=True, eos_token_id=[1793, 1801])
    model.save_pretrained(folder)
    for name, content in build_tokenizer(str(TOKENIZER)).as_hf_files().items():
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def job(family: str, home: Path, **options: object) -> list[str]:
    texts = jobs.write_texts(home / "data")
    settings = dict(
        model__name=family,
        model__flavor="from_hf",
        model__hf_folder=home / "theirs",
        model__overrides="{}",
        model__tokenizer_path=home / "theirs",
        training__steps=2,
        checkpoint__enable=True,
        checkpoint__initial_load_path=home / "theirs",
        checkpoint__initial_load_in_hf=True,
        checkpoint__last_save_model_only=True,
        checkpoint__last_save_in_hf=True,
    )
    return jobs.arguments(home / "run", texts, **settings | options)


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """Continue a prompt greedily with transformers' model and tokenizer, without a cache; return the full text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=False)
    return tokenizer.decode(new[0], skip_special_tokens=True)


@pytest.mark.parametrize("shape", FAMILIES)
def test_round_trip_through_training(shape, tmp_path, capsys):
    write_hf_model(shape, tmp_path / "theirs")
    (steps, _) = run_ranks(1, jobs.train, job(shape.split()[0], tmp_path))[0]
    assert len(steps) == 2
    assert (
        cli.main(
            ["generate", str(tmp_path / "run"), "--prompt", "def f", "--temperature", "0", "--max_new_tokens", "9"]
        )
        == 0
    )
    out = tmp_path / "run/model_hf"
    text = greedy(out, "def f", 9).rstrip("\ufffd")  # a character that is not whole yet is not printed
    assert text.translate(CONTROLS) + "\n" == capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("import os", add_special_tokens=False) == build_tokenizer(str(TOKENIZER)).encode(
        "import os"
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "theirs", out))
    spelled = {"dtype", "torch_dtype", "rope_parameters", "rope_theta", "rope_scaling", "transformers_version"}
    spelled |= {"num_nextn_predict_layers"}
    assert {key: after.get(key) for key in before.keys() - spelled} == {
        key: before[key] for key in before.keys() - spelled
    }
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.temperature, generation.eos_token_id) == (0.25, [1793, 1801])
    reloaded = ResolvedJob(load(job(shape.split()[0], tmp_path, model__hf_folder=out))).model.args
    assert reloaded == ResolvedJob(load(job(shape.split()[0], tmp_path))).model.args


def save_sharded(folder: str) -> str:
    """Export under FSDP with tensor parallel; return the warnings that torch prints on this rank."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    torchs = logging.getLogger("torch.distributed.tensor._redistribute")
    torchs.addHandler(handler)
    degrees = {"parallelism__data_parallel_shard_degree": 2, "parallelism__tensor_parallel_degree": 2}
    try:
        jobs.train(job("llama3", Path(folder), training__steps=1, training__local_batch_size=4, **degrees))
    finally:
        torchs.removeHandler(handler)
    return heard.getvalue()


def test_a_sharded_export_prints_no_warning(tmp_path):
    write_hf_model("llama3", tmp_path / "theirs")
    jobs.write_texts(tmp_path / "data")
    assert run_ranks(4, save_sharded, str(tmp_path)) == [""] * 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model_hf")


# Config files next to the weights

ARGS = SHAPES["llama3"][0]
FILES = {"tokenizer.json": b"{}"}


def written_configs(source: SourceConfigs | None, args=ARGS, bos_id: int | None = 1, ends=(2,)) -> tuple[dict, dict]:
    """Return the contents of config.json and generation_config.json."""
    files = build_extra_files(
        CONFIG, args, "bfloat16", source=source, tokenizer_files=FILES, bos_id=bos_id, end_ids=ends
    )
    assert set(files) == {"config.json", "generation_config.json", "tokenizer.json"}
    return json.loads(files["config.json"]), json.loads(files["generation_config.json"])


def test_without_a_source_the_ids_come_from_the_tokenizer():
    config, generation = written_configs(None)
    assert config == CONFIG.to_hf(ARGS, "bfloat16") | {"bos_token_id": 1, "eos_token_id": 2}
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    assert written_configs(None, bos_id=None)[0]["bos_token_id"] is None


def test_keys_of_the_source_format_are_dropped():
    source_config = CONFIG.to_hf(ARGS) | {
        "use_cache": True,
        "auto_map": {"A": "b.C"},
        "dtype": "float16",
        "eos_token_id": [7, 2],
    }
    source_config |= {"rope_parameters": {"rope_theta": ARGS.rope_theta, "rope_type": "default"}}
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}
    config, generation = written_configs(
        SourceConfigs(source_config | {"quantization_config": fp8}, {"top_k": 3, "transformers_version": "5"})
    )
    assert config == CONFIG.to_hf(ARGS, "bfloat16") | {"use_cache": True, "bos_token_id": 1, "eos_token_id": [7, 2]}
    assert generation == {"top_k": 3, "bos_token_id": 1, "eos_token_id": [7, 2]}


def test_the_source_of_another_model_or_tokenizer_is_ignored():
    source_config = CONFIG.to_hf(ARGS) | {"use_cache": True, "eos_token_id": [7, 8]}
    assert written_configs(SourceConfigs(source_config))[0]["eos_token_id"] == 2, "the tokenizer is another"
    assert "use_cache" not in written_configs(SourceConfigs(source_config), dataclasses.replace(ARGS, n_layers=1))[0]
    assert "use_cache" not in written_configs(SourceConfigs(source_config | {"model_type": "mistral"}))[0]


def test_a_source_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="generation_config.json holds no JSON object"):
        read_source(tmp_path)
