"""Sources on the hub: what is downloaded, continued, taken from the cache and refused, by the client's own protocol."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.hub_server import hub_server
from torchtitan import launch
from torchtitan.core import hub
from torchtitan.core.errors import JobError
from torchtitan.core.hub import (
    Access,
    HubSource,
    as_source,
    is_public,
    local_path,
    recorded_commits,
    set_access,
    upload,
)

constants = pytest.importorskip("huggingface_hub.constants")

WEIGHTS = bytes(range(256)) * 4096
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": 1}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "original/consolidated.safetensors": b"again",
}
RECORDS = {"data/train.jsonl": b'{"text": "a"}\n', "data/test.jsonl": b'{"text": "b"}\n', "load.py": b"code"}
NAME = "hf://owner/name"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server that the client in this process talks to, with an empty cache and no token; downloads are allowed."""
    with hub_server() as (repositories, address):
        use_server(monkeypatch, address, tmp_path / "cache")
        monkeypatch.delenv(hub.COMMITS, raising=False)
        monkeypatch.setenv(hub.COMMITS, "{}")  # restored afterwards
        set_access(Access.DOWNLOAD)
        yield repositories
        set_access(Access.CACHE_ONLY)


def use_server(monkeypatch, address, cache):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)  # what is written at once
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_only_data_is_downloaded_and_once(server, tmp_path):
    commit = server.publish("models", "owner/name", MODEL)
    path = local_path(NAME, "weights")
    folder = tmp_path / "cache/models--owner--name/snapshots" / commit
    assert path == str(folder) and names_in(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    before = len(server.requests)
    set_access(Access.CACHE_ONLY)
    assert local_path(NAME, "weights") == path and local_path(NAME, "tokenizer") == path
    assert len(server.requests) == before, "without network"


def test_a_tokenizer_comes_without_weights_and_they_are_added_later(server):
    server.publish("models", "owner/name", MODEL)
    path = local_path(NAME, "tokenizer")
    assert not os.path.exists(f"{path}/model.safetensors")
    assert local_path(NAME, "weights") == path and os.path.exists(f"{path}/model.safetensors")


def test_sizes_come_without_weights_and_records(server):
    server.publish("models", "owner/name", MODEL)
    server.publish("datasets", "owner/name", RECORDS)
    set_access(Access.SIZES)
    path = local_path(NAME, "weights")
    assert names_in(Path(path)) == ["config.json", "tokenizer.json"]
    assert local_path(NAME, "records") == NAME and not server.transfers("data/train.jsonl")


def cache_of_another_program(monkeypatch, tmp_path):
    """Copy the cache, without the lists of the repositories' files, for this process to use."""
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "cache", copy, symlinks=True, ignore=shutil.ignore_patterns("trees"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(copy))


def test_files_that_another_program_fetched_are_completed(server, tmp_path, monkeypatch):
    """It leaves no list of the repository's files, without which the client takes any part for all of them."""
    server.publish("datasets", "owner/name", RECORDS)
    folder = local_path(NAME, "records").replace("/cache/", "/copy/")
    cache_of_another_program(monkeypatch, tmp_path)
    for path in (os.path.realpath(f"{folder}/data/train.jsonl"), f"{folder}/data/train.jsonl"):
        os.unlink(path)
    set_access(Access.DESCRIBE)
    with pytest.raises(JobError, match="not in the cache: 1 files, 14 bytes, would be downloaded"):
        local_path(NAME, "records")
    set_access(Access.DOWNLOAD)
    assert local_path(NAME, "records") == folder
    assert names_in(Path(folder)) == ["data/test.jsonl", "data/train.jsonl"]


def test_files_that_another_program_fetched_completely_are_used(server, tmp_path, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    folder = local_path(NAME, "weights").replace("/cache/", "/copy/")
    cache_of_another_program(monkeypatch, tmp_path)
    set_access(Access.CACHE_ONLY)
    with pytest.raises(JobError, match="not in the cache, or not complete"):
        local_path(NAME, "weights")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path(NAME, "weights") == folder, "as it cannot ask"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_access(Access.DESCRIBE)
    assert local_path(NAME, "weights") == folder
    assert len(server.transfers("model.safetensors")) == 1


def test_records_by_folder_and_by_pattern(server):
    server.publish("datasets", "owner/name", RECORDS)
    path = local_path(f"{NAME}/data/tr*.jsonl", "records")
    assert path.endswith("/data/tr*.jsonl") and len(server.transfers("data/test.jsonl")) == 0
    folder = local_path("hf://datasets/owner/name", "weights")  # the name says what it is
    assert os.path.exists(f"{folder}/data/test.jsonl") and not os.path.exists(f"{folder}/load.py")


def test_a_broken_connection_is_continued_and_not_begun_again(server, monkeypatch):
    """The client asks for the rest of a file as long as it gets further."""
    server.publish("models", "owner/name", MODEL)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.broken["model.safetensors"] = [400_000]
    folder = local_path(NAME, "weights")
    with open(f"{folder}/model.safetensors", "rb") as file:
        assert file.read() == WEIGHTS
    ranges = server.transfers("model.safetensors")
    assert len(ranges) == 2 and ranges[0] is None and ranges[1].startswith("bytes=")
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 400_000


def test_a_connection_that_breaks_again_and_again_ends_with_a_remedy(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.broken["model.safetensors"] = [70_000, *[0] * 20]
    with pytest.raises(JobError, match="the transfer failed .*; start again: complete files are kept"):
        local_path(NAME, "weights")
    set_access(Access.CACHE_ONLY)
    with pytest.raises(JobError, match=r"not in the cache, or not complete; `torchtitan download hf://owner/name`"):
        local_path(NAME, "weights")
    set_access(Access.DOWNLOAD)
    server.broken.clear()
    with open(local_path(NAME, "weights") + "/model.safetensors", "rb") as file:
        assert file.read() == WEIGHTS
    assert len(server.transfers("tokenizer.json")) == 1, "complete files are kept"


def test_a_file_of_another_size_is_refused(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.wrong_sizes["model.safetensors"] = 1000
    with pytest.raises(JobError, match="the transfer failed .*size"):
        local_path(NAME, "weights")


def test_an_upload_creates_a_private_repository_of_all_but_the_record(server, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    for name in ("config.json", "model.safetensors", "export.json", ".hidden"):
        (tmp_path / "out" / name).write_bytes(name.encode())
    with pytest.raises(JobError, match="--push me/mine: no token for the hub; log in by"):
        is_public("me/mine", False)
    with pytest.raises(JobError, match="--push mine: allowed: owner/name; correct it"):
        is_public("mine", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert not is_public("me/mine", False) and is_public("me/mine", True)
    assert upload(tmp_path / "out", "me/mine", False).endswith("me/mine")
    assert server.private == {"me/mine": True} and not is_public("me/mine", True), "the repository decides"
    *_, files = server.repos["models", "me/mine"].values()
    assert files == {name: name.encode() for name in ("config.json", "model.safetensors")}
    server.publish("models", "me/public", {})
    assert is_public("me/public", False)
    server.refused["models", "me/mine"] = (403, "")
    with pytest.raises(JobError, match="--push me/mine: the hub refuses access .HTTP 403.; log in .* with the right"):
        upload(tmp_path / "out", "me/mine", False)


TOKEN = "log in by `hf auth login`, or set HF_TOKEN"


@pytest.mark.parametrize(
    "refusal, message",
    [
        ((401, "RepoNotFound"), f"no such repository, or a private one; correct the name, or {TOKEN}"),
        ((401, ""), TOKEN),
        ((403, "GatedRepo"), f"the publisher asks for consent: accept it on the repository's page, and {TOKEN}"),
        ((403, ""), f"the hub refuses access (HTTP 403); {TOKEN}, with the right to do this"),
        ((404, "RepoNotFound"), f"no such repository, or a private one; correct the name, or {TOKEN}"),
        ((501, ""), "the hub answers HTTP 501; try again later: complete files are kept"),
    ],
)
def test_refusals_of_the_hub_have_a_remedy(server, refusal, message):
    server.publish("models", "owner/name", MODEL)
    server.refused["models", "owner/name"] = refusal
    with pytest.raises(JobError) as error:
        local_path(NAME, "weights")
    assert str(error.value).startswith(f"{NAME}: ") and message in str(error.value)


def test_revisions(server):
    first = server.publish("models", "owner/name", MODEL)
    second = server.publish("models", "owner/name", MODEL | {"config.json": b"[]"})
    server.tags["v1"] = first
    assert local_path(f"{NAME}@v1", "weights").endswith(first)
    assert local_path(NAME, "weights").endswith(second)
    assert local_path(f"{NAME}@{first}", "weights").endswith(first)
    server.tags["refs/convert/parquet"] = first
    assert local_path(f"{NAME}@refs/convert/parquet", "weights").endswith(first)
    with pytest.raises(JobError, match="no such revision; give a branch, a tag or a commit of the repository"):
        local_path(f"{NAME}@v2", "weights")


def test_offline(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    path = local_path(NAME, "tokenizer")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path(NAME, "tokenizer") == path
    for source in (NAME, "hf://owner/other"):
        with pytest.raises(JobError, match="it is not complete in the cache, and HF_HUB_OFFLINE is set; unset it, or"):
            local_path(source, "weights")


def test_no_network(server, monkeypatch, tmp_path):
    use_server(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    with pytest.raises(JobError, match="the hub cannot be reached .*; check the network, HF_ENDPOINT and the proxy"):
        local_path(NAME, "weights")


def test_the_token_is_the_clients(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    local_path(NAME, "weights")
    assert {authorization for *_, authorization in server.requests} == {"Bearer hf_secret"}


def test_what_would_be_downloaded_is_described_without_doing_it(server, tmp_path):
    commit = server.publish("models", "owner/name", MODEL)
    set_access(Access.DESCRIBE)
    with pytest.raises(JobError) as error:
        local_path(NAME, "weights")
    size = "1.0 MiB"
    assert str(error.value) == (
        f"{NAME}: not in the cache: 3 files, {size}, would be downloaded; `torchtitan download {NAME}` fetches it"
    )
    assert not server.transfers("model.safetensors") and not list((tmp_path / "cache").rglob(f"{commit}/*"))


def test_repositories_without_data_are_refused(server):
    server.publish("models", "owner/name", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(JobError, match=r"no \*.safetensors; pickles .* are not downloaded, as they can run code"):
        local_path(NAME, "weights")
    server.publish("datasets", "owner/name", {"load.py": b"code"})
    with pytest.raises(JobError, match="it has no file that is read; allowed: .*jsonl.*; look at its list of files"):
        local_path(NAME, "records")


def test_a_path_out_of_the_repository_is_refused(server, tmp_path):
    server.publish("datasets", "owner/name", {"../../../out.jsonl": b"{}"})
    with pytest.raises(
        JobError, match="the client refuses it \\(Invalid filename .*\\); give another repository or revision"
    ):
        local_path(NAME, "records")
    assert not list(tmp_path.rglob("out.jsonl"))


def test_a_full_disk_is_noticed_before_the_download(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        JobError, match=r"1.0 MiB are to be downloaded, and .* has room for .*; make room, or set HF_HOME"
    ):
        local_path(NAME, "weights")
    assert not server.transfers("config.json")


@pytest.mark.parametrize(
    "text, purpose, message",
    [
        ("hf://name", "weights", "allowed: hf://owner/name"),
        ("hf://owner/../x", "weights", "allowed"),
        ("hf://owner/name/model.bin", "weights", "allowed: a model's whole repository; leave out /model.bin"),
        ("hf://owner/name/x.pkl", "records", "other files are not downloaded"),
        ("hf://owner/name/../x.jsonl", "records", "other files are not downloaded"),
    ],
)
def test_sources_that_are_none(text, purpose, message):
    with pytest.raises(JobError, match=message):
        HubSource.parse(text, purpose)


@pytest.mark.parametrize("name", ["a--b/c", "a/b..c", "-a/b", "a/b.git", "a/" + "b" * 97])
def test_names_that_the_client_refuses(server, name):
    with pytest.raises(JobError, match=f"^hf://{name}: the client refuses it .*; give another repository or revision"):
        local_path(f"hf://{name}", "weights")


def test_parts_of_a_source():
    source = HubSource.parse("hf://datasets/a/b@refs/convert/parquet/data/*.parquet", "weights")
    assert (source.kind, source.repo, source.revision) == ("datasets", "a/b", "refs/convert/parquet")
    assert source.path == "data/*.parquet" and source.purpose == "records"


def test_a_run_keeps_the_commit_that_it_began_with(server):
    """Its record is the path in the cache, written as a source; a branch that has moved on is refused."""
    first = server.publish("models", "owner/name", MODEL)
    source = as_source(local_path(NAME, "weights"))
    assert source == f"{NAME}@{first}" and as_source("some/folder") == "some/folder"
    recorded = recorded_commits([None, 1, "folder", NAME, source, f"hf://datasets/o/d@{'a' * 40}/x/*.jsonl"])
    assert recorded == {NAME: first, "hf://datasets/o/d": "a" * 40}
    second = server.publish("models", "owner/name", MODEL)
    os.environ[hub.COMMITS] = "{}"
    HubSource.parse(NAME, "weights").download()  # by another job
    assert local_path(NAME, "weights").endswith(second)
    assert local_path(NAME, "weights", recorded).endswith(first), "although a command before it took another one"
    os.environ[hub.COMMITS] = "{}"
    with pytest.raises(JobError, match=f"it is now commit {second}, and the run began with {first}; write {source} to"):
        local_path(f"{NAME}@main", "weights", recorded)


def test_a_folder_of_another_cache_is_recorded_as_it_is(server, tmp_path):
    """The client would not look there, and would download it again, or not find it."""
    path = f"/models--owner--name/snapshots/{'a' * 40}"
    assert as_source(f"{tmp_path}/cache{path}") == f"{NAME}@{'a' * 40}"
    for place in (f"{tmp_path}/cache2", "/old", "."):
        assert as_source(place + path) == place + path


def test_ranks_take_the_commit_of_their_launcher(server):
    first = server.publish("models", "owner/name", MODEL)
    path = local_path(NAME, "weights")
    assert json.loads(os.environ[hub.COMMITS]) == {NAME: first}
    server.publish("models", "owner/name", MODEL)
    HubSource.parse(NAME, "weights").download()
    set_access(Access.CACHE_ONLY)
    assert local_path(NAME, "weights") == path


def test_another_machine_takes_the_commit_of_the_first(server, monkeypatch):
    """The branch has moved on before it downloaded; then it downloads what the first machine has."""
    first = server.publish("models", "owner/name", MODEL)
    of_first = {NAME: first}
    second = server.publish("models", "owner/name", MODEL | {"config.json": b'{"a": 1}'})
    assert local_path(NAME, "weights").endswith(second)
    downloads = []
    monkeypatch.setattr(launch, "load_and_check", lambda arguments, ranks: (downloads.append(ranks) or True, ""))
    launch.agree_on_commits({NAME: second}, [], 4)
    assert not downloads
    launch.agree_on_commits(of_first, [], 4)
    assert downloads == [4] and local_path(NAME, "weights").endswith(first)


def test_a_rank_of_torchrun_waits_for_the_first(server, monkeypatch):
    server.publish("models", "owner/name", MODEL)
    set_access(Access.WAIT)
    waits = []

    def sleep(seconds):
        if seconds == 1:  # the client waits for its own threads too
            waits.append(seconds)
        if seconds == 1 and len(waits) == 2:
            HubSource.parse(NAME, "weights").download()

    monkeypatch.setattr(hub.time, "sleep", sleep)
    assert os.path.exists(local_path(NAME, "weights") + "/model.safetensors") and len(waits) == 2
