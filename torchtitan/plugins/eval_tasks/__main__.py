"""lm-eval's command with our models: `python -m torchtitan.plugins.eval_tasks --model torchtitan --tasks ...`."""

import importlib
import sys

from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.hub import Access, set_access
from torchtitan.plugins.eval_tasks.evaluate_tasks import require_lm_eval
from torchtitan.process.exit import REFUSED


def main() -> int:
    """Run lm-eval's command with the arguments of this process."""
    set_access(Access.DOWNLOAD)
    try:
        require_lm_eval("this command")
        importlib.import_module("torchtitan.plugins.eval_tasks.lm_eval_model")  # registers its class
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except JobError as error:
        print(wrap_lines(error), file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
