"""`torchtitan manifest JOB --for slurm|k8s`: print what a scheduler needs to run a job on several machines.

For Kubernetes: a ConfigMap with the resolved job, a headless Service, which names the machines, and an Indexed
Job with one pod for each machine. The launchers in the pods wait for each other, so the ranks start together when the
last pod does; a queue of Kueue also admits all pods at once. For SLURM: a batch script that ends in
scripts/multinode_trainer.slurm.
"""

import argparse
import math
import re
import shlex
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

import yaml

from torchtitan.commands.command_lines import parse_command
from torchtitan.config.manager import to_toml
from torchtitan.config.options import ConfigError, Fault
from torchtitan.core.errors import JobError
from torchtitan.core.files import shipped_jobs
from torchtitan.process import exit
from torchtitan.rules import Facts
from torchtitan.rules.loading import load_valid, without_resume

FATAL = sorted({exit.REFUSED, exit.NOT_LOADED, exit.NON_FINITE, exit.CRASH_LOOP, exit.NOT_SAVED, exit.NOT_EXPORTED})
"""Exit codes that would come again; a person has to look."""
FATAL.append(exit.OUT_OF_MEMORY)
RETRIES = 3
"""Times that all pods may be started again after other codes than FATAL, beside preemption, which does not count."""
JOB_FOLDER, JOB_FILE, PORT, USER = "/job", "job.toml", 29500, 1000
SHARED_MEMORY = "/dev/shm"
DEFAULTS = {"time": "24:00:00", "shm": "16Gi", "queue": ""}
FORMS = {
    "time": (
        r"\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|UNLIMITED",
        "a time limit of SLURM, such as 24:00:00 or 2-00:00:00",
    ),
    "shm": (r"(?=.*[1-9])\d+(\.\d+)?([KMGT]i|[kMGT])?", "a quantity of Kubernetes, such as 16Gi"),
    "queue": (
        r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?",
        "at most 63 of a-z, 0-9, - and ., first and last a letter or digit",
    ),
    "image": (r"[^\s-]\S*", "the name of an image, without spaces"),
}
"""Option -> regex of its values, and what it allows."""
ONLY_FOR = {"time": "slurm", "shm": "k8s", "queue": "k8s"}
"""Options that one scheduler has and the other would ignore."""
CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 weights and two moments."""
DISK_BYTES = 1e9
"""Bytes a second that a machine is assumed to write."""
STEP_SECONDS = 60
OF_THE_CLUSTER = {
    *("model.tokenizer_path", "training.dataset_path", "validation.dataset_path", "checkpoint.initial_load_path"),
    *("job.dump_folder", "adapter.initial_path"),
}
"""Options with paths of the machine that a pod runs on."""


def main(argv: list[str]) -> int:
    options, job_args = parse_command("manifest", argv)
    if not job_args:
        raise JobError("torchtitan manifest: no job is given; give a job's TOML file, or torchtitan manifest --help")
    ranks = options.nodes * options.gpus
    facts = load_valid(job_args, ranks, "cuda", _is_judged_here, without_resume)
    _require_names_and_paths(options)
    for name, value in DEFAULTS.items():
        setattr(options, name, getattr(options, name) or value)
    if options.scheduler == "slurm":
        print(batch_script(facts, options, job_args), end="")
        return 0
    _require_pods_have_all(facts, options)
    print(f"# {options.nodes} x {options.gpus} GPUs; start it with: kubectl apply -f FILE")
    objects = kubernetes_objects(facts, options)
    print(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120), end="")
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _is_judged_here(fault: Fault) -> bool:
    return fault.key not in OF_THE_CLUSTER and not fault.key.startswith("training.sources")


def grace_seconds(facts: Facts, options: argparse.Namespace) -> int:
    """Return the seconds from a stop signal to the end: `--grace`, or the time of a step and of two saves."""
    if options.grace is not None:
        return int(options.grace)
    save = facts.model.args.num_parameters * CHECKPOINT_BYTES / options.nodes / DISK_BYTES
    return STEP_SECONDS + 10 * math.ceil(2 * save / 10)


def batch_script(facts: Facts, options: argparse.Namespace, job_args: list[str]) -> str:
    """Return a batch script that SLURM's sbatch takes, to be called at the top of the repository."""
    request = {
        "job-name": _name(facts, options),
        "nodes": options.nodes,
        "gpus-per-node": options.gpus,
        "exclusive": "",
        "time": options.time,
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:USR1@{grace_seconds(facts, options)}",
    }
    lines = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in request.items()]
    image = [f"export CONTAINER={shlex.quote(options.image)}"] if options.image else []
    if mounts := [volume.partition(":")[2] for volume in options.volume]:
        volumes = shlex.quote("".join(f",{path}:{path}" for path in mounts))
        image.append(f'export CONTAINER_MOUNTS="$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"{volumes}')
    command = shlex.join(["scripts/multinode_trainer.slurm", *_overrides(job_args)])
    file = f"train_configs/{job_args[1]}.toml" if job_args[1] in shipped_jobs() else job_args[1]
    variables = [f"export CONFIG_FILE={shlex.quote(file)}", f"export NGPU={options.gpus}", *image]
    return "\n".join(["#!/usr/bin/env bash", *lines, *variables, f'exec {command} "$@"', ""])


def _overrides(job_args: list[str]) -> list[str]:
    """Return the arguments of a job after its file; there is only one."""
    if job_args[0] != "--job.config_file" or job_args[2:3] == ["--job.config_file"]:
        raise JobError("torchtitan manifest --for slurm: give one job file, which CONFIG_FILE names, and options")
    return job_args[2:]


def _name(facts: Facts, options: argparse.Namespace) -> str:
    folder = PurePosixPath(facts.config.job.dump_folder).name
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")[:40].strip("-") or "torchtitan"
    return options.name or (name if name[0].isalpha() else f"run-{name}")  # names of Services begin with a letter


def _require_names_and_paths(options: argparse.Namespace) -> None:
    name, allowed = r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", "at most 50 of a-z, 0-9 and -, first a letter, last no -"
    if options.scheduler == "slurm":
        name, allowed = r"[\w.-]+", "letters, digits, _, - and ."
    if options.name is not None and not re.fullmatch(name, options.name):
        raise JobError(f"--name: given {options.name!r}; allowed: {allowed}")
    for option, (form, values) in FORMS.items():
        value = getattr(options, option)
        if value is not None and not re.fullmatch(form, value):
            raise JobError(f"--{option}: given {value!r}; allowed: {values}")
        if value is not None and ONLY_FOR.get(option, options.scheduler) != options.scheduler:
            raise JobError(f"--{option}: allowed: with --for {ONLY_FOR[option]}")
    _require_separate_mounts(options.volume)
    if options.volume and options.scheduler == "slurm" and not options.image:
        raise JobError("--volume: allowed: with --image, for its container; without one all paths are there")


def _require_separate_mounts(volumes: list[str]) -> None:
    """Raise JobError for a volume that is none, or at the path of another mount."""
    used = {PurePosixPath(path) for path in ("/", JOB_FOLDER, SHARED_MEMORY)}
    for volume in volumes:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[^,:\s]*", volume):
            raise JobError(f"--volume: given {volume!r}; allowed: CLAIM:PATH, a claim's name and an absolute path")
        path = PurePosixPath(volume.partition(":")[2])
        if path in used or ".." in path.parts:
            mounted = ", ".join(sorted(map(str, used)))
            raise JobError(
                f"--volume: given {volume!r}; allowed: a path without .. that no other volume has, not {mounted}"
            )
        used.add(path)


def _require_pods_have_all(facts: Facts, options: argparse.Namespace) -> None:
    if not options.image:
        raise JobError("--image: not given; allowed: the image of the pods, with this package; see docs/clusters.md")
    folder = PurePosixPath(normpath(facts.config.job.dump_folder))
    mounts = [PurePosixPath(volume.partition(":")[2]) for volume in options.volume]
    if not any(folder.is_relative_to(mount) for mount in mounts):
        allowed = "a folder in a --volume CLAIM:PATH that all pods share, as a pod loses its own files"
        remedy = "e.g. --volume my-claim:/data --job.dump_folder /data/outputs/run"
        raise ConfigError([Fault("the job", "job.dump_folder", str(folder), allowed, remedy)])


def kubernetes_objects(facts: Facts, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the objects to apply, in order."""
    name, labels = _name(facts, options), {"app.kubernetes.io/name": "torchtitan-toml"}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {JOB_FILE: to_toml(facts.config)}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # the machines meet before any of them is ready
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata
        | {"labels": labels | ({"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {})},
        "spec": {
            "completionMode": "Indexed",
            "completions": options.nodes,
            "parallelism": options.nodes,
            "backoffLimit": RETRIES * options.nodes,
            "podReplacementPolicy": "Failed",  # never two pods of one index: see _command
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": sorted(FATAL)},
                    },
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": _pod(facts, options, name)},
        },
    }
    return [config, service, job]


def _pod(facts: Facts, options: argparse.Namespace, name: str) -> dict[str, Any]:
    claims = [volume.partition(":")[::2] for volume in options.volume]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environment = {"NNODES": str(options.nodes), "HEAD_ADDR": f"{name}-0.{name}", "HEAD_PORT": str(PORT)}
    container = {
        "name": "trainer",
        "image": options.image,
        "command": ["/bin/sh", "-c", _command(facts, options)],
        "env": [
            *({"name": key, "value": value} for key, value in environment.items()),
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": options.gpus}},
        "volumeMounts": [
            {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": SHARED_MEMORY},
            *({"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(claims)),
        ],
    }
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": grace_seconds(facts, options),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": [
            {"name": "job", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
            *(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, (claim, _) in enumerate(claims)
            ),
        ],
    }


def _command(facts: Facts, options: argparse.Namespace) -> str:
    """Return the shell command of a pod.

    A pod that was killed leaves its lock in the run's folder. Its successor has the same host name and starts only
    after its end, but cannot see that, so it deletes the lock with its name.
    """
    locks = f"{shlex.quote(facts.config.job.dump_folder)}/run.lock.*"
    forget = f'grep -lsFZ "\\"host\\": \\"$(hostname)\\"" {locks} | xargs -0r rm -f'
    # an address that does not resolve is a fault of the job to the launcher, and the first pod may not be there yet
    wait = 'until getent hosts "$HEAD_ADDR" > /dev/null; do sleep 1; done; ' if options.nodes > 1 else ""
    launch = f"exec python3 -m torchtitan.launch {options.gpus} --job.config_file {JOB_FOLDER}/{JOB_FILE}"
    return f"{forget}; {wait}{launch}"
