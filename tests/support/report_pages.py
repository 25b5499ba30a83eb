"""The figure inside a page of `torchtitan report`, and a run to draw."""

import json
from pathlib import Path

ACCOUNT = {"train": 60.0, "data": 25.0, "save": 10.0, "restart": 3.0, "redone": 2.0}


def write_run(folder: Path, rows: int = 40, **account: float) -> Path:
    """Write the records of a run with a validation, saves and a restart at step 20, and a job."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, rows + 1):
        row = {"step": step, "loss": 3 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100 * step}
        row |= {"tokens_per_second": 50.0, "step_seconds": 2.0, "data_seconds": 0.5, "memory_gib": 1.0}
        lines.append(row | ({"marked": ["first"]} if step == 1 else {}))
        if step % 20 == 0:
            lines.append({"step": step, "validation_loss": 3.5 / step})
            seconds = {f"{cause}_seconds": value for cause, value in (account or ACCOUNT).items()}
            lines.append({"step": step, "event": "goodput", "goodput": 0.6, **seconds, "saved": True})
            lines.append({key: value for key, value in lines[-1].items() if key != "saved"})  # at the end of a start
    lines.insert(24, {"step": 20, "event": "restart", "cause": "</script> rank 1 crashed", "rank": 1, "restarts": 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    return folder


def figure_in(page: str) -> list[dict]:
    """Return the traces that the script of a page draws."""
    start = page.index("[", page.rindex("Plotly.newPlot("))
    return json.JSONDecoder().raw_decode(page[start:])[0]
