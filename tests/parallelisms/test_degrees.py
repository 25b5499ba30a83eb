"""Degrees of parallelism and their mesh."""

import pytest

from tests.support.judged import lines
from torchtitan.core.errors import LimitError
from torchtitan.parallelisms.degrees import ParallelDims


@pytest.mark.parametrize(
    "ranks, degrees",
    [
        (4, {"tp": 3}),
        (6, {"tp": 2, "pp": 2}),
        (4, {"dp_shard": 3}),
        (8, {"dp_shard": 2, "cp": 2, "tp": 4}),
        (2, {"dp_shard": 0}),
        (4, {"ep": 8}),
    ],
)
def test_a_mesh_has_the_messages_of_the_rules(ranks, degrees):
    """A limit has the same message whether the rules or the mesh check it."""
    names = {"dp_shard": "data_parallel_shard", "ep": "expert_parallel", "cp": "context_parallel"}
    names |= {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
    arguments = [f"--parallelism.{names[axis]}_degree={n}" for axis, n in degrees.items()]
    arguments += ["--model.name=deepseek"] * ("ep" in degrees)
    with pytest.raises(LimitError) as error:
        ParallelDims(ranks, **degrees)
    message = str(error.value).removeprefix("parallelism.")
    faults = lines(*arguments, ranks=ranks)
    assert message.partition("; write ")[0] in [line.partition("; write ")[0] for line in faults]
    assert "ep" in degrees or message in faults  # only the rules know the number of experts and can suggest a degree
