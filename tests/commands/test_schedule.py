"""Tests of `torchtitan schedule`: output, pictures and refused arguments, for its options and for a job."""

import errno
import re

import pytest
from PIL import Image

from tests.support import jobs
from torchtitan import cli
from torchtitan.commands import schedule
from torchtitan.parallelisms.pipeline.actions import load_schedule_csv
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate
from torchtitan.parallelisms.pipeline.tables import build_table


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Return a function that runs the command in an empty folder and returns (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHTITAN_TRACEBACK", raising=False)

    def command(*argv):
        try:
            code = cli.main(["schedule", *map(str, argv)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


def comparison_rows(out):
    """Parse the rows of the comparison: name -> (makespan, bubble, peak)."""
    rows = re.findall(r"^[> ] (\S+) +([\d.]+) +([\d.]+%) +([\d.]+)$", out, re.MULTILINE)
    return {name: (float(makespan), bubble, float(peak)) for name, makespan, bubble, peak in rows}


def test_output_for_a_schedule(run, tmp_path):
    code, out, err = run("--pp", 4, "--microbatches", 16, "--schedule", "zbvzerobubble")
    assert (code, err) == (0, "")
    head = [
        "ZBVZeroBubble          4 ranks x 2 stages, 16 microbatches, F:I:W = 1:1:1",
        "bubble                 3.0% of the ranks' time",
        "makespan               49.5, each rank is busy 48",
        "peak activations       4 4 4 4 by rank, in a rank's layers x a microbatch",
    ]
    assert out.splitlines()[:4] == head
    assert comparison_rows(out) == {
        "InterleavedZeroBubble": (49.5, "3.0%", 4),
        "ZBVZeroBubble": (49.5, "3.0%", 4),
        "DualPipeV": (49.5, "3.0%", 4.5),
        "Interleaved1F1B": (52.5, "8.6%", 5.5),
        "LoopedBFS": (52.5, "8.6%", 16),
        "1F1B": (57, "15.8%", 4),
        "GPipe": (57, "15.8%", 16),
    }
    assert re.findall("^> (.*?) ", out, re.MULTILINE) == ["ZBVZeroBubble"]
    assert out.endswith("picture                schedule.png\n")
    with Image.open(tmp_path / "schedule.png") as picture:
        assert picture.format == "PNG" and picture.width > 2000


def test_defaults(run):
    out = run()[1]
    assert out.startswith("1F1B                   4 ranks x 1 stage, 16 microbatches, F:I:W = 1:1:1\n")
    out = run("--pp", 2)[1]
    assert out.startswith("1F1B                   2 ranks x 1 stage, 8 microbatches, F:I:W = 1:1:1\n")


def test_costs_chunks_messages_and_overlap(run):
    out = run("--schedule", "Interleaved1F1B", "--chunks", 3, "--costs", "1:1.2:.8", "--p2p", ".25")[1]
    table = build_table("Interleaved1F1B", 4, 16, 3)
    expected = simulate(table, Costs(1, 1.2, 0.8), 0.25).makespan
    assert "4 ranks x 3 stages, 16 microbatches, F:I:W = 1:1.2:0.8, messages 0.25" in out
    assert comparison_rows(out)["Interleaved1F1B"][0] == pytest.approx(float(expected), rel=1e-5)
    out = run("--schedule", "DualPipeV", "--overlap", "0.8")[1]
    assert out.startswith(
        "DualPipeV              4 ranks x 2 stages, 16 microbatches, F:I:W = 1:1:1, overlapping pairs"
    )
    assert "makespan               43.2, each rank is busy 41.1 to 41.7\n" in out
    assert comparison_rows(out)["ZBVZeroBubble"][0] == 49.5


def test_impossible_schedules_are_explained(run):
    out = run("--pp", 4, "--microbatches", 7)[1]
    assert (
        "DualPipeV              DualPipeV with 8 stages needs at least 8 microbatches in a local batch, not 7\n" in out
    )
    assert "DualPipeV" not in comparison_rows(out) and len(comparison_rows(out)) == 6


def test_merged_backward(run):
    out = run("--schedule", "ZBVZeroBubble", "--merge_backward")[1]
    assert "F:I:W = 1:1:1, merged backward\n" in out and "makespan               54, " in out
    assert "merged backward        with input and weight gradients apart the bubble would be 3.0%\n" in out
    assert "apart" not in run("--schedule", "1F1B", "--merge_backward")[1]


def test_a_table_from_a_csv_file(run, tmp_path):
    out = run("--schedule", "DualPipeV", "--overlap", "0.8", "--write_csv", "mine.csv", "--pp", 2)[1]
    assert "table                  mine.csv\n" in out
    assert load_schedule_csv(tmp_path / "mine.csv", 2, 4, 8) == build_table("DualPipeV", 2, 8, overlap=True)
    code, out, _ = run("--csv", "mine.csv", "--pp", 2)
    assert code == 0 and out.startswith("mine.csv               2 ranks x 2 stages, 8 microbatches")
    assert re.findall("^> (.*?) ", out, re.MULTILINE) == ["mine.csv"] and len(comparison_rows(out)) == 8
    code, out, err = run("--csv", "mine.csv", "--pp", 2, "--chunks", 3)
    assert code == 2 and "the table: given 4 stages; allowed: 6" in err and out == ""
    (tmp_path / "uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert "2 ranks, 3 stages, 1 microbatches" in run("--csv", "uneven.csv", "--pp", 2, "--microbatches", 1)[1]


LONG = 300 * "a"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--costs 1:1", "given '1:1'; allowed: three numbers F:I:W"),
        ("--costs 0:1:1", "given '0:1:1'; allowed: three numbers F:I:W with F > 0"),
        ("--costs 1:a:1", "given 'a'; allowed: a number of 0 or more, like 1 or 0.25"),
        ("--p2p 1/0", "given '1/0'; allowed: a number of 0 or more, like 1 or 0.25"),
        ("--p2p=-1", "given '-1'; allowed: a number of 0 or more, like 1 or 0.25"),
        (
            "--p2p 1e99999999999999999999",
            "allowed: a number of 0 or more, like 1 or 0.25",
        ),  # the exact fraction would take years to compute
        ("--overlap 0", "given '0'; allowed: a number above 0, at most 1"),
        ("--overlap 1.1", "given '1.1'; allowed: a number above 0, at most 1"),
        ("--pp 0", "--pp: given '0'; allowed: a whole number from 2 to 4096"),
        ("--pp 1", "--pp: given '1'; allowed: a whole number from 2 to 4096"),
        ("--pp 4000 --microbatches 4000", "= 16,000,000; allowed: 50,000"),
        ("--csv a.csv --schedule 1F1B", "--schedule: not allowed with argument --csv"),
        ("--csv a.csv", "a.csv, the file: given what cannot be read (No such file or directory)"),
        ("--microbatch 3", "no option --microbatch; did you mean --microbatches?"),
        ("--ranks 8", "no option --ranks; did you mean --pp?"),
        ("--schedule ZBV", "there is no pipeline schedule 'ZBV'"),
        ("--schedule DualPipeV --microbatches 4", "needs at least 8 microbatches"),
        ("--chunks 3", "1F1B needs exactly 1 stage per rank"),
        ("--out a.gif", "--out: given 'a.gif'; allowed: names with .svg or .png"),
        (
            "--out /dev/null/a.png",
            "--out: given '/dev/null/a.png'; allowed: a folder; /dev/null is a file; name another",
        ),
        (
            "--write_csv /dev/null/a",
            "--write-csv: given '/dev/null/a'; allowed: a folder; /dev/null is a file; name another",
        ),
        ("--write_csv /dev", "--write-csv: given '/dev'; allowed: a file; it is a folder; name another"),
        (f"--out {LONG}.png", f"--out: given '{LONG}.png'; allowed: a file; File name too long; name another"),
        (f"--write_csv {LONG}", f"--write-csv: given '{LONG}'; allowed: a file; File name too long; name another"),
        (f"--out {LONG}/a.png", f"--out: given '{LONG}/a.png'; allowed: a folder; File name too long; name another"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_arguments_are_refused(argv, message, run, tmp_path):
    code, out, err = run(*argv.split())
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err and out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_refused(run, monkeypatch):
    """The error is simulated, as root may read every folder."""

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(schedule.Path, "is_dir", lambda path: refuse(path) if path.name == "a.svg" else True)
    code, out, err = run("--out", "a.svg")
    assert (code, out) == (2, "")
    assert "--out: given 'a.svg'; allowed: a file; Permission denied; name another" in err


def test_folders_of_outputs_are_created(run, tmp_path):
    assert run("--out", "some/new/a.svg", "--write_csv", "other/a.csv")[0] == 0
    assert (tmp_path / "some/new/a.svg").exists() and (tmp_path / "other/a.csv").exists()


def test_a_full_disk_is_reported(run, monkeypatch):
    """The error cannot be known before writing."""
    monkeypatch.setattr(schedule, "check_file", lambda *of: None)
    code, _, err = run("--write_csv", "/dev/full")
    assert code == 2 and "the output: No space left on device; name a file that can be written" in err


# A job


SIX_LAYERS = {"model__overrides": "{dim=32, n_layers=6, n_heads=4, vocab_size=260}"}
SIX_LAYERS |= {f"parallelism__pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}


@pytest.fixture
def job(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts", documents=3)

    def arguments(**options):
        degrees = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 2}
        return jobs.arguments(tmp_path / "run", texts, **degrees | options)

    return arguments


def test_stages_and_microbatches_come_from_the_job(run, job, tmp_path):
    interleaved = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    out = run(*job(**interleaved))[1]
    assert out.startswith("Interleaved1F1B        2 ranks x 2 stages, 4 microbatches, F:I:W = 1:1:1\n")
    # six layers make six stages if embedding and head do not count as layers
    out = run(*job(**interleaved, **SIX_LAYERS, parallelism__pipeline_parallel_layers_per_stage=1))[1]
    assert "2 ranks x 3 stages, 4 microbatches" in out
    assert not (tmp_path / "run").exists()


def test_options_override_the_job(run, job):
    argv = ["--pp", 4, "--microbatches", 16, "--schedule", "1F1B", "--costs", "2:1:1"]
    _, out, err = run(*argv, *job(parallelism__pipeline_parallel_schedule="ZBVZeroBubble"))
    assert err == ""
    assert out.startswith("1F1B                   4 ranks x 1 stage, 16 microbatches, F:I:W = 2:1:1\n")
    out = run("--chunks", 2, *job(parallelism__pipeline_parallel_schedule="LoopedBFS"))[1]
    assert "2 ranks x 2 stages, 4 microbatches" in out


NAMED = '[["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "norm", "output"]]'


@pytest.mark.parametrize(
    ("stages", "schedule", "head"),
    [
        # the job's cut is kept where the schedule allows it
        (SIX_LAYERS | {"parallelism__pipeline_parallel_layers_per_stage": 1}, "LoopedBFS", "LoopedBFS|3 stages"),
        (SIX_LAYERS | {"parallelism__pipeline_parallel_layers_per_stage": 1}, "1f1b", "1F1B|1 stage"),
        ({"parallelism__module_fqns_per_model_part": NAMED}, "LoopedBFS", "LoopedBFS|2 stages"),
        ({"parallelism__module_fqns_per_model_part": NAMED}, "1F1B", "1F1B|1 stage"),
    ],
)
def test_a_schedule_option_replaces_the_jobs_cut_where_needed(stages, schedule, head, run, job):
    name, stages_text = head.split("|")
    _, out, err = run("--schedule", schedule, *job(parallelism__pipeline_parallel_schedule="Interleaved1F1B", **stages))
    assert err == ""
    assert out.startswith(f"{name:22} 2 ranks x {stages_text}, 4 microbatches, ")


def test_schedule_and_csv_options_replace_each_other(run, job, tmp_path):
    for table, kind in (("one", "1F1B"), ("two", "Interleaved1F1B")):
        assert run("--write_csv", f"{table}.csv", "--schedule", kind, "--pp", 2, "--microbatches", 4)[0] == 0
    table = {"parallelism__pipeline_parallel_schedule_csv": tmp_path / "two.csv"}
    _, out, err = run("--schedule", "GPipe", *job(**table))
    assert err == "" and out.startswith("GPipe                  2 ranks x 1 stage, 4 microbatches, ")
    _, out, err = run("--csv", "one.csv", *job(**table))
    assert err == "" and out.startswith("one.csv                2 ranks x 1 stage, 4 microbatches, ")
    interleaved = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    interleaved |= SIX_LAYERS | {"parallelism__pipeline_parallel_layers_per_stage": 1}
    _, out, err = run("--csv", "one.csv", *job(**interleaved))
    assert err == "" and out.startswith("one.csv                2 ranks x 1 stage, 4 microbatches, ")
    code, out, err = run("--schedule", "ZBV", *job(**table))
    assert (code, out) == (2, "") and 'pipeline_parallel_schedule: given "ZBV"; allowed: one of "GPipe"' in err


def test_unequal_stages_of_a_job_are_reported(run, job):
    """Embedding and head count as one layer each, so stages of 1 + 1, 2 and 1 + 1 layers are equal."""
    sizes = "{{dim=32, n_layers={}, n_heads=4, vocab_size=260}}"
    three = {"parallelism__pipeline_parallel_degree": 3, "model__overrides": sizes.format(4)}
    assert "taken as equal" not in run(*job(**three))[1]
    uneven = three | {"model__overrides": sizes.format(5)}
    assert "\nstages                 taken as equal; the job's have 2, 2, 1 layers\n" in run(*job(**uneven))[1]
    uneven = three | {"parallelism__pipeline_parallel_last_stage_less_layers": 0}
    assert "the job's have 1, 2, 1 layers\n" in run(*job(**uneven))[1]
    assert "taken as equal" not in run("--chunks", 1, *job(**uneven))[1]  # the question's stages, not the job's


def test_recompute_merges_the_backward(run, job):
    zbv = {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
    assert "merged" not in run(*job(**zbv))[1]
    out = run(*job(**zbv, activation_checkpoint__mode="full"))[1]
    assert "F:I:W = 1:1:1, merged backward\n" in out and "apart the bubble would be 4.0%\n" in out


def test_a_csv_table_of_the_job(run, job, tmp_path):
    (tmp_path / "a.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    csv = {"parallelism__pipeline_parallel_schedule_csv": tmp_path / "a.csv"}
    out = run(*job(**csv, training__local_batch_size=4, training__global_batch_size=4))[1]
    assert out.startswith("a.csv                  2 ranks x 1 stage, 2 microbatches")
    code, _, err = run(*job(**csv))
    assert code == 2 and "a.csv, the table: 2 microbatches; allowed: 4" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_parallel_degree": 1, "pipeline_parallel_microbatch_size": 1},
            "pipeline_parallel_degree: given 1; allowed: at least 2, for there to be a schedule; set it in the job",
        ),
        ({"pipeline_parallel_degree": 8}, "4 layers cannot fill 8 pipeline stages"),
        ({"pipeline_parallel_microbatch_size": 3}, "pipeline_parallel_microbatch_size: given 3"),
        ({"pipeline_parallel_schedule": "ZBV"}, 'pipeline_parallel_schedule: given "ZBV"; allowed: one of "GPipe"'),
        ({"pipeline_parallel_schdule": "1F1B"}, "did you mean parallelism.pipeline_parallel_schedule?"),
    ],
)
def test_faults_of_a_job_are_reported(options, message, run, job):
    code, out, err = run(*job(**{f"parallelism__{name}": value for name, value in options.items()}))
    assert code == 2 and message in err and out == ""


def test_an_unknown_flavor_of_a_job_is_reported(run, job):
    code, _, err = run(*job(model__flavor="12B"))
    assert code == 2 and 'model.flavor: given "12B"' in err


def test_faults_outside_the_pipeline_are_ignored(run, job):
    assert run(*job(training__dataset_path="/none", parallelism__data_parallel_shard_degree=2))[0] == 0


# The picture


def draw_svg(path, table, **options):
    schedule.draw_schedule(simulate(table, **options), path, "title <&>", "subtitle")
    return path.read_text()


def fills(svg):
    return {color.lower() for color in re.findall(r"fill: (#[0-9a-fA-F]{6})", svg)}


def test_colors_distinguish_actions(tmp_path):
    svg = draw_svg(tmp_path / "a.svg", build_table("ZBVZeroBubble", 2, 4))
    colors = {kind: schedule.COLORS[kind].lower() for kind in "FIWB"}
    assert {colors["F"], colors["I"], colors["W"]} <= fills(svg) and colors["B"] not in fills(svg)
    assert "<pattern" in svg and schedule.IDLE["edgecolor"] in svg  # idle is hatched
    svg = draw_svg(tmp_path / "a.svg", build_table("1F1B", 2, 4))
    assert {colors["F"], colors["B"]} <= fills(svg) and not {colors["I"], colors["W"]} & fills(svg)
    assert len({*colors.values(), schedule.IDLE["facecolor"]}) == 5


def test_shades_distinguish_stages():
    shades = [schedule.shade("F", chunk, 3) for chunk in range(3)]
    assert sum(shades[0][0]) < sum(shades[1][0]) < sum(shades[2][0])
    assert shades[0][1] == "white" and shades[2][1] == schedule.INK
    assert schedule.shade("F", 0, 1) == shades[0]


def numbers_in(svg):
    """Return the numbers in a picture; texts are drawn as paths, with the text in a comment."""
    return re.findall(r"<!-- (\d+) -->", svg)


def test_microbatch_numbers_are_drawn_where_they_fit(tmp_path):
    few = draw_svg(tmp_path / "a.svg", build_table("Interleaved1F1B", 2, 4))
    assert sorted(numbers_in(few)) == sorted(list("0123") * 8)  # 2 ranks x 2 stages, forward and backward
    many = draw_svg(tmp_path / "a.svg", build_table("Interleaved1F1B", 2, 128))
    assert numbers_in(many) == []


def test_overlapping_pairs_share_a_row(tmp_path):
    table = build_table("DualPipeV", 2, 4, overlap=True)
    assert "halves of a row" in draw_svg(tmp_path / "a.svg", table, overlap=1)
    assert "halves of a row" not in draw_svg(tmp_path / "a.svg", table)


def test_pictures_are_reproducible(tmp_path):
    one, two = (draw_svg(tmp_path / f"{name}.svg", build_table("1F1B", 2, 2)) for name in "ab")
    assert one == two


def test_a_picture_of_many_ranks_is_limited_in_height(tmp_path):
    path = tmp_path / "a.png"
    schedule.draw_schedule(simulate(build_table("1F1B", 64, 64)), path, "title", "subtitle")
    with Image.open(path) as picture:
        assert picture.height < 3200
    assert schedule.MOST_WORK > 64 * 64
