"""`torchtitan evaluate`: loss by position in a document, against losses of single segments, and with several caches."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from tests.support.hf_parity import build
from tests.support.jobs import arguments, train, write_texts
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.adapters import spec_of
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands.generate import find_job
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.job import ResolvedJob
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import HF, Llama

ARGS = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, max_seq_len=128)
TEXTS = ["a document of some length, " * 12, "short", "another one " * 5, "x"]
SEQ_LEN = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    HF.save_hf(folder / "model", build(Llama, ARGS).state_dict(), ARGS)
    return folder


def data_arguments(home, *more):
    data = [f"--validation.dataset_path={home / 'texts.jsonl'}", "--validation.dataset=text"]
    return [*data, "--model.tokenizer_path=bytes", f"--training.seq_len={SEQ_LEN}", *more]


def evaluate(capsys, tmp_path, *argv):
    assert cli.main(["evaluate", *map(str, argv), "--out", str(tmp_path / "found.json")]) == 0, capsys.readouterr().err
    return json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out


@pytest.mark.parametrize("rows", [1, 3])
def test_losses_equal_those_of_single_segments(home, tmp_path, capsys, rows):
    results, output = evaluate(
        capsys,
        tmp_path,
        home / "model",
        *data_arguments(home, f"--validation.local_batch_size={rows}"),
        "--plot",
        tmp_path / "p.svg",
    )
    (run,) = results["runs"]
    model, tokenizer, sums = build(Llama, ARGS), ByteTokenizer(), {}
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor(tokenizer.encode(text, bos=True, eos=True))
            for start in range(0, len(ids) - 1, SEQ_LEN):
                piece = ids[start : start + SEQ_LEN + 1]
                losses = F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none").double()
                for n, loss in enumerate(losses.tolist(), start):
                    name = next((f"{low}-{high}" for low, high in ((0, 8), (8, 32), (32, 128)) if n < high), "128-")
                    tokens, nats = sums.get(name, (0, 0.0))
                    sums[name] = tokens + 1, nats + loss
    assert {name: row["tokens"] for name, row in run["by_position"].items()} == {n: t for n, (t, _) in sums.items()}
    for name, (tokens, nats) in sums.items():
        assert run["by_position"][name]["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    tokens, nats = (sum(part) for part in zip(*sums.values(), strict=True))
    assert run["tokens"] == tokens and run["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert run["perplexity"] == pytest.approx(math.exp(run["loss"]))
    assert results["bytes"] == sum(map(len, TEXTS))
    assert run["bits_per_byte"] == pytest.approx(nats / math.log(2) / results["bytes"], rel=1e-6)
    assert f"{tokens:,}" in output and "bits per byte" in output
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_samples_limit_the_documents(home, tmp_path, capsys):
    results, _ = evaluate(capsys, tmp_path, home / "model", "--samples=3", *data_arguments(home))
    assert results["data"] == f"text ({home / 'texts.jsonl'})"
    assert results["documents"] == 1 and results["runs"][0]["tokens"] == len(TEXTS[0]) + 1


ANSWER = [{"text": "What is asked? ", "label": False}, {"text": "an answer", "label": True}]


def test_bits_per_byte_count_predicted_text_only(home, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": ANSWER}) + "\n")
    results, _ = evaluate(capsys, tmp_path, home / "model", *data_arguments(tmp_path))
    (run,) = results["runs"]
    assert results["bytes"] == len("an answer") and run["tokens"] == len("an answer") + 1  # and the end-of-text token
    assert run["bits_per_byte"] == pytest.approx(run["loss"] * run["tokens"] / math.log(2) / results["bytes"])


def split_arguments(home, kind="sft"):
    data = [f"--training.dataset_path={home / 'texts.jsonl'}", "--training.dataset=text", f"--task.kind={kind}"]
    options = ["--training.seq_len=64", "--data.too_long=truncate", "--model.tokenizer_path=bytes"]
    return [*data, *options, "--validation.enable", "--validation.split=2", "--validation.local_batch_size=1"]


def test_a_split_evaluates_the_held_out_documents_of_the_run(home, tmp_path, capsys):
    results, _ = evaluate(capsys, tmp_path, home / "model", *split_arguments(home))
    config, tokenizer = manager.load([*split_arguments(home), f"--data.cache_dir={tmp_path}"]), ByteTokenizer()
    validated = list(JobDatasets(ResolvedJob(config)).validation_loader(tokenizer, 0))
    texts = [tokenizer.decode(row.tolist()) for batch in validated for row in batch["tokens"]]
    assert results["documents"] == 2 and results["bytes"] == sum(map(len, texts))
    # documents of an explicit path are all evaluated
    results, _ = evaluate(capsys, tmp_path, home / "model", *split_arguments(home), *data_arguments(home)[:2])
    assert results["documents"] == len(TEXTS)


def train_state(argv):
    return train(argv)[1]


def test_several_cache_sizes(tmp_path, capsys):
    """Caches of all sizes agree on the first segment of a document, where the cache is empty."""
    texts = write_texts(tmp_path / "data", documents=20)
    options = dict(task__kind="documents", training__steps=4, training__seq_len=16, training__local_batch_size=2)
    options |= dict(training__global_batch_size=4, checkpoint__enable=True)
    cache = {f"adapter__neurocache__{name}": value for name, value in dict(cache_size=64, topk=4).items()}
    run_ranks(1, train_state, arguments(tmp_path / "run", texts, adapter__kind="neurocache", **cache, **options))
    data = ["--validation.dataset=text", f"--validation.dataset_path={texts}"]
    results, output = evaluate(capsys, tmp_path, tmp_path / "run", *data, "--cache-sizes=0,32,64")
    assert [run["cache_size"] for run in results["runs"]] == [0, 32, 64]
    assert len({run["loss"] for run in results["runs"]}) == 3 and "cache of 32 entries" in output
    first = [run["by_position"]["0-16"]["loss"] for run in results["runs"]]
    assert first[0] == first[1] == first[2]


@pytest.mark.parametrize(
    "lookup, sizes, seq_len, message",
    [
        ("exact", None, 32, None),
        ("exact", [0], 2000, None),
        (
            "exact",
            None,
            2000,
            "segments of 2000 tokens: adapter.neurocache.cache_size: allowed: at least 2000",
        ),
        ("exact", [0, 1024, 64], 128, "--cache-sizes: given 64: adapter.neurocache.cache_size: allowed: at least 128"),
        ("bucketed", [512, 600], 32, "--cache-sizes: given 600: .* a multiple of 512 .* write 512 or 1024"),
    ],
)
def test_caches_smaller_than_a_segment_are_refused(lookup, sizes, seq_len, message):
    cache = [f"--adapter.neurocache.lookup={lookup}", "--adapter.neurocache.cache_size=1024"]
    config = manager.load(["--adapter.kind=neurocache", *cache])
    with nullcontext() if message is None else pytest.raises(JobError, match=message):
        spec_of(config.adapter).check_evaluation(config.adapter, ResolvedJob(config).model.args, sizes, seq_len)


def test_a_context_that_is_longer_than_the_cache_is_refused(tmp_path):
    """Every command that loads a run's job refuses it."""
    cache = 'kind = "neurocache"\nneurocache = {cache_size = 64}'
    (tmp_path / "config.toml").write_text(f'[model]\ntokenizer_path = "bytes"\n[adapter]\n{cache}\n')
    assert find_job(tmp_path, ["--training.seq_len=64"]).config.training.seq_len == 64
    with pytest.raises(JobError, match="cache_size: given 64; allowed: at least 65, a segment's tokens"):
        find_job(tmp_path, ["--training.seq_len=65"])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--plot", "p.gif"], "--plot: given 'p.gif'; allowed: names with .svg or .png"),
        (["--cache-sizes=0,8"], "--cache-sizes: this model has no cache; leave it out"),
        (["--out", "/dev/null/f.json"], "--out: given '/dev/null/f.json'; allowed: "),
        (["--plot", "/dev/null/p.png"], "--plot: given '/dev/null/p.png'; allowed: "),
        (["--out", "/dev/full"], "the figures above were not written (No space left on device); give another name"),
    ],
)
def test_invalid_values_are_refused(home, capsys, argv, message):
    assert cli.main(["evaluate", str(home / "model"), "--samples=1", *data_arguments(home), *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--samples=-1"], ["--cache-sizes=a"], ["--cache-sizes=-1"], ["--sample", "3"]])
def test_invalid_options_are_refused(home, capsys, argv):
    assert cli.main(["evaluate", str(home / "model"), *argv]) == 2


def test_a_split_without_held_out_documents_is_refused(home, capsys):
    assert cli.main(["evaluate", str(home / "model"), *split_arguments(home, "pretrain")]) == 2
    assert "validation.split: given 2; allowed: unset with task.kind = pretrain" in capsys.readouterr().err


def test_pairs_of_answers_are_no_documents(home, tmp_path, capsys):
    """Both held-out splits and files of pairs are refused; the error names the metric that measures them."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    for job_options in (split_arguments(home, "dpo"), data_arguments(tmp_path, "--task.kind=dpo")):
        assert cli.main(["evaluate", str(home / "model"), *job_options]) == 2
        errors = " ".join(capsys.readouterr().err.split())
        assert "pairs of answers are no documents" in errors and "reward_accuracy" in errors


def test_a_model_of_classes_is_refused(home, capsys):
    argv = ["--model.name=gpt2", "--model.flavor=debugmodel", "--model.overrides={n_classes = 2}"]
    assert cli.main(["evaluate", str(home / "model"), *data_arguments(home), *argv]) == 2
    assert "does not predict next tokens" in capsys.readouterr().err
