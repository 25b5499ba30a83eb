"""What the start and the end of a run report."""

from unittest.mock import Mock

from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.training import reporting
from torchtitan.training.reporting import describe_precision


def test_the_start_says_that_products_are_imitated():
    config = load(["--model.tokenizer_path=bytes", "--training.float8=rowwise"])
    imitated = "float8 (rowwise, imitated: this device has no such products)"
    assert (
        describe_precision(ResolvedJob(config).model, None, "cpu")
        == f"bfloat16 and {imitated} with float32 parameters and float32 reduction"
    )


def test_a_picture_that_cannot_be_drawn_ends_nothing(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setattr(reporting, "draw_training_curve", full)
    arguments = [f"--job.dump_folder={tmp_path}", "--model.tokenizer_path=bytes"]
    metrics = Mock(path=tmp_path / "metrics.jsonl")
    reporting.log_end(
        ResolvedJob(load(arguments)), Mock(is_main=True), metrics, Mock(best_interval=lambda ranks: None), {}, 1
    )
    assert "training.png cannot be drawn: [Errno 28]" in caplog.text
    metrics.summary.assert_called_once_with({"metrics": metrics.path, "job": tmp_path / "config.toml"})
