"""Telling classes apart: learned far above chance, counted the same under every plan, padded on either side; from a
folder of a model of words, and to one that transformers opens.
"""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support import jobs, judged
from tests.support.judged import TP, lines
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.config.manager import load
from torchtitan.datasets import open_source
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.losses.classification import ClassCrossEntropy, measures
from torchtitan.models.hf.save import Source, beside_weights
from torchtitan.models.roberta import CONFIG, RobertaArgs
from torchtitan.training.inference_model import filled_model

anywhere = judged.anywhere
MODELS = ("gpt2", "opt", "roberta")
SIZES = "{dim=64, n_layers=2, n_heads=4, ffn_dim=128, vocab_size=2048, max_seq_len=64, n_classes=2}"
DEEPER = SIZES.replace("n_layers=2", "n_layers=4")


def words(folder, model, **options):
    settings = dict(model__name=model, model__overrides=SIZES, model__tokenizer_path="debug", task__kind="seq_cls")
    settings |= dict(training__dataset="sentiment", training__seq_len=64, training__local_batch_size=96)
    settings |= dict(training__global_batch_size=96, validation__enable=True, validation__samples=0)
    settings |= dict(validation__dataset="sentiment_validation", validation__local_batch_size=96)
    settings |= dict(training__steps=75, validation__freq=75, optimizer__lr=3e-3, lr_scheduler__warmup_steps=10)
    return [word for word in jobs.arguments(folder, "", **settings | options) if not word.endswith("dataset_path=")]


def validations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "validation_loss" in row]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run of each model, which writes a folder of Hugging Face at its end."""
    folder = tmp_path_factory.mktemp("classes")
    exported = dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    for model in MODELS:
        run_ranks(1, jobs.train, words(folder / model, model, task__labels='["bad", "good"]', **exported))
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_sentences_that_were_not_seen_are_told_apart(learned, model):
    """Chance is 0.5, and the last word of a sentence alone gets 0.8: one in five is turned round."""
    (told,) = validations(learned / model)
    assert told["validation_accuracy"] > 0.95 and told["validation_f1"] > 0.95
    assert told["validation_loss"] < 0.2


@pytest.mark.parametrize("model", MODELS)
def test_transformers_tells_the_same(learned, model):
    """Of the folder that the run wrote, sentence by sentence."""
    theirs = AutoModelForSequenceClassification.from_pretrained(learned / model / "model_hf").eval()
    config = load(words(learned / model, model))
    ours, _ = filled_model(config, learned / model / "model_hf", torch.device("cpu"))
    tokenizer, source = build_tokenizer("debug"), open_source("sentiment_validation", None, RecordReader())
    for number in range(0, 60, 7):
        ids = tokenizer.encode(source.get(number).text, bos=True, eos=model == "roberta")
        tokens = torch.tensor([ids])
        with torch.no_grad():
            expected, given = theirs(tokens).logits[0], ours(tokens)[0, 0 if model == "roberta" else -1]
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    pad = theirs.config.pad_token_id
    padded = torch.tensor([ids, [*ids[:-4], *[pad] * 4]])  # of a batch transformers finds the last token by its pads
    with torch.no_grad():
        both = theirs(padded, attention_mask=(padded != pad).long()).logits
        alone = theirs(padded[1:, :-4]).logits
    if model != "roberta":
        torch.testing.assert_close(both[1:], alone, rtol=1e-5, atol=1e-5)


def test_a_head_of_its_own_is_said_where_the_source_had_another():
    args = RobertaArgs(dim=16, n_layers=1, n_heads=2, ffn_dim=16, n_classes=2)
    said = CONFIG.to_hf(replace(args, n_classes=0)) | {"initializer_range": 0.3}
    ids = dict(tokenizer_files={}, bos_id=0, end_ids=[2])
    written = json.loads(beside_weights(CONFIG, args, "float32", source=Source(said), **ids)["config.json"])
    assert written["architectures"] == ["RobertaForSequenceClassification"] and written["initializer_range"] == 0.3
    assert written["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"} and written["pad_token_id"] == 1


QUICK = dict(training__steps=3, validation__freq=3, lr_scheduler__warmup_steps=1, model__overrides=DEEPER)
PLANS = {
    "FSDP": dict(parallelism__data_parallel_shard_degree=2, training__local_batch_size=48),
    "TP": dict(parallelism__tensor_parallel_degree=2),
    "CP": dict(parallelism__context_parallel_degree=2),
    "PP": dict(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_microbatch_size=48),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    ((steps, _),) = run_ranks(1, jobs.train, words(folder, "roberta", **QUICK))
    return [step["loss"] for step in steps], validations(folder)


@pytest.mark.parametrize("plan", PLANS)
def test_no_plan_changes_what_is_counted(alone, plan, tmp_path):
    losses, expected = alone
    steps, _ = run_ranks(2, jobs.train, words(tmp_path, "roberta", **QUICK | PLANS[plan]))[0]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-4)
    for told, wanted in zip(validations(tmp_path), expected, strict=True):
        assert told == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_padding_on_either_side_is_the_same(model, tmp_path):
    """A record in each sample, whose place in it changes nothing."""
    curves = []
    for side in ("right", "left"):
        options = QUICK | dict(data__packing="off", data__padding=side, training__seq_len=32, validation__enable=False)
        ((steps, _),) = run_ranks(1, jobs.train, words(tmp_path / side, model, **options))
        curves.append([step["loss"] for step in steps])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_a_model_of_words_learns_classes(tmp_path):
    """Its body is taken, and the head of classes drawn."""
    masked = SIZES.replace(", n_classes=2", "")
    folder = tmp_path / "words"
    options = dict(task__kind="masked_lm", task__mask_token="<|reserved_special_token_0|>", model__overrides=masked)
    options |= dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    options |= dict(training__steps=1, lr_scheduler__warmup_steps=0, validation__enable=False, validation__samples=80)
    run_ranks(1, jobs.train, words(folder, "roberta", **options))
    start = dict(checkpoint__enable=True, checkpoint__initial_load_path=folder / "model_hf")
    start |= dict(checkpoint__initial_load_in_hf=True, model__flavor="from_hf", model__hf_folder=folder / "model_hf")
    start |= dict(model__overrides="{n_classes=2}", training__steps=1, validation__freq=1, optimizer__lr=1e-9)
    start |= dict(lr_scheduler__warmup_steps=0)
    run_ranks(1, jobs.train, words(tmp_path / "classes", "roberta", **start))
    config = load(words(tmp_path / "classes", "roberta", **start))
    trained, _ = filled_model(config, find_weights(tmp_path / "classes")[1], torch.device("cpu"))
    body, _ = filled_model(load(words(folder, "roberta", **options)), folder / "model_hf", torch.device("cpu"))
    mine, theirs = trained.state_dict(), body.state_dict()
    assert mine["output.weight"].shape == (2, 64) and mine["output.weight"].std() > 0.01
    for name in theirs.keys() - {name for name in theirs if name.startswith(("norm.", "output."))}:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_measures_by_hand():
    """Of 10 records of class 0, 8 are told; of 5 of class 1, 3."""
    two = measures(torch.tensor([8, 2, 2, 3]))
    assert two["accuracy"] == pytest.approx(11 / 15) and two["f1"] == pytest.approx(2 * 3 / (5 + 5))
    three = measures(torch.tensor([2, 0, 0, 0, 0, 2, 0, 0, 2]))
    assert three == pytest.approx({"accuracy": 4 / 6, "f1": (1 + 0 + 2 * 2 / 6) / 3})
    assert measures(torch.zeros(4)) == {"accuracy": 0.0, "f1": 0.0}


def test_only_evaluation_counts_and_only_labels():
    loss, head = ClassCrossEntropy(2), torch.nn.Identity()
    logits = torch.tensor([[[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]], [[0.0, 1.0], [1.0, 0.0], [0.0, 9.0]]])
    labels = torch.tensor([[0, -100, 1], [1, 1, -100]])
    loss(logits, head, {"labels": labels})
    assert loss.take_counts() is None
    with torch.no_grad():
        loss.eval()(logits, head, {"labels": labels})
    assert loss.take_counts().tolist() == [1, 0, 2, 1] and loss.take_counts() is None


def test_an_adapter_leaves_no_head_of_classes_as_it_was_drawn():
    lora = ("--adapter.kind=lora", "--adapter.rank=4")
    assert lines(*ROBERTA, TWO, *lora) == [
        "adapter.train_fully: given []; allowed: what fits norm.dense.weight and output.weight, the head of classes; "
        'write ["norm.dense.*", "output.*"], or train_dense_rest = true'
    ]
    assert lines(*ROBERTA, TWO, *lora, '--adapter.train_fully=["norm.dense.*", "output.*"]') == []
    assert lines(*ROBERTA, TWO, *lora, "--adapter.train_dense_rest") == []


ROBERTA = ("--model.name=roberta", "--training.seq_len=64", "--task.kind=seq_cls", "--training.dataset=sentiment")
TWO = "--model.overrides={n_classes = 2}"


def test_what_classes_ask_of_a_job(anywhere):
    assert lines(*ROBERTA, TWO) == []
    assert lines(*ROBERTA) == [
        'model.overrides: given n_classes = 0; allowed: n_classes of at least 2 with task.kind = "seq_cls"; write '
        "model.overrides = {n_classes = 2}"
    ]
    assert lines(*ROBERTA, TWO, '--task.labels=["a", "b", "c"]') == [
        'task.labels: given ["a", "b", "c"]; allowed: 2 names, one for each of n_classes; correct either'
    ]
    assert lines(*ROBERTA, TWO, '--task.labels=["a", "a"]') == [
        'task.labels: given ["a", "a"]; allowed: names that are different; drop what is there twice'
    ]
    assert lines(*ROBERTA, TWO, "--data.train_on=all", "--data.too_long=split") == [
        'data.train_on: given "all"; allowed: unset with task.kind = seq_cls, which learns the class of a record '
        "alone; drop it",
        'data.too_long: given "split"; allowed: error, drop or truncate with task.kind = seq_cls: the class is of the '
        'whole record; write "truncate"',
    ]
    (fault,) = lines(*ROBERTA[:3], TWO)
    assert "'python_stdlib' has no classes; allowed: text, sentiment, sentiment_validation, huggingface" in fault
    (fault,) = lines(*ROBERTA, TWO, "--task.label_field=stars")
    assert "sentiment, sentence 0: field 'stars' is not there" in fault
    (fault,) = lines("--model.name=llama3", *ROBERTA[1:])
    assert "another one for model llama3, which has no head of classes" in fault
    (fault,) = lines(*ROBERTA, "--model.overrides={n_classes = 3}", TP + "2")
    assert "which does not divide n_classes 3" in fault


def test_preview_shows_the_class_of_each_record(tmp_path, capsys):
    argv = words(tmp_path, "gpt2", task__labels='["bad", "good"]')
    assert cli.main(["preview", *argv, "--samples", "2"]) == 0
    said = capsys.readouterr().out
    assert ", class 1 (good) --" in said and ", class 0 (bad) --" in said and ", padding --" in said


def test_nobody_goes_on_with_a_text_by_classes(learned, capsys):
    assert cli.main(["generate", str(learned / "gpt2")]) != 0
    assert "this gpt2 tells 2 classes apart; give a decoder of words" in capsys.readouterr().err
