"""Errors of the machine while files are read: retried, then raised as what says nothing of the content."""

import errno
import os
from types import SimpleNamespace

import pytest

from torchtitan import cli
from torchtitan.core import files, machine_errors
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, open_file, read_file, require_file
from torchtitan.core.machine_errors import MachineError, error_text, is_of_the_machine, retried

MACHINE = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EDQUOT]


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(machine_errors.time, "sleep", waited.append)
    return waited


def throw(error: Exception):
    raise error


def failing(number: int, times: int, result: object = "done"):
    errors = [OSError(number, os.strerror(number), "file")] * times

    def action():
        if errors:
            raise errors.pop()
        return result

    return action


@pytest.mark.parametrize("number", MACHINE)
def test_an_error_of_the_machine_is_retried_and_then_said_with_the_path(number, pauses):
    assert retried(failing(number, 2), "data.txt") == "done"
    assert pauses == list(machine_errors.RETRY_PAUSES)
    with pytest.raises(MachineError, match=r"^data.txt: the machine cannot read it now \(.*\); \w"):
        retried(failing(number, 3), "data.txt")
    assert not issubclass(MachineError, (OSError, ValueError))  # what code takes for damage


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL])
def test_an_error_of_the_path_is_raised_at_once(number, pauses):
    with pytest.raises(OSError) as caught:
        retried(failing(number, 1), "data.txt")
    assert caught.value.errno == number and not pauses and not is_of_the_machine(caught.value)


def test_missing_rights_are_not_retried_and_count_only_if_asked(pauses):
    with pytest.raises(MachineError, match="let this user read it"):
        retried(failing(errno.EACCES, 9), "step-1/state.json")
    with pytest.raises(PermissionError):
        retried(failing(errno.EACCES, 9), "data.txt", with_rights=False)
    assert not pauses
    assert not is_of_the_machine(OSError("Corrupt snappy compressed data"))  # pyarrow's words for damage


@pytest.mark.parametrize(
    ("read", "call"),
    [(open_file, "stat"), (open_file, "open"), (require_file, "stat"), (lambda path: read_file(path, 100), "open")],
)
def test_opening_a_file_is_retried(read, call, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")
    right, errors = getattr(os, call), [OSError(errno.EIO, "Input/output error")] * 2

    def sometimes(*args, **kwargs):
        if errors and str(args[0]).endswith("file"):
            raise errors.pop()
        return right(*args, **kwargs)

    monkeypatch.setattr(os, call, sometimes)
    read(tmp_path / "file")
    errors += [OSError(errno.EIO, "Input/output error")] * 3
    with pytest.raises(MachineError, match=r"file: .*Input/output error.*dmesg"):
        read(tmp_path / "file")


@pytest.mark.parametrize("take", [lambda file: file.read(), lambda file: file.read(3), lambda file: file.readline()])
def test_reading_is_retried_from_the_same_position(take, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"abc\n" * 100_000)
    with open(tmp_path / "file", "rb") as file:
        expected = take(file)
    errors: list[OSError] = []

    def flaky(action, path, with_rights):
        return retried(lambda: throw(errors.pop()) if errors else action(), path, False)

    monkeypatch.setattr(files, "retried", flaky)
    with open_file(tmp_path / "file") as file:
        errors += [OSError(errno.EIO, "Input/output error")] * 2
        assert take(file) == expected and not errors
    with open_file(tmp_path / "file") as file:
        errors += [OSError(errno.EIO, "Input/output error")] * 3
        with pytest.raises(MachineError, match=f"^{tmp_path}/file: the machine cannot read it now"):
            take(file)


def test_reading_all_begins_again_after_a_failure_in_the_middle(tmp_path, monkeypatch):
    """What the system has returned before the failure is lost with it."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 1000)
    failures = [100_000, 5]

    def fail_in_the_middle(action, path, with_rights):
        def sometimes():
            if failures:
                os.lseek(file.fileno(), failures.pop(), os.SEEK_CUR)  # the system has returned so many bytes
                raise OSError(errno.EIO, "Input/output error")
            return action()

        return retried(sometimes, path, with_rights)

    with open_file(tmp_path / "file") as file:
        monkeypatch.setattr(files, "retried", fail_in_the_middle)
        file.raw.seek(7)
        assert file.raw.readall() == (bytes(range(256)) * 1000)[7:] and not failures


def test_users_files_without_permission_are_their_faults(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match="cannot be read .Permission denied."):
        read_file(tmp_path / "file", 100)


def test_a_command_ends_with_the_code_of_a_crash(capsys):
    def fail():
        raise MachineError("data.txt: the machine cannot read it")

    def refuse():
        raise JobError("no such job")

    assert cli.guarded(fail) == 1 and cli.guarded(refuse) == 2
    assert capsys.readouterr().err.splitlines() == ["data.txt: the machine cannot read it", "no such job"]


def test_used_up_inodes_are_told_from_bytes(monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "not yet" / "there"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=10, f_favail=0, f_bavail=5))
    assert error_text(full).endswith("but of inodes; delete files, such as many small ones (df -i)")
    for total, inodes, blocks in ((10, 3, 0), (0, 0, 5), (10, 0, 0)):
        status = SimpleNamespace(f_files=total, f_favail=inodes, f_bavail=blocks)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        assert error_text(full) == "No space left on device"
