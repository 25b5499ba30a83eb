"""Sources on the Hugging Face Hub: `hf://owner/name`, with `@revision` for a branch, a tag or a commit.

`hf://datasets/owner/name` is a repository of records, also with a path or pattern of files after the name. All
traffic and all files are those of the client `huggingface_hub`: its cache, its token, its endpoint (HF_ENDPOINT), its
offline mode (HF_HUB_OFFLINE), and its continuation of broken transfers. Only files that are data are downloaded:
safetensors, JSON, tokenizers and records; never pickles or code.

A source in the cache is used as it is, without network. Which commit a run took is in its `config.toml`.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError, format_bytes

SCHEME = "hf://"
MODELS, DATASETS = "models", "datasets"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")
RECORD_FILES = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json", "*.parquet", "*.arrow", "*.csv", "*.txt")
FILES = {
    "sizes": TOKENIZER_FILES,
    "tokenizer": TOKENIZER_FILES,
    "weights": ("*.safetensors", *TOKENIZER_FILES),
    "records": RECORD_FILES,
}
"""Patterns of the files that are downloaded, by what they are for."""
IGNORED = {MODELS: ["*/*", "consolidated*"], DATASETS: ["dataset_infos.json"]}
"""Patterns that are not: folders with other formats of a model, and Mistral's second copy of its weights."""
WAIT_SECONDS = 3600
COMMITS = "TORCHTITAN_HUB_COMMITS"
"""Environment variable with the commits that the launcher has chosen, as JSON, for its ranks."""
_REVISION = r"refs/(?:pr|convert)/[\w.-]+|[\w.-]+"
_SOURCE = re.compile(rf"(?:(models|datasets)/)?([\w.-]+/[\w.-]+?)(?:@({_REVISION}))?(?:/(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/(models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})(?:/(.*))?")


class Access(Enum):
    """A process's permission to fetch a source that is not in the cache."""

    CACHE_ONLY = 0
    DESCRIBE = 1  # ask the hub what would be downloaded
    DOWNLOAD = 2
    WAIT = 3  # until another process of this machine has downloaded it
    SIZES = 4  # download configurations and tokenizers alone


_access = Access.CACHE_ONLY


def set_access(access: Access) -> None:
    """Set what this process may do about sources that are not in the cache."""
    global _access
    _access = access


def is_hub_source(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEME)


@dataclass(frozen=True)
class HubSource:
    """A repository of the hub, what its files are for (FILES), and for records a path or pattern in it."""

    kind: str
    repo: str
    revision: str | None
    path: str
    purpose: str

    @classmethod
    def parse(cls, text: str, purpose: str) -> "HubSource":
        """Parse a source. Raises JobError."""
        match = _SOURCE.fullmatch(text.removeprefix(SCHEME).rstrip("/"))
        if match is None:
            raise JobError(f"{text}: allowed: hf://owner/name, or hf://owner/name@revision; correct it")
        kind, repo, revision, path = match.groups()
        kind = kind or (DATASETS if purpose == "records" else MODELS)
        purpose = "records" if kind == DATASETS else purpose
        if path and kind == MODELS:
            raise JobError(f"{text}: allowed: a model's whole repository; leave out /{path}")
        if path and (".." in path.split("/") or not path.endswith(tuple(pattern[1:] for pattern in RECORD_FILES))):
            allowed = ", ".join(RECORD_FILES)
            raise JobError(f"{text}: allowed: a path of files {allowed}; other files are not downloaded")
        return cls(kind, repo, revision, path or "", purpose)

    def __str__(self) -> str:
        prefix = f"{DATASETS}/" * (self.kind == DATASETS)
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{prefix}{self.repo}{revision}" + f"/{self.path}" * bool(self.path)

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def key(self) -> str:
        """Return the name of the source among COMMITS: without its path."""
        return str(replace(self, path=""))

    def at(self, commit: str) -> "HubSource":
        return replace(self, revision=commit)

    def _request(self) -> dict[str, Any]:
        return {
            "repo_id": self.repo,
            "repo_type": self.kind.removesuffix("s"),
            "revision": self.revision,
            "allow_patterns": [self.path] if self.path else list(FILES[self.purpose]),
            "ignore_patterns": IGNORED[self.kind],
        }

    def find(self) -> Path | None:
        """Return the folder in the cache, of all files that are needed; None if one is missing. Raises JobError.

        Other programs fetch single files of a repository. Without its list of files, which only the hub has, the client
        cannot tell whether these are all, and they count as such only if it must not ask.
        """
        from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
        from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

        try:
            with translated_errors(self, LocalEntryNotFoundError):
                folder = Path(snapshot_download(**self._request(), local_files_only=True))
            get_cached_repo_tree(self.repo, repo_type=self._request()["repo_type"], revision=folder.name)
        except LocalEntryNotFoundError:
            return None
        except CachedRepoTreeNotFoundError:
            return folder if constants.HF_HUB_OFFLINE else None
        return folder

    def missing_files(self) -> list[Any]:
        """Ask the hub which files are not in the cache; each has `filename` and `file_size`. Raises JobError."""
        from huggingface_hub import snapshot_download

        with translated_errors(self):
            files = snapshot_download(**self._request(), dry_run=True)
        names = [file.filename for file in files]
        if self.purpose == "weights" and not any(name.endswith(".safetensors") for name in names):
            raise JobError(
                f"{self}: it has no *.safetensors; pickles (*.bin, *.pt) are not downloaded, as they can run code; "
                "take a repository or revision with safetensors"
            )
        if not names:
            allowed = self.path or ", ".join(FILES[self.purpose])
            raise JobError(f"{self}: it has no file that is read; allowed: {allowed}; look at its list of files")
        return [file for file in files if file.will_download]

    def download(self) -> Path:
        """Download what is missing and return the folder. Raises JobError.

        The client continues a transfer that breaks, as long as it gets further; complete files are kept.
        """
        from huggingface_hub import constants, snapshot_download

        missing = self.missing_files()
        size = sum(file.file_size for file in missing)
        place = Path(constants.HF_HUB_CACHE)
        existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        if (free := shutil.disk_usage(existing).free) < size:
            raise JobError(
                f"{self}: {format_bytes(size)} are to be downloaded, and {place} has room for {format_bytes(free)}; "
                "make room, or set HF_HOME to a larger disk"
            )
        with translated_errors(self):
            return Path(snapshot_download(**self._request()))


@contextmanager
def translated_errors(source: HubSource | str, *expected: type[Exception]) -> Iterator[None]:
    """Raise the errors of the hub's client as JobErrors with a remedy, except for the expected ones."""
    from huggingface_hub import errors

    transport_error: Any = getattr(errors, "HTTPError", OSError)  # of the HTTP library that the client uses
    try:
        yield
    except expected:
        raise
    except (transport_error, OSError, ValueError, errors.EntryNotFoundError) as error:
        raise JobError(f"{source}: {_reason_and_remedy(error)}") from error


def _reason_and_remedy(error: BaseException) -> str:
    from huggingface_hub import errors

    cause = error.__cause__
    token = "log in by `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"the publisher asks for consent: accept it on the repository's page, and {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision; give a branch, a tag or a commit of the repository"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one; correct the name, or {token}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the hub refuses access (HTTP {status}); {token}, with the right to do this"
        return f"the hub answers HTTP {status}; try again later: complete files are kept"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.DryRunError | errors.LocalEntryNotFoundError):
        if isinstance(cause, errors.HfHubHTTPError):
            return _reason_and_remedy(cause)
        if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(cause, errors.OfflineModeIsEnabled):
            remedy = "unset it, or copy the client's cache from a machine that has it"
            return f"it is not complete in the cache, and HF_HUB_OFFLINE is set; {remedy}"
        reason = "the hub cannot be reached" + f" ({cause})" * (cause is not None)
        return f"{reason}; check the network, HF_ENDPOINT and the proxy, and start again"
    if isinstance(error, ValueError):  # a name of a file or repository that is none
        return f"the client refuses it ({error}); give another repository or revision"
    remedy = "start again: complete files are kept"
    return f"the transfer failed ({type(error).__name__}: {error}); {remedy}"


def local_folder(text: str) -> str:
    """Return the folder of a model on the hub, as an argument type: downloaded where needed. Other text is a path."""
    return local_path(text, "weights") if is_hub_source(text) else os.path.expanduser(text)


def pinned(source: HubSource, recorded: dict[str, str]) -> HubSource:
    """Return the source at the commit that it has in this run, if that is known.

    `recorded`: commits with which the run began, by the source without its revision.
    """
    if source.is_pinned:
        return source
    commit = None if source.revision else recorded.get(replace(source, path="").key)
    commit = commit or chosen_commits().get(source.key)
    return source if commit is None else source.at(commit)


def local_path(text: str, purpose: str, recorded: dict[str, str] | None = None) -> str:
    """Return the path in the cache of a source, which is downloaded where this process may.

    With Access.SIZES, of weights the folder without them, and the text of records. `recorded`: see `pinned`. Raises
    JobError.
    """
    require_client(text)
    source = HubSource.parse(text, purpose)
    if _access is Access.SIZES:
        if source.purpose == "records":
            return text
        source = replace(source, purpose="sizes")
    pinned_source = pinned(source, recorded or {})
    folder, end = pinned_source.find(), time.monotonic() + WAIT_SECONDS
    while folder is None and _access is Access.WAIT and time.monotonic() < end:
        time.sleep(1)
        folder = pinned_source.find()
    missing = pinned_source.missing_files() if folder is None and _access is Access.DESCRIBE else None
    if folder is None and _access not in (Access.DOWNLOAD, Access.SIZES) and missing != []:
        remedy = f"`torchtitan download {pinned_source}` fetches it"
        if missing is not None:
            size = format_bytes(sum(file.file_size for file in missing))
            raise JobError(
                f"{pinned_source}: not in the cache: {len(missing)} files, {size}, would be downloaded; {remedy}"
            )
        raise JobError(f"{pinned_source}: not in the cache, or not complete; {remedy}")
    folder = folder or pinned_source.download()
    before = (recorded or {}).get(replace(source, revision=None, path="").key)
    if before not in (None, folder.name) and not source.is_pinned:
        raise JobError(
            f"{source}: it is now commit {folder.name}, and the run began with {before}; write {source.at(before)} to "
            "go on with that, or give another job.dump_folder"
        )
    os.environ[COMMITS] = json.dumps(chosen_commits() | {source.key: folder.name})
    return str(folder / source.path) if source.path else str(folder)


@cache
def require_client(text: str) -> None:
    """Raise JobError, about a source, if the hub's client is missing or too old."""
    try:
        import huggingface_hub
    except ImportError:
        raise JobError(
            f"{text} needs the package huggingface_hub; install it with: pip install huggingface_hub"
        ) from None
    if int(huggingface_hub.__version__.partition(".")[0]) < 2:
        remedy = "pip install -U 'huggingface_hub>=2'"
        raise JobError(f"{text} needs huggingface_hub 2 or newer, not {huggingface_hub.__version__}; {remedy}")


def chosen_commits() -> dict[str, str]:
    """Return the commits that this process or its launcher has chosen, by source."""
    return json.loads(os.environ.get(COMMITS, "{}"))


def take_commits(commits: dict[str, str]) -> bool:
    """Take the commits that the first machine has chosen. Return whether this one had chosen others."""
    before = chosen_commits()
    os.environ[COMMITS] = json.dumps(before | commits)
    return any(before.get(key, commit) != commit for key, commit in commits.items())


def as_source(text: str) -> str:
    """Return the pinned source of a path in the client's cache; another text unchanged."""
    match = _SNAPSHOT.fullmatch(text) if "/snapshots/" in text else None
    if match is None or not _is_in_cache(text):
        return text
    kind, owner, name, commit, path = match.groups()
    return str(HubSource(kind, f"{owner}/{name}", commit, path or "", ""))


def name_and_commit(path: str) -> tuple[str, str | None]:
    """Return how other programs name a model in the client's cache; for another path, the path and None."""
    text = as_source(path)
    if not is_hub_source(text):
        return text, None
    source = HubSource.parse(text, "weights")
    return source.repo, source.revision


def _is_in_cache(path: str) -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return Path(path).is_relative_to(constants.HF_HUB_CACHE)


def recorded_commits(values: Iterable[object]) -> dict[str, str]:
    """Return the commits of the pinned sources among values, by the source without its revision; the last counts."""
    commits = {}
    for value in values:
        source = HubSource.parse(value, "weights") if isinstance(value, str) and is_hub_source(value) else None
        if source is not None and source.revision is not None and source.is_pinned:
            commits[replace(source, revision=None, path="").key] = source.revision
    return commits


NOT_UPLOADED = ["export.json", ".*"]
"""Files of an export that are not uploaded: the record has paths of this machine."""


def is_public(repo: str, public: bool) -> bool:
    """Return True if an upload to this repository would be public: by `public`, or because the repository is.

    Raises JobError for a name that is none, without a token, and if the hub refuses to answer.
    """
    require_client(f"--push {repo}")
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is None:
        raise JobError(f"--push {repo}: allowed: owner/name; correct it")
    if huggingface_hub.get_token() is None:
        raise JobError(f"--push {repo}: no token for the hub; log in by `hf auth login`, or set HF_TOKEN")
    with translated_errors(f"--push {repo}"):
        try:
            return not huggingface_hub.HfApi().repo_info(repo).private
        except RepositoryNotFoundError:
            return public


def upload(folder: Path, repo: str, public: bool) -> str:
    """Upload a folder to a model repository, created if there is none, and return its address. Raises JobError."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    with translated_errors(f"--push {repo}"):
        url = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=NOT_UPLOADED)
    return str(url)
