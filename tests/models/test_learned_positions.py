"""Tests of GPT-2, OPT and RoBERTa: sizes, classification heads, and logits, gradients and folders of transformers."""

import dataclasses
import json
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    CamembertConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
)

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    close,
    compare,
    compare_positions,
    configs,
    refuse_config,
    refuse_folder,
    same,
    save_and_load,
    tokens_for,
    twin,
    write_folder,
)
from tests.support.judged import anywhere, lines  # noqa: F401
from tests.support.tiny_decoders import GPT2 as TINY_GPT2
from tests.support.tiny_decoders import OPT as TINY_OPT
from tests.support.tiny_decoders import ROBERTA as TINY_ROBERTA
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal
from torchtitan.models import SIZES, family_in
from torchtitan.models.gpt2.model import GPT2
from torchtitan.models.gpt2.model import HF as GPT2_HF
from torchtitan.models.hf.save import build_extra_files, read_source
from torchtitan.models.opt.model import HF as OPT_HF
from torchtitan.models.opt.model import OPT
from torchtitan.models.roberta.model import HF as ROBERTA_HF
from torchtitan.models.roberta.model import Roberta


class Family(NamedTuple):
    """A family's classes here and in transformers, and its tiny sizes."""

    model: type
    hf: Any
    shapes: dict
    config: type
    word_model: type
    classifier: type
    tied: list  # parameters that transformers ties to the embedding

    def hf_class(self, args):
        return self.classifier if args.n_classes else self.word_model


FAMILIES = {
    "gpt2": Family(
        GPT2, GPT2_HF, TINY_GPT2, GPT2Config, GPT2LMHeadModel, GPT2ForSequenceClassification, ["lm_head.weight"]
    ),
    "opt": Family(OPT, OPT_HF, TINY_OPT, OPTConfig, OPTForCausalLM, OPTForSequenceClassification, ["lm_head.weight"]),
    "roberta": Family(
        Roberta,
        ROBERTA_HF,
        TINY_ROBERTA,
        RobertaConfig,
        RobertaForMaskedLM,
        RobertaForSequenceClassification,
        ["lm_head.decoder.weight", "lm_head.decoder.bias"],
    ),
}
SHAPES = [
    pytest.param(family, shape, id=f"{name}, {shape}") for name, family in FAMILIES.items() for shape in family.shapes
]
WORD_ARGS = {name: family.shapes["words"] for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers": 0}, "n_layers = 0: must be at least 1"),
        ({"n_heads": 5}, "dim = 32 with n_heads = 5: dim must be a multiple of n_heads"),
        ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and less than 1"),
        ({"n_classes": -1}, "n_classes = -1: must not be negative"),
    ],
)
def test_impossible_sizes_are_refused(name, change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(WORD_ARGS[name], **change)


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("family, shape", [case for case in SHAPES if "classes" not in case.id])
def test_logits_and_every_gradient_equal_transformers(family, shape, dtype, tolerance):
    model = build(family.model, family.shapes[shape], dtype=dtype)
    compare(model, twin(family.word_model, family.config, model, family.hf, dtype, family.tied), family.hf, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_may_begin_at_any_number(name):
    family = FAMILIES[name]
    model = build(family.model, WORD_ARGS[name])
    reference = twin(family.word_model, family.config, model, family.hf, tied=family.tied)
    compare_positions(model, reference, first=0 if name == "opt" else model.entrance.first)


@pytest.mark.parametrize("name, positions", [("gpt2", [11, 6]), ("opt", [11, 6]), ("roberta", [0, 0])])
def test_classes_equal_transformers(name, positions):
    """Transformers classifies by the last token before the pads, or by the first one (RoBERTa)."""
    family, args = FAMILIES[name], FAMILIES[name].shapes["classes"]
    model = build(family.model, args, dtype=torch.float64)
    reference = twin(family.classifier, family.config, model, family.hf, torch.float64)
    pad = reference.config.pad_token_id = 1
    tokens = tokens_for(args)
    tokens[tokens == pad] = 2
    tokens[1, 7:] = pad
    documents = (tokens == pad).long()
    ours = model(tokens, document_ids=documents)[torch.arange(2), torch.tensor(positions)]
    expected = reference(tokens, attention_mask=1 - documents).logits
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    ours.square().sum().backward()
    expected.square().sum().backward()
    gradients = family.hf.to_hf({name: p.grad for name, p in model.named_parameters()}, args)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_roberta_attends_to_later_tokens_of_the_same_document():
    model = build(Roberta, WORD_ARGS["roberta"])
    tokens = tokens_for(model.args)
    documents = torch.tensor([0] * 8 + [1] * 4).expand(2, -1)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % model.args.vocab_size
    before, after = (model(ids, document_ids=documents) for ids in (tokens, changed))
    assert (before[:, :8] != after[:, :8]).any(-1).all() and torch.equal(before[:, 8:], after[:, 8:])


def test_initial_weights_follow_the_recipe():
    model = GPT2(WORD_ARGS["gpt2"])
    assert model.init_rule("layers.1.attention.wo.weight") == model.init_rule("layers.0.feed_forward.w2.weight")
    assert model.init_rule("layers.1.attention.wo.weight") == Normal(0.02 / 2)  # scaled by 1 / sqrt(2 x 2 layers)
    assert model.init_rule("layers.1.attention.wq.weight") == model.init_rule("tok_embeddings.weight") == Normal(0.02)
    assert model.init_rule("norm.weight") == Constant(1.0)
    assert model.init_rule("layers.1.attention.wo.bias") == Constant(0.0)
    model = Roberta(WORD_ARGS["roberta"])
    assert model.init_rule("layers.1.attention.wo.weight") == model.init_rule("norm.dense.weight") == Normal(0.02)
    assert model.init_rule("norm.norm.weight") == model.init_rule("entrance.norm.weight") == Constant(1.0)


@pytest.mark.parametrize("name, flavor", [(name, flavor) for name in FAMILIES for flavor in SIZES[name]])
def test_configs_round_trip_through_transformers(name, flavor, tmp_path):
    args, family = SIZES[name][flavor], FAMILIES[name]
    for stored in configs(args, family.hf, family.config, tmp_path):
        assert family.hf.config.args_from_config(stored) == args


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_classes_round_trips_through_config_json(name, tmp_path):
    args, family = dataclasses.replace(WORD_ARGS[name], n_classes=3), FAMILIES[name]
    for stored in configs(args, family.hf, family.config, tmp_path):
        assert family.hf.config.args_from_config(json.loads(json.dumps(stored))) == args


@pytest.mark.parametrize("family, shape", SHAPES)
def test_state_dicts_round_trip(family, shape):
    check_names_convert_both_ways(build(family.model, family.shapes[shape]), family.hf)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(name, shard_bytes, tmp_path):
    family = FAMILIES[name]
    save_and_load(family.model, WORD_ARGS[name], family.hf, family.word_model, tmp_path, shard_bytes)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_single_file_loads(name, tmp_path):
    family, file = FAMILIES[name], tmp_path / "model.safetensors"
    model, other = (build(family.model, WORD_ARGS[name], seed=seed) for seed in (0, 1))
    family.hf.save_hf_file(file, model.state_dict(), WORD_ARGS[name], torch.float32)
    family.hf.load_hf(file, other, WORD_ARGS[name])
    assert same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("family, shape", SHAPES)
def test_a_folder_that_transformers_writes_loads(family, shape, tmp_path):
    model, other = (build(family.model, family.shapes[shape], seed=seed) for seed in (0, 1))
    reference = twin(family.hf_class(model.args), family.config, model, family.hf, tied=family.tied)
    reference.save_pretrained(tmp_path)
    family.hf.load_hf(tmp_path, other, model.args)
    assert same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", FAMILIES)
def test_names_without_the_base_prefix_load(name, tmp_path):
    """Load weights as the base model saves them and OpenAI published them, with the mask buffers of old folders."""
    family, args = FAMILIES[name], dataclasses.replace(WORD_ARGS[name], n_classes=2)
    model, other = (build(family.model, args, seed=seed) for seed in (0, 1))
    form = family.hf.tensor_map(args)
    bare = {key.removeprefix(form.optional_prefix): t for key, t in family.hf.to_hf(model.state_dict(), args).items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if name == "gpt2" else {}
    write_folder(tmp_path, bare, args, family.hf)
    assert family.hf.load_hf(tmp_path, other, args) == frozenset()
    assert same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_classification_head_keeps_its_initial_weights(name, tmp_path):
    family, word_args = FAMILIES[name], WORD_ARGS[name]
    args = dataclasses.replace(word_args, n_classes=2)
    family.hf.save_hf(tmp_path, build(family.model, word_args).state_dict(), word_args)
    head = family.hf.tensor_map(args).head
    refuse_folder(family.model, args, family.hf, tmp_path, "(score|classifier.dense).weight is missing")
    model, body = build(family.model, args, seed=1), build(family.model, word_args).state_dict()
    drawn = {name: value.clone() for name, value in model.state_dict().items() if name in head}
    assert family.hf.load_hf(tmp_path, model, args, optional_names=head) == head
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in drawn.items())
    assert all(torch.equal(value, body[name]) for name, value in state.items() if name not in head)


def test_a_wrong_joint_matrix_is_named(tmp_path):
    args = WORD_ARGS["gpt2"]
    GPT2_HF.save_hf(tmp_path, build(GPT2, args).state_dict(), args)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "transformer.h.1.attn.c_attn.weight"
    save_file(tensors | {name: tensors[name].t().contiguous()}, file)
    message = rf"fit the model: {name} has shape \(96, 32\), the model's is \(32, 96\)\. Choose"
    refuse_folder(GPT2, args, GPT2_HF, tmp_path, message)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("gpt2", {"model_type": "llama"}, "model_type = 'llama', but this model is a gpt2"),
        ("gpt2", {"n_embd": None}, "no whole number above 0 for n_embd"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu', but this model only has 'gelu_new'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"embd_pdrop": 0.5}, "resid_pdrop = 0.0 and embd_pdrop = 0.5, but this model has one share for both"),
        ("opt", {"model_type": "gpt2"}, "model_type = 'gpt2', but this model is a opt"),
        ("opt", {"ffn_dim": 0}, "no whole number above 0 for ffn_dim"),
        ("opt", {"activation_function": "gelu"}, "activation_function = 'gelu', but this model only has 'relu'"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True, but this model only has False"),
        (
            "roberta",
            {"model_type": "bert"},
            "model_type = 'bert', but this model is one of roberta, xlm-roberta, camembert",
        ),
        ("roberta", {"max_position_embeddings": None}, "no whole number above 0 for max_position_embeddings"),
        ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key', but"),
        ("roberta", {"is_decoder": True}, "is_decoder = True, but this model only has False"),
    ],
)
def test_a_config_of_another_model_is_refused(name, change, message):
    refuse_config(WORD_ARGS[name], FAMILIES[name].hf, change, message)


def test_a_job_cannot_override_max_seq_len_below_seq_len(anywhere):  # noqa: F811
    arguments = ["--model.name=gpt2", "--training.seq_len=64"]
    assert lines(*arguments) == []
    assert lines(*arguments, "--model.overrides={attention_dropout = 0.1}") == []
    (fault,) = lines(*arguments, "--model.overrides={max_seq_len = 32}")
    assert fault == (
        "training.seq_len: given 64; allowed: at most the 32 positions that the model learns; write 32, or "
        "model.overrides = {max_seq_len = 64}, where nothing is loaded"
    )


@pytest.mark.parametrize("shape", TINY_ROBERTA)
@pytest.mark.parametrize("config_class, prefix", [(XLMRobertaConfig, "XLMRoberta"), (CamembertConfig, "Camembert")])
def test_roberta_under_other_names_is_read_and_written_back_under_them(config_class, prefix, shape, tmp_path):
    """Logits, names and config are those of transformers' class of each name, and an exported folder keeps the name."""
    args, first, second = TINY_ROBERTA[shape], tmp_path / "first", tmp_path / "second"
    auto = AutoModelForSequenceClassification if args.n_classes else AutoModelForMaskedLM
    fields = {key: value for key, value in ROBERTA_HF.config_to_hf(args).items() if key != "model_type"}
    reference = auto.from_config(config_class(**fields), attn_implementation="sdpa").eval()
    ours = build(Roberta, args)
    reference.load_state_dict(ROBERTA_HF.to_hf(ours.state_dict(), args), strict=False)
    reference.save_pretrained(first)
    assert type(reference).__name__.startswith(f"{prefix}For") and family_in(first) == "roberta"
    read = ROBERTA_HF.config.args_from_folder(first)
    assert read == args
    model = build(Roberta, read, seed=1)
    ROBERTA_HF.load_hf(first, model, read)
    assert same(model.state_dict(), ours.state_dict())
    logits = (lambda tokens: model(tokens)[:, 0]) if args.n_classes else model
    tokens = tokens_for(args)
    assert close(logits(tokens), reference(tokens).logits, 2e-6)
    source = dict(source=read_source(first), tokenizer_files={}, bos_id=None, end_ids=())
    files = build_extra_files(ROBERTA_HF.config, read, torch.float32, **source)
    ROBERTA_HF.save_hf(second, model.state_dict(), read, extra_files=files)
    loaded = auto.from_pretrained(second).eval()
    assert type(loaded) is type(reference) and loaded.config.architectures == [type(reference).__name__]
    assert close(logits(tokens), loaded(tokens).logits, 2e-6)
