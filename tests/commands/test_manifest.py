"""Manifests: what they hold follows from the job, and a pod's command does what Kubernetes cannot.

`kubernetes-validate --strict` has found no fault in these objects, with the schemas of 1.31 and 1.37; it is too large
for the tests' environment.
"""

import os
import subprocess

import pytest
import yaml

from torchtitan import cli
from torchtitan.commands import manifest
from torchtitan.config.manager import load
from torchtitan.process import exit

POD = ["--for=k8s", "--nodes=2", "--gpus=8", "--image=registry.example/torchtitan:0.2"]
VOLUME = ["--volume=claim:/data", "--job.dump_folder=/data/runs/My_Run"]


def printed(capsys, *argv: str) -> str:
    assert cli.main(["manifest", "llama3_8b", *argv]) == 0
    return capsys.readouterr().out


def objects(capsys, *argv: str) -> dict[str, dict]:
    return {each["kind"]: each for each in yaml.safe_load_all(printed(capsys, *POD, *VOLUME, *argv))}


def test_all_pods_start_together_and_meet_by_the_services_name(capsys):
    found = objects(capsys)
    job, service = found["Job"]["spec"], found["Service"]["spec"]
    pod = job["template"]["spec"]
    assert list(found) == ["ConfigMap", "Service", "Job"] and found["Job"]["metadata"]["name"] == "my-run"
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert service == {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "my-run"}}
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert environment == {"NNODES": "2", "HEAD_ADDR": "my-run-0.my-run", "HEAD_PORT": "29500", "NODE_RANK": None}
    assert pod["subdomain"] == "my-run" and pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "labels" in found["Job"]["metadata"] and "kueue" not in str(found)
    assert objects(capsys, "--queue=team")["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_the_name_is_one_of_a_service(capsys):
    """A Service refuses a name that begins with a digit or ends in a dash, as of the folder 8b."""
    long = f"{'a' * 39}_b"
    for folder, name in (("8b", "run-8b"), (long, "a" * 39), ("__", "torchtitan")):
        text = printed(capsys, *POD, VOLUME[0], f"--job.dump_folder=/data/{folder}")
        assert {each["metadata"]["name"] for each in yaml.safe_load_all(text)} == {name}


def test_the_job_in_the_pods_is_the_resolved_one(capsys, tmp_path):
    text = objects(capsys, "--training.steps=7")["ConfigMap"]["data"]["job.toml"]
    (tmp_path / "job.toml").write_text(text)
    config = load(["--job.config_file", str(tmp_path / "job.toml")])
    assert config.training.steps == 7 and config.job.dump_folder == "/data/runs/My_Run"
    assert (config.model, config.optimizer) == (load(["llama3_8b"]).model, load(["llama3_8b"]).optimizer)


def test_exit_codes_are_retried_or_not(capsys):
    job = objects(capsys)["Job"]["spec"]
    ignored, fatal = job["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert fatal["action"] == "FailJob" and fatal["onExitCodes"]["containerName"] == "trainer"
    codes = set(fatal["onExitCodes"]["values"])
    assert not codes & (exit.STOPPED | {0, exit.CRASHED, exit.HUNG, exit.DIFFERING, 137})
    assert codes > exit.EXPLAINED - exit.STOPPED and fatal["onExitCodes"]["values"] == sorted(codes)
    assert job["podReplacementPolicy"] == "Failed" and job["template"]["spec"]["restartPolicy"] == "Never"


def test_shared_memory_and_a_grace_period_longer_than_a_save(capsys):
    for size in ("0.5Gi", "64Gi"):
        pod = objects(capsys, f"--shm={size}")["Job"]["spec"]["template"]["spec"]
        (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": size}
    seconds_of_a_save = 8.03e9 * 12 / 2 / 1e9
    assert pod["terminationGracePeriodSeconds"] > 2 * seconds_of_a_save
    pod = objects(capsys, "--grace=45")["Job"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45


def test_a_pod_deletes_the_lock_of_its_own_name_and_starts_the_launcher(capsys, tmp_path):
    """Its predecessor was killed, and Kubernetes starts it only after that one's end."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    objects_of_run = yaml.safe_load_all(
        printed(capsys, *POD, f"--volume=claim:{tmp_path}", f"--job.dump_folder={folder}")
    )
    (container,) = list(objects_of_run)[-1]["spec"]["template"]["spec"]["containers"]
    host = os.uname().nodename
    (folder / "run.lock.1").write_text(f'{{"host": "{host}", "machine": ""}}')
    (folder / "run.lock.2").write_text(f'{{"host": "{host}-1", "machine": ""}}')
    programs = {"python3": 'echo "$@"', "getent": f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exit 2; }}"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(container["command"], env=environment, capture_output=True, text=True)
    assert done.stdout == "-m torchtitan.launch 8 --job.config_file /job/job.toml\n", done.stderr
    assert [path.name for path in folder.iterdir()] == ["run.lock.2"]
    assert (tmp_path / "asked").exists()  # it has waited until the first pod's name resolves


def test_a_batch_script_for_slurm(capsys):
    text = printed(capsys, "--for=slurm", "--nodes=4", "--time=1:00:00", "--image=a.sif", "--training.steps=5")
    assert text.splitlines()[:5] == [
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=llama3-8b",
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
    ]
    assert "#SBATCH --time=1:00:00\n" in text and f"#SBATCH --signal=B:USR1@{60 + 50}\n" in text
    assert "export CONFIG_FILE=train_configs/llama3_8b.toml\nexport NGPU=8\nexport CONTAINER=a.sif\n" in text
    assert text.endswith('exec scripts/multinode_trainer.slurm --training.steps=5 "$@"\n')
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_folder_of_the_submission_is_mounted_beside_the_volumes(capsys):
    """Launchers start in it, and read the job there."""
    text = printed(capsys, "--for=slurm", "--image=a.sif", "--volume=x:/data", "--volume=y:/more", "--name=My_Run")
    assert "#SBATCH --job-name=My_Run\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("export CONTAINER_MOUNTS=")]
    done = subprocess.run(
        ["bash", "-c", f"{line}; echo $CONTAINER_MOUNTS"],
        env={"SLURM_SUBMIT_DIR": "/home/me/repository"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "/home/me/repository:/home/me/repository,/data:/data,/more:/more\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--for=slurm"], "no job is given"),
        (["llama3_8b", *POD[:3], *VOLUME], "--image: not given"),
        (["llama3_8b", *POD], "job.dump_folder: given outputs/llama3_8b; allowed: a folder in a --volume CLAIM:PATH"),
        (["llama3_8b", *POD, "--volume=claim"], "--volume: given 'claim'; allowed: CLAIM:PATH"),
        (["llama3_8b", "--for=slurm", "--volume=/data"], "--volume: given '/data'; allowed: CLAIM:PATH"),
        (["llama3_8b", *POD, *VOLUME, "--name=8B"], "--name: given '8B'; allowed: at most 50 of a-z"),
        (["llama3_8b", "--for=slurm", "--name=a b"], "--name: given 'a b'; allowed: letters, digits"),
        (["llama3_8b", "--for=slurm", "--time=1 h"], "--time: given '1 h'; allowed: a time limit of SLURM"),
        (["llama3_8b", *POD, *VOLUME, "--training.steps=0"], "training.steps: given 0"),
        (["llama3_8b", "llama3_70b", "--for=slurm", "--gpus=8"], "give one job file"),
        (["llama3_8b", "--for=slurm", "--time=::-"], "--time: given '::-'; allowed: a time limit of SLURM"),
        (["llama3_8b", *POD, *VOLUME, "--shm=0.0Gi"], "--shm: given '0.0Gi'; allowed: a quantity of Kubernetes"),
        (["llama3_8b", *POD, *VOLUME, "--queue=a b"], "--queue: given 'a b'; allowed: at most 63 of a-z"),
        (["llama3_8b", "--for=slurm", "--image=a b"], "--image: given 'a b'; allowed: the name of an image"),
        (["llama3_8b", *POD, *VOLUME, "--time=1:00:00"], "--time: allowed: with --for slurm"),
        (["llama3_8b", "--for=slurm", "--shm=1Gi"], "--shm: allowed: with --for k8s"),
        (["llama3_8b", "--for=slurm", "--queue=team"], "--queue: allowed: with --for k8s"),
        (["llama3_8b", "--for=slurm", "--volume=x:/data"], "--volume: allowed: with --image"),
        (
            ["llama3_8b", *POD, VOLUME[0], "--job.dump_folder=/data/../x"],
            "job.dump_folder: given /x; allowed: a folder",
        ),
        (["llama3_8b", *POD, *VOLUME, "--volume=b:/data/"], "--volume: given 'b:/data/'; allowed: a path without"),
        (["llama3_8b", *POD, *VOLUME, "--volume=b:/dev/shm"], "--volume: given 'b:/dev/shm'; allowed: a path without"),
    ],
    ids=[
        "no job",
        "no image",
        "folder of a pod",
        "no path",
        "no claim",
        "name",
        "name of slurm",
        "time",
        "a faulty job",
        "two jobs",
        "form of a time",
        "quantity",
        "queue",
        "image",
        "time of a pod",
        "memory of a machine",
        "queue of a machine",
        "volume without a container",
        "folder outside of the volume",
        "two volumes at a path",
        "volume at a path of the pod",
    ],
)
def test_what_cannot_run_is_refused(argv, message, capsys):
    assert cli.main(["manifest", *argv]) == 2
    assert message in capsys.readouterr().err


def test_codes_are_those_of_the_batch_script():
    assert {0, *manifest.FATAL} - {exit.OUT_OF_MEMORY, exit.NOT_EXPORTED} == {0, 2, 3, 4, 5, 7}
