"""Jobs of PyTorch's torchtitan: `torchtitan check` names each option that has moved, `--upgrade` translates all.

`renames` has the options that moved or no longer exist, `models` the models of each era, `upgrade` translates a job's
options, and `command` its file with the comments.
"""

from torchtitan.config.changes import Dialect
from torchtitan.plugins.dialects.models import advice
from torchtitan.plugins.dialects.renames import GONE, MOVED

DIALECT = Dialect(MOVED | GONE, advice)
