"""The example adapter of docs/adding_a_model.md, as a module."""

import re

from tests.support.jobs import ROOT

(_SOURCE,) = re.findall(
    r"```python\n(import torch\nimport torch.nn.functional.*?)```",
    (ROOT / "docs/adding_a_model.md").read_text(),
    re.DOTALL,
)
exec(compile(_SOURCE, "docs/adding_a_model.md", "exec"))
IA3 = globals()["IA3"]
