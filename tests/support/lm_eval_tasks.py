"""Task definitions for lm-eval, one for each kind of request, and their documents."""

import json

import yaml

CHOICE = {
    "task": "choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "lines.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ROLLING = CHOICE | {
    "task": "rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_choice": None,
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITTEN = CHOICE | {
    "task": "written",
    "output_type": "generate_until",
    "doc_to_choice": None,
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
LINES = [
    {
        "question": f"which of {n} words is it, the long or the short one?",
        "choices": ["yes", "no " * n],
        "answer": n % 2,
    }
    for n in range(1, 6)
]


def write_tasks(folder, *tasks):
    """Write tasks and their documents to a folder; fields that are None are left out."""
    folder.mkdir(exist_ok=True)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for task in tasks:
        fields = {key: value for key, value in task.items() if value is not None}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(fields))
    return folder
