"""What a rank sets up before it joins the world."""

import os
import resource
import sys
from pathlib import Path

import pytest

from tests.support.pool import run_alone
from torchtitan import distributed
from torchtitan.ranks import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on open files are raised on Linux only")


def settings(**given: str) -> dict[str, object]:
    """What libraries find after a world of one was joined with few files allowed."""
    for name in ("TORCH_GLOO_LAZY_INIT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        os.environ.pop(name, None)
    os.environ.update(given)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    distributed.init(Ranks(), timeout_seconds=10, trace_buf_size=7, folder=Path("/a/run"))
    distributed.close()
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most),
        "lazy": os.environ["TORCH_GLOO_LAZY_INIT"],
        "recorder": os.environ["TORCH_FR_BUFFER_SIZE"],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "dump": os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"],
        "dumped to": os.environ["TORCH_FR_DUMP_TEMP_FILE"],
    }


def test_libraries_are_set_up_for_large_worlds():
    allocator = "expandable_segments:True" if distributed.device_type() == "cuda" else None
    expected = {"files": True, "lazy": "1", "recorder": "7", "allocator": allocator}
    expected |= {"dump": "1", "dumped to": "/a/run/nccl-collectives-of-rank-"}
    assert run_alone(settings) == expected


def with_a_users_setting() -> dict[str, object]:
    return settings(TORCH_GLOO_LAZY_INIT="0", TORCH_FR_DUMP_TEMP_FILE="/elsewhere/")


def test_a_users_setting_stays():
    found = run_alone(with_a_users_setting)
    assert (found["lazy"], found["dumped to"]) == ("0", "/elsewhere/")
