"""Files of checkpoints that are hashed while they are written, and read back past the page cache."""

import errno
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.jobs import ROOT
from torchtitan.checkpoint import CheckpointError, hashed_files, layout, loading, saving, storage
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.hashed_files import HashedFile, hash_files, sha256_of
from torchtitan.checkpoint.saving import SaveOptions, Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hashed_files, "_BLOCK_BYTES", BLOCK)


def write(path: Path, pieces: list[bytes]) -> HashedFile:
    with HashedFile(path) as file:
        assert [file.write(memoryview(piece)) for piece in pieces] == list(map(len, pieces))
    return file


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", [[], [0], [1], [BLOCK], [BLOCK - 1, 2], [3 * BLOCK + 5, 0, 7, BLOCK], [4096] * 5])
def test_content_size_and_digest(tmp_path, monkeypatch, sizes, direct):
    if not direct:
        monkeypatch.setattr(hashed_files, "_bypass_cache", lambda descriptor: False)
    pieces = [os.urandom(size) for size in sizes]
    content, path = b"".join(pieces), tmp_path / "file"
    file = write(path, pieces)
    assert path.read_bytes() == content
    assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    counts: list[int] = []
    assert sha256_of(path, counts.append, from_disk=True) == sha256_of(path) == file.sha256
    assert sum(counts) == len(content)
    file.close()  # a second time


@pytest.fixture
def file_system(monkeypatch):
    """Return a function that lets direct writes and reads, or all, fail with an error from then on."""
    direct, write_once = set(), os.write

    def fail(number: int, only_direct: bool) -> None:
        def refuse(descriptor: int) -> None:
            if descriptor in direct or not only_direct:
                raise OSError(number, os.strerror(number))

        class File(io.FileIO):
            def readinto(self, buffer):
                refuse(self.fileno())
                return super().readinto(buffer)

        def set_direct(descriptor: int, on: bool) -> bool:
            (direct.add if on else direct.discard)(descriptor)
            return True

        monkeypatch.setattr(hashed_files, "_set_direct", set_direct)
        monkeypatch.setattr(hashed_files, "open_file", lambda path: io.BufferedReader(File(path)))
        monkeypatch.setattr(os, "write", lambda file, content: refuse(file) or write_once(file, content))

    return fail


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_systems_that_refuse_direct_access(number, tmp_path, file_system):
    """Some accept O_DIRECT and refuse writes and reads with it."""
    file_system(number, only_direct=True)
    content = os.urandom(2 * BLOCK)
    file = write(tmp_path / "file", [content])
    assert file.sha256 == sha256_of(tmp_path / "file", from_disk=True) == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOSPC])
def test_errors_of_the_disk_are_raised(number, tmp_path, file_system):
    (tmp_path / "old").write_bytes(bytes(BLOCK))
    file_system(number, only_direct=False)
    with pytest.raises(OSError, match=os.strerror(number)):
        write(tmp_path / "file", [bytes(BLOCK)])
    with pytest.raises(OSError, match=os.strerror(number)):
        sha256_of(tmp_path / "old", from_disk=True)


def test_an_error_of_the_disk_is_not_hidden_by_the_cache(tmp_path, file_system):
    write(tmp_path / "file", [bytes(BLOCK)])
    file_system(errno.EIO, only_direct=True)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sha256_of(tmp_path / "file", from_disk=True)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write_once = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write_once(descriptor, content[:4096]))
    content = os.urandom(2 * BLOCK)
    write(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_existing_files_are_not_overwritten_and_errors_close_the_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")
    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "new", [b"content"])
    with pytest.raises(ZeroDivisionError), HashedFile(tmp_path / "other"):
        raise ZeroDivisionError
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_hashes_of_several_files_are_in_order(tmp_path):
    paths = [tmp_path / str(number) for number in range(9)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (1000 * (9 - number)))
    assert hash_files(paths) == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


# Saves


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"model.{number}": torch.randn(64, 100 + number) for number in range(40)}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(storage, "SMALLEST_PART", 100_000)


def save(folder: Path, verify: bool) -> Path:
    target = folder / "step-00000001"
    snapshot = Snapshot("full", 1, state(), trainer={"step": 1})
    assert saving.save(snapshot, target, None, Peers("test"), SaveOptions(verify=verify))
    return target


def test_a_large_share_is_written_to_several_files(tmp_path, small_parts):
    """torch loads it as well."""
    target = save(tmp_path, verify=True)
    names = sorted(path.name for path in target.glob("*.distcp"))
    assert names == [f"__0_{number}.distcp" for number in range(hashed_files.PARALLEL_FILES)]
    assert set(names) < layout.check_complete(target).files.keys()
    assert min((target / name).stat().st_size for name in names) > 200_000
    peers = Peers("test")
    source = loading.open_checkpoint(target, peers)
    ours, torchs = ({name: torch.zeros_like(value) for name, value in state().items()} for _ in range(2))
    storage.read_tensors(target, source.index, ours, peers)
    dcp.load(torchs, checkpoint_id=target, no_dist=True)
    for name, value in state().items():
        assert torch.equal(ours[name], value) and torch.equal(torchs[name], value)


def test_an_error_in_one_of_the_files_fails_the_save(tmp_path, monkeypatch, small_parts):
    close = HashedFile.close

    def fail(file):
        close(file)
        if "__0_2" in str(file.path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(HashedFile, "close", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, verify=False)
    assert list(tmp_path.iterdir()) == []


LATE_SAVE = """
import sys, threading, time
from pathlib import Path
from torchtitan.checkpoint import storage
from tests.checkpoint import test_hashed_files

def save():
    time.sleep(0.5)
    storage.SMALLEST_PART = 100_000
    test_hashed_files.save(Path(sys.argv[1]), verify=True)

threading.Thread(target=save).start()
raise RuntimeError("the run has crashed")
"""


def test_a_save_in_the_background_is_completed_after_a_crash(tmp_path):
    result = subprocess.run([sys.executable, "-c", LATE_SAVE, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.rstrip().endswith("the run has crashed")
    assert layout.check_complete(tmp_path / "step-00000001").step == 1


@pytest.mark.parametrize("verify", [True, False])
def test_each_byte_is_written_once_and_read_once_if_verified(tmp_path, small_parts, verify):
    size = sum(value.nbytes for value in state().values())
    save(tmp_path / "first", verify)  # modules are imported

    def moved() -> tuple[int, int]:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"]), int(fields["wchar"])

    before = moved()
    save(tmp_path / "second", verify)
    bytes_read, bytes_written = (after - start for after, start in zip(moved(), before, strict=True))
    assert size < bytes_written < 1.2 * size
    assert size * verify <= bytes_read < 1.2 * size * verify + 100_000
