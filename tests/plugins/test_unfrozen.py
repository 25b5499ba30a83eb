"""Import of Axolotl's unfrozen_parameters.

Its regexes match the same parameters of a transformers model as the job's patterns match here.
"""

import re
from fnmatch import fnmatchcase

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Gemma3Config, GPT2Config, LlamaConfig, Qwen3MoeConfig

from tests.support.judged import lines
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models.sizes import parameters
from torchtitan.models.spec import MODELS
from torchtitan.plugins.importers import axolotl, parse

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
LLAMA = LlamaConfig(num_hidden_layers=50, **SIZES)
TIED = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
GPT2 = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4)
EXPERTS = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **SIZES)


def import_regexes(config, folder, *regexes, **options):
    config.save_pretrained(folder / "model")
    settings = {"base_model": str(folder / "model"), "datasets": [{"path": "a.jsonl"}], "learning_rate": 1e-4}
    (folder / "job.yml").write_text(yaml.safe_dump(settings | {"unfrozen_parameters": list(regexes)} | options))
    return axolotl.read(parse([str(folder / "job.yml")]))


TRANSLATED = [  # a model's config, the regexes, and the patterns that they become
    (LLAMA, ["^lm_head.weight$"], ["output.weight"]),
    (LLAMA, ["model.layers.4[4-9]+.*"], [*(f"layers.{layer}.*" for layer in range(44, 50))]),
    (LLAMA, ["model.layers.4.+"], ["layers.4.*", *(f"layers.{layer}.*" for layer in range(40, 50))]),
    (LLAMA, ["model.layers.\\d+.mlp", "model.norm"],
     [*(f"layers.*.feed_forward.w{i}.weight" for i in (1, 2, 3)), "norm.weight"]),
    (LLAMA, ["model.layers.(7|11).self_attn.[qk]_proj", "^model.layers.3."],
     ["layers.3.*", *(f"layers.{n}.attention.{w}.weight" for w in ("wq", "wk") for n in (7, 11))]),
    (TIED, ["model.embed_tokens"], ["tok_embeddings.weight"]),
    (TIED, ["model.layers", "lm_head.*"], ["layers.*"]),
    (GPT2, ["transformer.h.1.attn.c_attn.weight"], [f"layers.1.attention.w{x}.weight" for x in "qkv"]),
    (EXPERTS, ["model.layers.1.mlp.experts", "model.layers.0.mlp.gate"],
     [*(f"layers.1.moe.experts.w{i}" for i in (1, 2, 3)), "layers.0.moe.router.gate.weight"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "config, regexes, expected", TRANSLATED, ids=[" ".join(regexes) for _, regexes, _ in TRANSLATED]
)
def test_the_same_parameters_are_chosen(config, regexes, expected, tmp_path):
    patterns = import_regexes(config, tmp_path, *regexes).values["training.unfrozen"]
    assert sorted(patterns) == sorted(expected)
    with torch.device("meta"):
        hf_names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    expected_names = {
        name for name in hf_names if any(re.match(re.sub(r"\.(?!\+)", r"\\.", regex), name) for regex in regexes)
    }
    family = family_for_model_type(config.model_type)
    args = CONFIG_CONVERTERS[family].args_from_folder(tmp_path / "model")
    chosen = [name for name in parameters(args) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    chosen_names = {pattern for name in chosen for pattern in MODELS[family].hf.tensor_map(args).hf_names(name)}
    if config is not EXPERTS:  # this transformers stacks experts; the one that Axolotl used did not
        assert chosen_names == expected_names


WRONG = [  # regexes, and a part of the error
    (["^model.embed_tokens.weight$[:32000]"], "all rows of a matrix are trained, or none: drop [:32000]"),
    (["model.layers.[1]"], "all rows of a matrix are trained, or none: drop [1]"),
    (["model.layers.9."], "regexes of how some of these begin: model.embed_tokens.weight, model.layers.*."),
    (["lm_head", "a" * 301], "regexes without longer than 300 characters"),
    (["model\\.norm"], "a backslash, except in \\d: write a plain dot instead"),
    (["lm_head"] * 2001, "at most 2000"),
]  # fmt: skip


@pytest.mark.parametrize("regexes, message", WRONG, ids=[regexes[-1][:30] for regexes, _ in WRONG])
def test_unsupported_regexes_are_refused(regexes, message, tmp_path):
    faults = import_regexes(TIED, tmp_path, *regexes).faults
    assert len(faults) == 1 and faults[0].key == "unfrozen_parameters" and message in str(faults[0])


def test_regexes_are_refused_for_some_models_and_with_adapters(tmp_path):
    (fault,) = import_regexes(EXPERTS, tmp_path, "model.layers.0.mlp.experts.1.up_proj").faults
    assert "none, or all, of layers.0.moe.experts.w3; its experts are one parameter" in str(fault)
    (fault,) = import_regexes(TIED, tmp_path, "lm_head").faults
    assert "model.embed_tokens.weight" in str(fault), "a tied head is not a parameter"
    (fault,) = import_regexes(TIED, tmp_path, "model.norm", base_model="llama-7b").faults
    assert "with its config.json in llama-7b; download the model" in str(fault)
    adapter = {"adapter": "lora", "lora_target_linear": True, "lora_r": 8, "lora_alpha": 16}
    (fault,) = import_regexes(TIED, tmp_path, "model.norm", **adapter).faults
    assert "nothing with an adapter; Axolotl freezes the adapter too, whose names begin with base_model" in str(fault)


def test_names_in_a_model_with_images(tmp_path):
    config = Gemma3Config(text_config=dict(num_hidden_layers=2, head_dim=8, **SIZES))
    regexes = ("model.language_model.layers.1.*", "model.language_model.norm", "lm_head.*")
    job = import_regexes(config, tmp_path, *regexes)
    assert job.faults == [] and job.values["training.unfrozen"] == ["layers.1.*", "norm.weight"]
    assert "unfrozen_parameters: lm_head.*: no effect, as the head is the embedding" in " ".join(job.notes)
    (fault,) = import_regexes(config, tmp_path, "model.layers.1.*").faults
    assert "model.language_model.layers.*" in str(fault)


def test_check_accepts_the_translated_job(tmp_path):
    job = import_regexes(TIED, tmp_path, "model.layers.1.", "model.norm")
    assert job.values["training.unfrozen"] == ["layers.1.*", "norm.weight"]
    sizes = "--model.overrides={n_layers=2, tied_embeddings=true}"
    assert lines(sizes, '--training.unfrozen=["layers.1.*", "norm.weight"]') == []
