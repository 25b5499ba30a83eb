"""Our models as model classes of lm-eval. Imports lm_eval, so it is imported by the functions that need that.

lm-eval (0.4.13) finds classes of other packages only after their import; `python -m torchtitan.plugins.eval_tasks` is
its command after the import of this module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  registers lm-eval's own, which it does later only if there are none yet
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from torchtitan.commands.generate import find_checkpoint, require_causal_decoder
from torchtitan.core.errors import JobError
from torchtitan.core.hub import local_folder
from torchtitan.plugins.eval_tasks.evaluate_tasks import Answers, EvalRequest, answers_of, without_time_limit
from torchtitan.process.distributed import device_type

NAME = "torchtitan"
"""Of the class in lm-eval: `--model torchtitan`."""


class EvalModel(Answers, LM):
    """The answers of a model; the time limit on tasks does not count them."""

    def __init__(self, answers: Answers) -> None:
        LM.__init__(self)
        self.__dict__ |= vars(answers)

    def loglikelihood(self, requests: Sequence[EvalRequest]) -> list[tuple[float, bool]]:
        with without_time_limit():
            return super().loglikelihood(requests)

    def loglikelihood_rolling(self, requests: Sequence[EvalRequest]) -> list[float]:
        with without_time_limit():
            return super().loglikelihood_rolling(requests)

    def generate_until(self, requests: Sequence[EvalRequest]) -> list[str]:
        with without_time_limit():
            return super().generate_until(requests)


@register_model(NAME)
class FolderModel(EvalModel):
    """The model in a folder, as lm-eval's command creates it: `--model_args path=FOLDER,training.seq_len=2048`.

    `path`: a folder as `torchtitan generate` takes it. `config`, `best`: as the options of that command. `batch_size`:
    requests in a batch. `options`: options of the job, by their dotted names.
    """

    def __init__(
        self,
        path: str = "",
        config: str | None = None,
        best: bool = False,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if not path:
            raise JobError("--model_args: given no path; allowed: path=FOLDER, and options of the job by their names")
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise JobError(f"--batch_size: given {batch_size}; allowed: a number, at least 1, without --max_batch_size")
        values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
        job_args = [f"--{name}={value}" for name, value in values.items()]
        job, place = find_checkpoint(Path(local_folder(path)), config, job_args, best)
        require_causal_decoder(job.model)
        if device is None or device.startswith("cuda") and device_type() != "cuda":  # lm-eval's default is cuda:0
            device = device_type()
        super().__init__(answers_of(job, place, torch.device(device), int(batch_size)))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise JobError(f"--apply_chat_template: not with --model {NAME}; leave it out, or evaluate an export with hf")
