"""The other side of convergence.py: transformers' Trainer with the initial weights, batches and schedule of a job.

    python scripts/convergence_trainer.py --job.config_file JOB --job.dump_folder FOLDER

The model is read from our export of the job's initial weights. Its rows are the job's, in their order, each with the
token after its last one, because transformers shifts the labels itself. FOLDER gets metrics.jsonl as a job's has, and
the Trainer's checkpoints, from which the same command resumes.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan.assembly.data import JobDatasets  # noqa: E402
from torchtitan.assembly.parts import ModelBuilder, model_spec  # noqa: E402
from torchtitan.config import manager  # noqa: E402
from torchtitan.core.random_draws import initialize  # noqa: E402
from torchtitan.job import ResolvedJob  # noqa: E402
from torchtitan.metrics.json_lines import METRICS  # noqa: E402

Row = dict[str, torch.Tensor]


def export_initial_weights(job: ResolvedJob, folder: Path) -> None:
    """Write the model that the job starts with in the Hugging Face format."""
    model = ModelBuilder(job).meta_model().to_empty(device="cpu")
    initialize(model, job.config.debug.seed, model.init_rule)
    model_spec(job.model).hf.save_hf(folder, model.state_dict(), job.model.args)


def rows(batches: Iterable[Row], count: int) -> list[Row]:
    """Return `count` rows [S + 1] of batches, as inputs and labels of a causal model of transformers."""
    result: list[Row] = []
    for batch in batches:
        tokens = torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1)
        assert torch.equal(tokens[:, 1:], batch["labels"]), "every position predicts the next token"
        result += [{"input_ids": row, "labels": row} for row in tokens]
        if len(result) >= count:
            break
    return result[:count]


class RecordingTrainer(Trainer):
    """A Trainer that writes the loss of each step with all its digits; its own log rounds."""

    metrics: Path

    def record(self, values: dict[str, float]) -> None:
        with open(self.metrics, "a") as file:
            file.write(json.dumps(values) + "\n")

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.record({"step": self.state.global_step + 1, "loss": float(loss)})
        return loss


def training_arguments(job: ResolvedJob, folder: Path) -> TrainingArguments:
    """Return the job's optimizer, schedule and precision as the Trainer's."""
    config, optimizer = job.config, job.config.optimizer
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=job.layout.rows,
        per_device_eval_batch_size=config.validation.local_batch_size,
        max_steps=config.training.steps,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=config.training.max_norm,
        lr_scheduler_type=config.lr_scheduler.decay_type,
        warmup_steps=job.schedule.learning_rate(0).warmup,
        bf16=config.training.mixed_precision_param == "bfloat16",
        train_sampling_strategy="sequential",
        use_cpu=True,
        save_steps=500,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    job = ResolvedJob(manager.load(sys.argv[1:]))
    folder, data, vocabulary = Path(job.config.job.dump_folder), JobDatasets(job), job.tokenizer()
    if not (initial := folder / "initial").exists():
        export_initial_weights(job, initial)
    trainer = RecordingTrainer(
        AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32),
        training_arguments(job, folder),
        train_dataset=rows(data.training_loader(vocabulary, 0), job.config.training.steps * job.layout.rows),
    )
    trainer.metrics = folder / METRICS
    trainer.train(resume_from_checkpoint=bool([*folder.glob("checkpoint-*")]))
    held_out = rows(data.validation_loader(vocabulary, 0), job.config.validation.samples)
    loss = trainer.evaluate(eval_dataset=held_out)["eval_loss"]
    trainer.record({"step": trainer.state.global_step, "validation_loss": loss})


if __name__ == "__main__":
    main()
