"""memory.limit: every accepted format, and the fraction passed to CUDA, which is mocked."""

import pytest
import torch

from tests.support import judged
from tests.support.judged import lines
from torchtitan.commands import check
from torchtitan.config import manager
from torchtitan.config.manager import ConfigError
from torchtitan.core.errors import LimitError
from torchtitan.process.distributed import limit_memory
from torchtitan.process.machine import limit_in_bytes
from torchtitan.process.ranks import MEMORY_LIMIT, describe_environment

anywhere = judged.anywhere
GPU = 24 * 2**30

FORMS = [  # option value, bytes or share, expected share of the GPU
    ("0.95", None, 0.95),
    ("1", None, 1.0),
    ("1.0", None, 1.0),
    ("256", 2**28, 2**28 / GPU),
    ("22000", 22000 * 2**20, 22000 * 2**20 / GPU),
    ("20GiB", 20 * 2**30, 20 / 24),
    ("1.5 GiB", 3 * 2**29, 1 / 16),
    ("512MiB", 2**29, 1 / 48),
    ("12GB", 12 * 10**9, 12e9 / GPU),
    ("300 MB", 300 * 10**6, 3e8 / GPU),
]


@pytest.fixture
def gpu(monkeypatch):
    """Mock a GPU of 24 GiB; return the recorded calls that set its memory fraction."""
    calls = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": GPU}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("text, amount, share", FORMS)
def test_every_format_is_parsed_and_passed_to_cuda(text, amount, share, gpu):
    limit = manager.load([f"--memory.limit={text}"]).memory.limit
    assert limit_in_bytes(limit) == amount and lines(f"--memory.limit={text}") == []
    device = torch.device("cuda", 1)
    assert limit_memory(limit, device).startswith(f"at most {24 * share:.2f} of 24.00 GiB for each rank")
    assert gpu == [(pytest.approx(share, rel=1e-12), device)]


def test_without_a_limit_or_a_gpu_nothing_is_limited(gpu):
    assert limit_memory(None, torch.device("cuda", 0)) == ""
    for limit, amount in (("20GiB", "20 GiB"), (0.5, "50 %")):
        expected = f"at most {amount} of a GPU; on a cpu nothing is limited"
        assert limit_memory(limit, torch.device("cpu")) == expected
    assert gpu == []


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "2", "255", "22000.5"])
def test_implausible_numbers_are_refused(text):
    with pytest.raises(ConfigError, match=r"memory.limit: given .*; allowed: a number > 0 and <= 1 or a whole number"):
        manager.load([f"--memory.limit={text}"])


@pytest.mark.parametrize("text", ["100MiB", "20GiBs", "GiB", "20 gib", "1e3MiB", "0.2GB", "-5GiB", "all", "true"])
def test_malformed_limits_are_refused(text):
    (fault,) = lines(f"--memory.limit={text}")
    assert fault == (
        f'memory.limit: given "{text}"; allowed: a share up to 1, whole MiB from 256 on, or a text such as "20GiB" '
        "(MiB, GiB, MB, GB); leave it out for all of the memory"
    )


def test_more_than_the_gpu_has_is_refused(gpu):
    with pytest.raises(LimitError, match="memory.limit: given 25 GiB; allowed: at most the 24.00 GiB of this GPU"):
        limit_memory("25GiB", torch.device("cuda", 0))
    assert gpu == []


def test_check_compares_the_limit_with_the_model_state(capsys):
    argv = ["debug_model", "--memory.limit=1GiB"]
    assert check.main(argv) == 0
    assert "memory    at most 1 GiB of a GPU for each rank, 9% of it for the state\n" in capsys.readouterr().out
    assert check.main([*argv, "--model.overrides={n_layers = 200}"]) == 0
    assert "% of it for the state alone: too much\n" in capsys.readouterr().out


OF_SCRIPTS = [("0.5", 0.5), ("1", 1.0), ("22000", 22000), (" 20GiB ", "20GiB"), ("", 0.25)]


@pytest.mark.parametrize("text, expected", OF_SCRIPTS)
def test_the_environment_overrides_the_option(text, expected, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(MEMORY_LIMIT, text)
    (tmp_path / "job.toml").write_text("[memory]\nlimit = 300\n")
    options = [f"--job.config_file={tmp_path / 'job.toml'}", "--memory.limit=0.25"]
    assert manager.load(options).memory.limit == expected
    if not text:
        return
    monkeypatch.setenv(MEMORY_LIMIT, "100")
    with pytest.raises(ConfigError, match=f"^{MEMORY_LIMIT} in the environment: memory.limit: given 100; allowed: "):
        manager.load(options)


def test_used_environment_variables_are_listed(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", MEMORY_LIMIT, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = describe_environment()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv(MEMORY_LIMIT, "0.9\n\x1b[31m")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert describe_environment() == ", ".join(
        ["CUDA_VISIBLE_DEVICES=0,1", f"{MEMORY_LIMIT}=0.9\\n\\x1b[31m", *filter(None, [before])]
    )
