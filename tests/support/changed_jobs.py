"""A checkpoint whose job another one resumes."""

import json
from pathlib import Path

from tests.support.checkpoint_folders import manifest_of
from torchtitan.checkpoint import folders, layout
from torchtitan.config.changes import kept_job
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.rules import Facts


def checkpoint(folder: Path, arguments: list[str], step: int = 60, ranks: int = 1, **left_out: object) -> None:
    """Write a complete checkpoint of a job, without tensors."""
    facts = Facts(ResolvedJob(load(["--model.tokenizer_path=bytes", *arguments]), ranks))
    samples = facts.config.training.global_batch_size
    job_record = kept_job(facts.config, vars(facts.model.args), samples if samples > 0 else facts.layout.samples)
    job_record["degrees"] = {"dp_shard": facts.layout.shards, "cp": facts.layout.cp, "tp": facts.layout.tp}
    trainer = {"step": step, "tokens": 1} | {key: value for key, value in job_record.items() if key not in left_out}
    state = json.dumps({"step": step, "trainer": trainer, "ranks": [], "optimizer": {}}).encode()
    target = folder / layout.step_name(step)
    temporary = folders.create_temporary(target)
    files = {layout.STATE: state, layout.METADATA: b""}
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    folders.write_file(temporary / layout.MANIFEST, layout.manifest_text(manifest_of(files, step)))
    folders.publish(temporary, target)
