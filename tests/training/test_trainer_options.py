"""Tests of trainer options that change no result, and of exporting and loading weights."""

import json

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_alone, run_ranks


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def losses(rows):
    return [row["loss"] for row in rows]


GALORE = dict(optimizer__name="GaLore", optimizer__options="{rank = 4, update_gap = 3}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", [{}, GALORE], ids=["AdamW", "GaLore"])
def test_stepping_in_backward_equals_the_ordinary_step(optimizer, ranks, texts, tmp_path):
    options = dict(optimizer, training__local_batch_size=8 // ranks, training__max_norm=0, training__steps=8)
    plain = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "a", texts, **options))[0]
    early = dict(options, optimizer__early_step_in_backward=True)
    got = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "b", texts, **early))[0]
    assert losses(got[0]) == losses(plain[0])
    assert got[1] == plain[1]
    assert all(row["grad_norm"] is None for row in got[0])  # gradients are freed before a norm could be computed


def test_the_saved_config_repeats_the_run(texts, tmp_path):
    options = dict(training__steps=5, optimizer__weight_decay=0.03, debug__seed=7)
    first, _ = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "a", texts, **options))[0]
    arguments = ["--job.config_file", str(tmp_path / "a" / "config.toml"), "--job.dump_folder", str(tmp_path / "b")]
    repeated, _ = run_ranks(1, jobs.train, arguments)[0]
    assert losses(repeated) == losses(first)


def test_another_seed_gives_other_losses(texts, tmp_path):
    runs = [
        run_ranks(1, jobs.train, jobs.arguments(tmp_path / str(seed), texts, training__steps=2, debug__seed=seed))[0]
        for seed in (0, 1)
    ]
    assert runs[0][0][0]["loss"] != runs[1][0][0]["loss"]


def test_validation_changes_no_loss_and_does_not_depend_on_the_plan(texts, tmp_path):
    held_out = jobs.write_texts(tmp_path / "held_out", documents=40)
    measured = {}  # 11 samples, which neither ranks nor batches divide
    for ranks in (1, 2):
        options = dict(training__local_batch_size=8 // ranks, training__steps=10)
        plain, _ = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / f"plain{ranks}", texts, **options))[0]
        options |= dict(
            validation__enable=True,
            validation__dataset="text",
            validation__dataset_path=held_out,
            validation__local_batch_size=5 - ranks,
            validation__freq=5,
            validation__samples=11,
        )
        folder = tmp_path / f"validating{ranks}"
        rows, _ = run_ranks(ranks, jobs.train, jobs.arguments(folder, texts, **options))[0]
        assert losses(rows) == losses(plain)
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        measured[ranks] = [(row["step"], row["validation_loss"]) for row in logged if "validation_loss" in row]
    assert [step for step, _ in measured[1]] == [5, 10]
    assert measured[1][1][1] < measured[1][0][1]
    for (_, one), (_, two) in zip(measured[1], measured[2], strict=True):
        assert two == pytest.approx(one, rel=1e-5)


def test_weights_are_exported_and_loaded_as_hugging_face_files(texts, tmp_path):
    export_options = dict(
        training__steps=3,
        training__local_batch_size=4,
        checkpoint__enable=True,
        checkpoint__last_save_model_only=True,
        checkpoint__last_save_in_hf=True,
    )
    run_ranks(2, jobs.train, jobs.arguments(tmp_path / "a", texts, **export_options))
    exported = tmp_path / "a" / "model_hf"
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(exported)
    assert sum(p.numel() for p in reference.parameters()) > 10_000
    import_options = dict(
        training__steps=1,
        checkpoint__enable=True,
        checkpoint__initial_load_path=exported,
        checkpoint__initial_load_in_hf=True,
        optimizer__lr=1e-12,  # so that the first step does not change the weights
    )
    rows, _ = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "b", texts, **import_options))[0]
    ids = torch.randint(0, 260, (1, 16), generator=torch.Generator().manual_seed(0))
    ours = run_ranks(1, logits_of, str(tmp_path / "b"), ids)[0]
    torch.testing.assert_close(ours, reference(ids).logits.detach(), atol=1e-5, rtol=1e-5)


def logits_of(folder, ids):
    from pathlib import Path

    from torchtitan.commands import generate
    from torchtitan.training import inference_model

    job, step_folder = generate.find_checkpoint(Path(folder), None)
    with torch.no_grad():
        return inference_model.load_model(job, step_folder, torch.device("cpu"))[0](ids)


def test_an_export_initializes_another_job(texts, tmp_path):
    export_options = dict(training__steps=6, checkpoint__enable=True, checkpoint__last_save_model_only=True)
    first, _ = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "a", texts, **export_options))[0]
    start = dict(training__steps=2, checkpoint__enable=True, checkpoint__initial_load_path=tmp_path / "a" / "model")
    second, _ = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "b", texts, **start))[0]
    assert [row["step"] for row in second] == [1, 2]
    assert second[0]["loss"] < first[0]["loss"] - 1


def test_deterministic_runs_repeat_bit_for_bit(texts, tmp_path):
    options = dict(training__steps=4, debug__deterministic=True)
    runs = [run_alone(jobs.train, jobs.arguments(tmp_path / name, texts, **options)) for name in "ab"]
    assert losses(runs[0][0]) == losses(runs[1][0]) and runs[0][1] == runs[1][1]


def test_tensorboard_and_profiler_write_to_the_configured_folders(texts, tmp_path):
    options = dict(
        training__steps=6,
        metrics__enable_tensorboard=True,
        profiling__enable_profiling=True,
        profiling__profile_freq=3,
        profiling__profiler_warmup=1,
    )
    run_ranks(1, jobs.train, jobs.arguments(tmp_path, texts, **options))
    assert list((tmp_path / "tb").glob("events.*"))
    assert len(list((tmp_path / "profile_traces").rglob("*.json*"))) == 2


def test_the_plot_is_drawn_at_the_end(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, training__steps=3, metrics__plot=True)
    code, out, err = jobs.run(argv)
    assert code == 0, err
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "training.png" in out and "tokens/s" in out
