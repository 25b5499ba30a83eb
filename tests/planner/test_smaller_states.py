"""What a GPU needs with options that make the state of a job smaller."""

from torchtitan.config.manager import load
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner import smaller_states
from torchtitan.planner.plan import Workload
from torchtitan.planner.search import Search
from torchtitan.planner.time.measured_runs import usual_calibration

GIB = 2**30


def search_of(*options, gpu="rtx-4090"):
    job = ResolvedJob(load(["--job.config_file=llama3_8b", *options]), 1, "cuda")
    hardware = load_hardware(gpu)
    return Search(job, Workload.of(job, 1), 1, hardware, usual_calibration(hardware))


def test_full_training_of_8b_on_a_card_of_24_gb_needs_less_with_each_option():
    search = search_of()
    qlora, lora, *others = (predicted.needed for _, predicted in smaller_states.smaller_states(search, 1))
    assert qlora < 16 * GIB < lora < 26 * GIB < min(others)
    assert len(others) == 3 and max(others) < search.state


def test_the_remedy_says_which_options_fit():
    text = smaller_states.remedy(search_of(), 1, 23.6 * GIB)
    assert 'with adapter.kind = "qlora" and adapter.rank = 16 (fits)' in text
    assert 'with optimizer.name = "AdamW8bit" (does not fit)' in text and "training.enable_cpu_offload = true" in text


def test_options_that_a_job_has_are_not_named():
    text = smaller_states.remedy(search_of("--adapter.kind=qlora", "--training.enable_cpu_offload=true"), 1, GIB)
    assert "adapter" not in text and "offload" not in text
