"""Sequence classification: accuracy, equal counts under every plan, padding on either side, import and export.

A run starts from a masked-word model's folder, and transformers opens the exported classifier.
"""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support import jobs, judged
from tests.support.classification_jobs import DEEPER, ROBERTA, SIZES, TWO_CLASSES, job_arguments, validations
from tests.support.judged import TP, lines
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.config.manager import load
from torchtitan.datasets import open_source
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.losses.classification import ClassCrossEntropy, classification_metrics
from torchtitan.models.gpt2 import CONFIG as GPT2_CONFIG
from torchtitan.models.gpt2 import GPT2Args
from torchtitan.models.hf.save import SourceConfigs, build_extra_files
from torchtitan.models.roberta import CONFIG, RobertaArgs
from torchtitan.training.inference_model import load_model

anywhere = judged.anywhere
MODELS = ("gpt2", "opt", "roberta")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train each model and export it in Hugging Face's format; the folder of the runs."""
    folder = tmp_path_factory.mktemp("classes")
    exported = dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    for model in MODELS:
        run_ranks(1, jobs.train, job_arguments(folder / model, model, task__labels='["bad", "good"]', **exported))
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_held_out_sentences_are_classified(trained, model):
    """Chance is 0.5. The last word alone would reach 0.8, because a negation inverts one in five sentences."""
    (row,) = validations(trained / model)
    assert row["validation_accuracy"] > 0.95 and row["validation_f1"] > 0.95
    assert row["validation_loss"] < 0.2


@pytest.mark.parametrize("model", MODELS)
def test_transformers_computes_the_same_logits(trained, model):
    """transformers opens the exported folder. Logits are equal for single sentences and in a padded batch."""
    hf_model = AutoModelForSequenceClassification.from_pretrained(trained / model / "model_hf").eval()
    config = load(job_arguments(trained / model, model))
    model_here, _ = load_model(ResolvedJob(config), trained / model / "model_hf", torch.device("cpu"))
    tokenizer, source = build_tokenizer("debug"), open_source("sentiment_validation", None, RecordReader())
    for number in range(0, 60, 7):
        ids = tokenizer.encode(source.get(number).text, bos=True, eos=model == "roberta")
        tokens = torch.tensor([ids])
        with torch.no_grad():
            expected, logits = hf_model(tokens).logits[0], model_here(tokens)[0, 0 if model == "roberta" else -1]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert hf_model.config.id2label == {0: "bad", 1: "good"}
    pad = hf_model.config.pad_token_id
    padded = torch.tensor([ids, [*ids[:-4], *[pad] * 4]])  # in a batch transformers finds the last token by the padding
    with torch.no_grad():
        batched = hf_model(padded, attention_mask=(padded != pad).long()).logits
        unpadded = hf_model(padded[1:, :-4]).logits
    if model != "roberta":
        torch.testing.assert_close(batched[1:], unpadded, rtol=1e-5, atol=1e-5)


def test_an_exported_config_names_the_new_head():
    args = RobertaArgs(dim=16, n_layers=1, n_heads=2, ffn_dim=16, n_classes=2)
    source_config = CONFIG.to_hf(replace(args, n_classes=0)) | {"initializer_range": 0.3}
    ids = dict(tokenizer_files={}, bos_id=0, end_ids=[2])
    config = json.loads(
        build_extra_files(CONFIG, args, "float32", source=SourceConfigs(source_config), **ids)["config.json"]
    )
    assert config["architectures"] == ["RobertaForSequenceClassification"] and config["initializer_range"] == 0.3
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"} and config["pad_token_id"] == 1


@pytest.mark.parametrize(
    "n_classes, pad_id, expected", [(2, None, 7), (2, 3, 3), (2, 7, 7), (1, 3, 3), (1, 7, None), (1, None, None)]
)
def test_an_end_token_is_no_padding_of_a_reward_model(n_classes, pad_id, expected):
    """A reward is read at it, but transformers reads the last token that is no padding."""
    args = GPT2Args(dim=16, n_layers=1, n_heads=2, ffn_dim=16, n_classes=n_classes)
    ids = dict(tokenizer_files={}, bos_id=0, end_ids=[7, 9], pad_id=pad_id)
    for own_pad in (None, 9):
        source = SourceConfigs(GPT2_CONFIG.to_hf(args) | {"pad_token_id": own_pad})
        files = build_extra_files(GPT2_CONFIG, args, "float32", source=source, **ids)
        is_own_kept = own_pad is not None and n_classes > 1
        assert json.loads(files["config.json"])["pad_token_id"] == (own_pad if is_own_kept else expected)


QUICK = dict(training__steps=3, validation__freq=3, lr_scheduler__warmup_steps=1, model__overrides=DEEPER)
PLANS = {
    "FSDP": dict(parallelism__data_parallel_shard_degree=2, training__local_batch_size=48),
    "TP": dict(parallelism__tensor_parallel_degree=2),
    "CP": dict(parallelism__context_parallel_degree=2),
    "PP": dict(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_microbatch_size=48),
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    ((steps, _),) = run_ranks(1, jobs.train, job_arguments(folder, "roberta", **QUICK))
    return [step["loss"] for step in steps], validations(folder)


@pytest.mark.parametrize("plan", PLANS)
def test_no_plan_changes_loss_or_metrics(one_device, plan, tmp_path):
    losses, expected = one_device
    steps, _ = run_ranks(2, jobs.train, job_arguments(tmp_path, "roberta", **QUICK | PLANS[plan]))[0]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-4)
    for row, expected_row in zip(validations(tmp_path), expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_padding_on_either_side_is_the_same(model, tmp_path):
    """Each sample is one record, and the loss does not depend on its position in the sample."""
    curves = []
    for side in ("right", "left"):
        options = QUICK | dict(data__packing="off", data__padding=side, training__seq_len=32, validation__enable=False)
        ((steps, _),) = run_ranks(1, jobs.train, job_arguments(tmp_path / side, model, **options))
        curves.append([step["loss"] for step in steps])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_a_classifier_starts_from_a_masked_word_model(tmp_path):
    """The body's weights are loaded; the classification head is initialized at random."""
    masked = SIZES.replace(", n_classes=2", "")
    folder = tmp_path / "words"
    options = dict(task__kind="masked_lm", task__mask_token="<|reserved_special_token_0|>", model__overrides=masked)
    options |= dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    options |= dict(training__steps=1, lr_scheduler__warmup_steps=0, validation__enable=False, validation__samples=80)
    run_ranks(1, jobs.train, job_arguments(folder, "roberta", **options))
    start = dict(checkpoint__enable=True, checkpoint__initial_load_path=folder / "model_hf")
    start |= dict(checkpoint__initial_load_in_hf=True, model__flavor="from_hf", model__hf_folder=folder / "model_hf")
    start |= dict(model__overrides="{n_classes=2}", training__steps=1, validation__freq=1, optimizer__lr=1e-9)
    start |= dict(lr_scheduler__warmup_steps=0)
    run_ranks(1, jobs.train, job_arguments(tmp_path / "classes", "roberta", **start))
    config = load(job_arguments(tmp_path / "classes", "roberta", **start))
    trained, _ = load_model(ResolvedJob(config), find_weights(tmp_path / "classes")[1], torch.device("cpu"))
    body, _ = load_model(
        ResolvedJob(load(job_arguments(folder, "roberta", **options))), folder / "model_hf", torch.device("cpu")
    )
    classifier_weights, body_weights = trained.state_dict(), body.state_dict()
    assert classifier_weights["output.weight"].shape == (2, 64) and classifier_weights["output.weight"].std() > 0.01
    for name in body_weights.keys() - {name for name in body_weights if name.startswith(("norm.", "output."))}:
        torch.testing.assert_close(classifier_weights[name], body_weights[name], rtol=1e-5, atol=1e-6)


def test_measures_by_hand():
    """8 of 10 records of class 0 are classified correctly, and 3 of 5 of class 1."""
    two = classification_metrics(torch.tensor([8, 2, 2, 3]))
    assert two["accuracy"] == pytest.approx(11 / 15) and two["f1"] == pytest.approx(2 * 3 / (5 + 5))
    three = classification_metrics(torch.tensor([2, 0, 0, 0, 0, 2, 0, 0, 2]))
    assert three == pytest.approx({"accuracy": 4 / 6, "f1": (1 + 0 + 2 * 2 / 6) / 3})
    assert classification_metrics(torch.zeros(4)) == {"accuracy": 0.0, "f1": 0.0}


def test_only_evaluation_counts_and_only_labels():
    loss, head = ClassCrossEntropy(2), torch.nn.Identity()
    logits = torch.tensor([[[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]], [[0.0, 1.0], [1.0, 0.0], [0.0, 9.0]]])
    labels = torch.tensor([[0, -100, 1], [1, 1, -100]])
    loss(logits, head, {"labels": labels})
    assert loss.take_confusion() is None
    with torch.no_grad():
        loss.eval()(logits, head, {"labels": labels})
    assert loss.take_confusion().tolist() == [1, 0, 2, 1] and loss.take_confusion() is None


def test_with_an_adapter_the_new_head_must_be_trained():
    lora = ("--adapter.kind=lora", "--adapter.rank=4")
    assert lines(*ROBERTA, TWO_CLASSES, *lora) == [
        "adapter.train_fully: given []; allowed: patterns that match norm.dense.weight and output.weight, the head "
        "of classes; "
        'write ["norm.dense.*", "output.*"], or train_dense_rest = true'
    ]
    assert lines(*ROBERTA, TWO_CLASSES, *lora, '--adapter.train_fully=["norm.dense.*", "output.*"]') == []
    assert lines(*ROBERTA, TWO_CLASSES, *lora, "--adapter.train_dense_rest") == []


def test_faults_of_classification_jobs(anywhere):
    assert lines(*ROBERTA, TWO_CLASSES) == []
    assert lines(*ROBERTA) == [
        'model.overrides: given n_classes = 0; allowed: n_classes of at least 2 with task.kind = "seq_cls"; write '
        "model.overrides = {n_classes = 2}"
    ]
    assert lines(*ROBERTA, TWO_CLASSES, '--task.labels=["a", "b", "c"]') == [
        'task.labels: given ["a", "b", "c"]; allowed: 2 names, one for each of n_classes; correct either'
    ]
    assert lines(*ROBERTA, TWO_CLASSES, '--task.labels=["a", "a"]') == [
        'task.labels: given ["a", "a"]; allowed: distinct names; drop the repeated ones'
    ]
    assert lines(*ROBERTA, TWO_CLASSES, "--data.train_on=all", "--data.too_long=split") == [
        'data.train_on: given "all"; allowed: unset with task.kind = seq_cls, which only learns the class of a '
        "record; drop it",
        'data.too_long: given "split"; allowed: error, drop or truncate with task.kind = seq_cls, as a class '
        "belongs to a "
        'whole record; write "truncate"',
    ]
    (fault,) = lines(*ROBERTA[:3], TWO_CLASSES)
    assert "'python_stdlib' has no classes; allowed: text, sentiment, sentiment_validation, huggingface" in fault
    (fault,) = lines(*ROBERTA, TWO_CLASSES, "--task.label_field=stars")
    assert "sentiment, sentence 0: field 'stars' is not there" in fault
    (fault,) = lines("--model.name=olmo2", *ROBERTA[1:])
    assert "another task for model olmo2, which has no classification head" in fault
    (fault,) = lines(*ROBERTA, "--model.overrides={n_classes = 3}", TP + "2")
    assert "which does not divide n_classes 3" in fault


def test_preview_shows_the_class_of_each_record(tmp_path, capsys):
    argv = job_arguments(tmp_path, "gpt2", task__labels='["bad", "good"]')
    assert cli.main(["preview", *argv, "--samples", "2"]) == 0
    output = capsys.readouterr().out
    assert ", class 1 (good) --" in output and ", class 0 (bad) --" in output and ", padding --" in output


def test_generate_refuses_a_classifier(trained, capsys):
    assert cli.main(["generate", str(trained / "gpt2")]) != 0
    assert "this gpt2 distinguishes 2 classes; give a causal language model" in capsys.readouterr().err


def pretrain(folder, model):
    """Train a model of words in folder/run, and write it to folder/hf too."""
    words = dict(task__kind="masked_lm" if model == "roberta" else "pretrain", training__steps=2)
    words |= dict(model__overrides=SIZES.replace(", n_classes=2", ""), model__name=model, training__seq_len=64)
    words |= dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, model__tokenizer_path="debug")
    words |= dict(training__local_batch_size=8)
    if model == "roberta":
        words |= dict(task__mask_token="<|reserved_special_token_0|>")
    texts = jobs.write_texts(folder / "texts")
    run_ranks(1, jobs.train, jobs.arguments(folder / "run", texts, **words))
    assert cli.main(["convert", str(folder / "run/checkpoint"), str(folder / "hf"), "--to", "hf"]) == 0


@pytest.mark.parametrize("source", ["run/checkpoint", "run/model"])
@pytest.mark.parametrize("model", MODELS)
def test_a_language_model_of_this_project_gets_a_fresh_head(model, source, tmp_path):
    """Start from a checkpoint or an export of pretraining, as from a Hugging Face folder of it."""
    pretrain(tmp_path, model)
    classes = dict(training__steps=2, validation__enable=False, lr_scheduler__warmup_steps=1)
    losses = []
    for base in (tmp_path / source, tmp_path / "hf"):
        start = dict(checkpoint__initial_load_path=base)
        arguments = job_arguments(tmp_path / f"classes {base.name}", model, **classes | start)
        ((steps, _),) = run_ranks(1, jobs.train, [a for a in arguments if not a.startswith("--validation")])
        losses.append(steps[0]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("source", ["run/checkpoint", "hf"])
@pytest.mark.parametrize("model, head", [("gpt2", ["output.*"]), ("roberta", ["output.*", "norm.dense.*"])])
def test_an_adapter_alone_on_a_language_model_is_read_with_its_head(model, head, source, tmp_path):
    """The base has no head over classes; the checkpoint with the adapter has it."""
    pretrain(tmp_path, model)
    settings = dict(training__steps=2, lr_scheduler__warmup_steps=1, checkpoint__enable=True, adapter__save="alone")
    settings |= dict(adapter__kind="lora", adapter__rank=2, checkpoint__initial_load_path=tmp_path / source)
    arguments = job_arguments(tmp_path / "classes", model, **settings, adapter__train_fully=json.dumps(head))
    arguments = [a for a in arguments if not a.startswith("--validation")]
    run_ranks(1, jobs.train, arguments)
    assert cli.main(["export", str(tmp_path / "classes"), "--to", str(tmp_path / "export"), "--merge"]) == 0
    config = load(arguments)
    (checkpoint,) = (tmp_path / "classes/checkpoint").glob("step-*")
    model_here, _ = load_model(ResolvedJob(config), checkpoint, torch.device("cpu"))
    hf_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = model_here(tokens)[0, 0 if model == "roberta" else -1]
        assert (logits - hf_model(tokens).logits[0]).abs().max() < 1e-4
