"""`python -m tests.support.fake_cuda QUESTION RANK WORLD_SIZE [options of the job]` prints the answer as JSON."""

import json
import logging
import os
import sys
import warnings

from tests.support.fake_cuda import MUTANT, step
from tests.support.fake_cuda.mutants import PLANTED

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    question, rank, world_size, *argv = sys.argv[1:]
    step.install()
    if mutant := os.environ.get(MUTANT):
        PLANTED[mutant]()
    print(json.dumps(getattr(step, question)(argv, int(rank), int(world_size))))
