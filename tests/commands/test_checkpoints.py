"""`torchtitan checkpoints`: a run's checkpoints, their state, and the one that a resume would load."""

import pytest

from tests.support.checkpoint_job import Job
from torchtitan.commands import checkpoints
from torchtitan.core.errors import JobError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path):
    job = Job(tmp_path / "run" / "checkpoint", interval=1)
    job.train(4)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-00000004" / "manifest.json").unlink()
    shard = folder / "step-00000003" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (folder / ".tmp-step-00000009-0123456789abcdef").mkdir()
    (folder / ".aside-step-00000008-0123456789abcdef").mkdir()
    return tmp_path / "run"


def run_command(run, capsys, *arguments):
    code = checkpoints.main([str(run), *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_all_checkpoints_of_a_run_are_listed(run, capsys):
    code, lines = run_command(run, capsys)
    assert code == 0
    assert lines[0].split() == ["step", "size", "state", "plan"]
    assert [line.split()[0] for line in lines[1:5]] == ["4", "3", "2", "1"]
    assert "not usable: it has no manifest.json" in lines[1]
    assert "MB" in lines[2] and "complete" in lines[2] and lines[2].endswith("1 rank")
    assert lines[5:7] == [
        ".aside-step-00000008-0123456789abcdef: moved aside",
        ".tmp-step-00000009-0123456789abcdef: left by a save that did not finish",
    ]
    assert lines[7].startswith("a resume takes step 3 (by names, sizes and manifest")


def test_verify_reads_the_contents(run, capsys):
    code, lines = run_command(run / "checkpoint", capsys, "--verify")
    assert code == 0
    assert "not usable: damaged: __0_0.distcp" in lines[2] and "sound" in lines[3]
    assert lines[-1] == "a resume takes step 2 (looked at whole)"
    assert Job(run / "checkpoint").checkpointer.load() == 2  # the checkpointer agrees
    for step in (1, 2):
        (run / "checkpoint" / f"step-0000000{step}" / "state.json").write_text("{}")
    code, lines = run_command(run, capsys, "--verify")
    assert code == 3 and lines[-1].startswith("a resume takes none of them")


def test_missing_folders_are_refused(tmp_path):
    with pytest.raises(JobError, match="no such folder"):
        checkpoints.main([str(tmp_path / "absent")])
    with pytest.raises(JobError, match="is its disk mounted"):
        checkpoints.main([str(tmp_path)])
