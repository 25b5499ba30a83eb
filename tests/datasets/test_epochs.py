"""Tests of finite data: exact steps, every sample once in an epoch, and an end that all ranks reach together."""

import json
import logging
import os
import shutil
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.loaders import TOKENIZER, global_samples, interleave, loader, rows
from tests.support.mixtures import toml
from tests.support.pool import run_ranks
from tests.support.shards import make_shards, records, write
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import check, preview
from torchtitan.config import manager
from torchtitan.config.manager import load
from torchtitan.core.cadence import NO_LIMIT, with_end
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source, preparing
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.preparing import prepared_shards
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.job import ResolvedJob
from torchtitan.rules import Facts
from torchtitan.rules import check as judge


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write two sources as text and as shards, 16 tokens a sample; 3 tokens of the shards are left over."""
    folder = tmp_path_factory.mktemp("epochs")
    texts = write(folder / "a.jsonl", ["".join(map(chr, range(40, 40 + 7 + i % 19))) for i in range(60)])
    masked = write(folder / "b.jsonl", records(40))
    make_shards(texts, folder / "a")
    make_shards(masked, folder / "b")
    return {"texts": texts, "masked": masked, "a": folder / "a", "b": folder / "b"}


def count_samples(folder, seq_len=16):
    return TokenShards(folder).blocks(seq_len)


SOURCES = {"one": ["a"], "one with flags": ["b"], "two": ["a", "b"]}


@pytest.mark.parametrize("names", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_epoch_has_every_sample_once(data, names, epochs):
    """The last step is filled up with rows without loss, on any number of ranks."""
    sources = [("tokens", data[name], 1.0) for name in names]
    one_pass = [
        sample
        for source in sources
        for sample in global_samples(count_samples(source[1]), sources=[source], shuffle=False)
    ]
    options = dict(sources=sources, epochs=epochs)
    all_rows = [row for batch in loader(**options, local_batch_size=1) for row in rows(batch)]
    assert len(all_rows) == epochs * len(one_pass)
    passes = [all_rows[i : i + len(one_pass)] for i in range(0, len(all_rows), len(one_pass))]
    assert all(sorted(one) == sorted(one_pass) for one in passes)
    assert all(one != other for one, other in zip(passes, passes[1:], strict=False))
    assert [row for b in loader(**options, local_batch_size=1, shuffle=False) for row in rows(b)] == one_pass * epochs

    for dp_size, accumulation, workers in ((1, 4, 2), (2, 1, 0), (3, 2, 1)):
        step = 2 * dp_size * accumulation
        ranks = [
            loader(**options, dp_rank=r, dp_size=dp_size, global_batch_size=step, num_workers=workers)
            for r in range(dp_size)
        ]
        rows_of_ranks = [[row for batch in rank for row in rows(batch)] for rank in ranks]
        samples = interleave(rows_of_ranks)
        assert len(samples) == -(-len(all_rows) // step) * step  # whole steps, the same on every rank
        assert samples[: len(all_rows)] == all_rows
        assert all(set(labels) == {IGNORE} for _, labels, *_ in samples[len(all_rows) :])
        assert {rank.state_dict()["samples"] for rank in ranks} == {len(all_rows)}
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("names", SOURCES.values(), ids=SOURCES)
def test_a_resume_reads_the_remaining_samples(data, names):
    options = dict(sources=[("tokens", data[name], 1.0) for name in names], epochs=2, document_mask=True)
    all_rows = [row for batch in loader(**options, local_batch_size=1) for row in rows(batch)]
    ranks = [loader(**options, dp_rank=r, dp_size=2) for r in range(2)]
    rows_read = interleave([[row for batch in islice(rank, 5) for row in rows(batch)] for rank in ranks])
    state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
    ranks = [loader(**options, dp_rank=r, dp_size=3, local_batch_size=1, state=state) for r in range(3)]
    rows_read += interleave([[row for batch in rank for row in rows(batch)] for rank in ranks])
    assert rows_read[: len(all_rows)] == all_rows and len(rows_read) < len(all_rows) + 3
    # another epoch begins at the sample after the last, whatever filled up the previous step
    state = merge_states([rank.state_dict() for rank in ranks])
    longer = [
        row for batch in loader(**options | dict(epochs=3), local_batch_size=1, state=state) for row in rows(batch)
    ]
    assert len(longer) == len(all_rows) // 2
    assert list(loader(**options, state=state)) == []


def test_epochs_cannot_resume_a_weighted_mixture(data):
    sources = [("tokens", data[name], 1.0) for name in "ab"]
    state = merge_states([loader(sources=sources).state_dict()])
    with pytest.raises(JobError, match="sources: 0: weight: 1.0 in the checkpoint, in epochs now"):
        loader(sources=sources, epochs=1, state=state)


# Text that is tokenized before the first step


def prepare_texts(data, folder, name="texts", tokenizer="bytes", workers=1):
    return prepared_shards(
        open_source("text", str(data[name]), RecordReader()), str(data[name]), tokenizer, folder, workers, stop=True
    )


def test_text_is_tokenized_once(data, tmp_path, monkeypatch):
    """One thread tokenizes if several need the tokens at the same time."""
    calls, results = [], []
    original = preparing.prepare
    monkeypatch.setattr(preparing, "prepare", lambda *args: calls.append(args) or original(*args))
    threads = [threading.Thread(target=lambda: results.append(prepare_texts(data, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len({shards.folder for shards in results}) == 1
    assert [(shard["sha256"]) for shard in results[0].header["shards"]] == [
        shard["sha256"] for shard in TokenShards(data["a"]).header["shards"]
    ]
    assert results[0].fingerprint["dataset_path"] == str(data["texts"])
    assert prepare_texts(data, tmp_path, tokenizer="tests/assets/tokenizer/tiktoken.model").folder != results[0].folder
    assert len(calls) == 2


def rewrite(path: Path, content: bytes) -> None:
    """Write a file and set its modification time one second later, as some file systems store whole seconds."""
    modified = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(modified, modified + 10**9))


def test_changed_text_is_tokenized_again(tmp_path):
    path = write(tmp_path / "a.jsonl", ["abc" * 9])
    first = prepare_texts({"texts": path}, tmp_path / "data")
    state = first.fingerprint
    rewrite(path, path.read_bytes())  # unchanged content: another folder, the same data
    rewritten = prepare_texts({"texts": path}, tmp_path / "data")
    assert rewritten.folder != first.folder and rewritten.fingerprint == state
    rewrite(path, path.read_bytes().replace(b"a", b"x"))  # of the same size
    assert prepare_texts({"texts": path}, tmp_path / "data").fingerprint != state


def test_a_change_of_any_file_in_a_folder_tokenizes_again(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [name * 30])
    data = {"texts": tmp_path}
    first = prepare_texts(data, tmp_path / ".data")
    assert prepare_texts(data, tmp_path / ".data").folder == first.folder
    rewrite(tmp_path / "b.jsonl", (tmp_path / "b.jsonl").read_bytes())
    assert prepare_texts(data, tmp_path / ".data").folder != first.folder


def test_a_folder_that_cannot_hold_the_tokens_is_refused(data, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(JobError, match="data: cannot hold the tokenized data: .*; give a job.dump_folder that can"):
        prepare_texts(data, tmp_path / "data")


# Jobs


def arguments(folder, path, **options):
    return jobs.arguments(folder, path, training__epochs=2, **options)


def steps_by_the_text(path):
    """Compute the steps of two epochs in samples of 32 tokens, eight in a step."""
    tokens = sum(len(TOKENIZER.encode(json.loads(line)["text"], bos=True, eos=True)) for line in path.open())
    return -(-2 * ((tokens - 1) // 32) // 8)


def test_a_job_ends_after_its_epochs_with_its_learning_rate(data, tmp_path):
    """Train text on one rank, on two, and resume in the middle on another number of ranks."""
    path, options = data["texts"], dict(checkpoint__enable=True, checkpoint__interval=4)
    straight = run_ranks(1, jobs.train, arguments(tmp_path / "a", path, **options))[0][0]
    steps = steps_by_the_text(path)
    assert [row["step"] for row in straight] == list(range(1, steps + 1))
    assert [row["epoch"] for row in straight] == pytest.approx([2 * step / steps for step in range(1, steps + 1)])
    assert straight[-1]["lr"] == pytest.approx(1e-3, rel=1e-12)  # the floor, at the last step of the real total
    two = run_ranks(2, jobs.train, arguments(tmp_path / "b", path, training__local_batch_size=4))[0][0]
    # float32 sums in another order
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in straight], rel=1e-5)
    for folder in (tmp_path / "a" / "checkpoint").glob("step-*"):
        if folder.name > "step-00000004":
            shutil.rmtree(folder)
    resumed = run_ranks(2, jobs.train, arguments(tmp_path / "a", path, **options, training__local_batch_size=4))[0][0]
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in straight], rel=1e-5)
    assert [row["lr"] for row in resumed] == pytest.approx([row["lr"] for row in straight], rel=1e-12)


def test_check_and_preview_state_the_last_step(data, tmp_path, capsys):
    options = ["--model.tokenizer_path=bytes", "--training.seq_len=16", f"--job.dump_folder={tmp_path}/out"]
    options += ["--training.epochs=2", "--training.local_batch_size=4"]
    shards = [*options, "--training.dataset=tokens", f"--training.dataset_path={data['a']}"]
    assert check.main(shards) == 0
    steps = -(-2 * count_samples(data["a"]) // 4)
    assert f"{steps * 64:,} in {steps} steps, 2 epochs" in capsys.readouterr().out
    text = [*options, "--training.dataset=text", f"--training.dataset_path={data['texts']}"]
    assert check.main(text) == 0
    shown = capsys.readouterr().out
    assert "counted when the data have been tokenized, at the start, 2 epochs" in shown and "schedule" not in shown
    config = jobs.with_end(manager.load(text))
    assert config.training.steps == steps
    assert preview.main(text) == 0
    of_text = capsys.readouterr().out.splitlines()[1:]
    preview.main(shards)
    assert capsys.readouterr().out.splitlines()[1:] == of_text
    assert check.main([*shards, "--lr_scheduler.warmup_steps=999"]) == 2
    assert "lr_scheduler.warmup_steps" in capsys.readouterr().err


def test_remaining_steps_follow_from_the_samples_read(data):
    """Cover a run with a larger global batch size than before, and one with padding rows in its last step."""
    options = ["--model.tokenizer_path=bytes", "--training.seq_len=16", "--training.epochs=2"]
    shards = ["--training.dataset=tokens", f"--training.dataset_path={data['a']}", "--training.local_batch_size=4"]
    config = manager.load([*options, *shards])
    total = 2 * count_samples(data["a"])
    for samples_read, step in ((0, 0), (12, 3), (10, 5), (total - 1, 9), (total, 9)):
        remaining = int(np.ceil((total - samples_read) / 4))
        assert jobs.with_end(config, 1, samples_read, step).training.steps == step + remaining


def test_weights_and_too_few_tokens_are_refused_with_epochs(data, tmp_path):
    path = toml(tmp_path / "job.toml", "training", [("tokens", data["a"], 1), ("tokens", data["b"], 2)])
    config = manager.load(["--job.config_file", str(path), "--training.epochs=1", "--model.tokenizer_path=bytes"])
    (fault,) = [str(fault) for fault in judge(config, 1, "cpu") if "weight" in fault.key]
    assert "training.sources[1].weight: given 2.0; allowed: 1 with training.epochs; leave it out" in fault
    short = write(tmp_path / "short.jsonl", ["few words"])
    argv = jobs.arguments(tmp_path / "out", short, training__epochs=1)
    with pytest.raises(DataError, match="11 tokens are too few for one sample; at least 33 are needed"):
        jobs.with_end(manager.load(argv))


# A budget of tokens


@pytest.mark.parametrize("names", [["texts"], ["b"], ["texts", "a"]], ids=str)
def test_a_token_budget_is_met_to_the_sample(data, names):
    """Count samples that are read, not padding rows, on any number of ranks, with and without workers."""
    sources = [("text" if name == "texts" else "tokens", data[name], 1.0) for name in names]
    endless = loader(sources=sources, local_batch_size=1)
    budget, options = 500, dict(sources=sources, tokens=500)
    all_rows = [row for batch in loader(**options, local_batch_size=1) for row in rows(batch)]
    assert len(all_rows) == 32 and all_rows == [row for batch in islice(endless, 32) for row in rows(batch)]
    if "b" not in names:
        loss_tokens = sum(label != IGNORE for _, labels, *_ in all_rows for label in labels)
        assert budget <= loss_tokens == 32 * 16 < budget + 16
    for dp_size, workers in ((1, 2), (2, 0), (3, 1)):
        ranks = [
            loader(**options, dp_rank=r, dp_size=dp_size, global_batch_size=6 * dp_size, num_workers=workers)
            for r in range(dp_size)
        ]
        samples = interleave([[row for batch in rank for row in rows(batch)] for rank in ranks])
        assert len(samples) == -(-32 // (6 * dp_size)) * 6 * dp_size and samples[:32] == all_rows
        assert all(set(labels) == {IGNORE} for _, labels, *_ in samples[32:])
        state = merge_states([rank.state_dict() for rank in ranks])
        assert state["samples"] == 32
        for rank in ranks:
            rank.close()
        further = loader(**options | {"tokens": 600}, local_batch_size=1, state=state)
        rows_read = [row for batch in further for row in rows(batch)]
        assert rows_read == [row for batch in islice(endless, 32, 38) for row in rows(batch)]


def test_a_job_ends_with_its_tokens(data, tmp_path, capsys):
    """A budget that ends inside the 20th sample of 32 tokens makes three steps of eight, the third half filled."""
    budget = 19 * 32 + 1
    argv = jobs.arguments(tmp_path, data["texts"], training__tokens=budget, training__steps=99)
    two = jobs.arguments(tmp_path, data["texts"], training__tokens=budget, training__local_batch_size=4)
    logged = run_ranks(2, jobs.train, two)[0][0]
    assert [row["tokens"] for row in logged] == [256, 512, 640]
    assert logged[-1]["lr"] == pytest.approx(1e-3, rel=1e-12)
    assert check.main(argv) == 0
    assert "in 3 steps" in capsys.readouterr().out
    assert check.main([*argv, "--training.epochs=2"]) == 2
    assert "training.tokens: given 609; allowed: unset with training.epochs; drop one" in capsys.readouterr().err


UNITS = [
    (["--training.epochs=6", "--lr_scheduler.t_max=3"], lambda steps: steps / 2),
    (["--training.epochs=6", "--lr_scheduler.t_max=7", "--lr_scheduler.t_max_unit=step"], lambda steps: 7),
    (["--training.tokens=1000", "--lr_scheduler.t_max=500", "--lr_scheduler.t_max_unit=token"], lambda steps: 8),
]


@pytest.mark.parametrize(
    "arguments, length", UNITS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_t_max_is_converted_from_its_unit(data, arguments, length):
    """The floor is reached at the last step of t_max and kept, where torch's own cosine would rise again."""
    options = ["--model.tokenizer_path=bytes", "--training.seq_len=16", "--training.local_batch_size=4"]
    options += ["--training.dataset=tokens", f"--training.dataset_path={data['a']}", "--lr_scheduler.decay_type=cosine"]
    config = manager.load([*options, *arguments])
    config = jobs.with_end(config)
    schedule = ResolvedJob(config).schedule.learning_rate()
    total = int(np.ceil(length(config.training.steps)))
    assert schedule.total_steps == total == Facts(ResolvedJob(config)).learning_rate.total_steps
    facts = Facts(ResolvedJob(config))
    vars(facts.schedule)["start"] = 5  # a warm start counts its steps from 5; an epoch stays as long
    assert ResolvedJob(config).schedule.learning_rate(start=5).total_steps == total == facts.learning_rate.total_steps
    assert schedule.multiplier(total - 2) > schedule.multiplier(total - 1) == 0.1 == schedule.multiplier(2 * total)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["t_max=3"],
            'lr_scheduler.t_max_unit: given "epoch"; allowed: another without training.epochs; set it, ',
        ),
        (
            ["t_max=3", "t_max_unit=token"],
            'lr_scheduler.t_max_unit: given "token"; allowed: another without training.t',
        ),
        (["t_max=3", "t_max_unit=step", "total_steps=9"], "lr_scheduler.t_max: given 3; allowed: unset with lr_sched"),
    ],
)
def test_t_max_with_an_unusable_unit_is_refused(arguments, message):
    config = manager.load(["--model.tokenizer_path=bytes", *(f"--lr_scheduler.{argument}" for argument in arguments)])
    (fault,) = judge(config, 1, "cpu")
    assert str(fault).removeprefix("the job: ").startswith(message)


def test_a_run_ends_at_the_first_of_steps_and_epochs(texts_and_steps, tmp_path, caplog):
    """Set training.steps below and above the steps of two epochs, and not at all."""
    options, all_steps = texts_and_steps
    for limit, steps, description in (
        (1, 1, f"; training.steps = 1 ends the run, before epochs: 2, which take {all_steps} steps"),
        (1000, all_steps, f"; epochs: 2, which take {all_steps} steps and end the run before training.steps = 1000"),
        (None, all_steps, f"; epochs: 2, which take {all_steps} steps"),
    ):
        job = tmp_path / f"{limit}.toml"
        job.write_text("[training]\nepochs = 2\n" + (f"steps = {limit}\n" if limit else ""))
        folder = tmp_path / f"run-{limit}"
        rows, lines, config = run_ranks(1, train_and_collect_log, [f"--job.config_file={job}", *options(folder)])[0]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        (line,) = [line for line in lines if line.startswith("data ")]
        assert line.endswith(description)
        assert rows[-1]["epoch"] == pytest.approx(2 * steps / all_steps)
        # linear from 0.01 to a tenth of it, over the steps that are made: at the end of the run the rate is the floor
        assert rows[-1]["lr"] == pytest.approx(1e-3)
        assert (config.training.epochs, config.training.steps) == (2, NO_LIMIT if limit is None else limit)


def train_and_collect_log(argv):
    """Train and return the logged rows, the log's lines, and the job that is saved with the run."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan").addHandler(handler)
    logging.getLogger("torchtitan").setLevel(logging.INFO)
    try:
        rows, _ = jobs.train(argv)
    finally:
        logging.getLogger("torchtitan").removeHandler(handler)
    return rows, lines, load([str(Path(load(argv).job.dump_folder, "config.toml"))])


@pytest.fixture
def texts_and_steps(tmp_path):
    """Return a function folder -> arguments of a job, and the steps of two epochs."""
    path = jobs.write_texts(tmp_path / "texts", documents=24)

    def options(folder):
        arguments = jobs.arguments(folder, path, model__overrides=jobs.SHALLOW, training__steps=1)
        return [argument for argument in arguments if "training.steps" not in argument]

    config = load([*options(tmp_path / "counted"), "--training.epochs=2"])
    return options, JobDatasets(ResolvedJob(config)).last_step()


def test_options_in_epochs_keep_their_length_where_training_steps_ends_the_run():
    arguments = ["--training.epochs=3", "--training.steps=4", "--validation.freq=epoch", "--lr_scheduler.t_max=2"]
    config = with_end(load(arguments), of_data=30)
    assert (config.training.steps, config.validation.freq, config.checkpoint.interval) == (4, 10, 500)
    assert (config.lr_scheduler.t_max, config.lr_scheduler.t_max_unit) == (20, "step")
    short_data = with_end(load(arguments), of_data=3)
    assert (short_data.training.steps, short_data.validation.freq, short_data.lr_scheduler.t_max) == (3, "epoch", 2)
