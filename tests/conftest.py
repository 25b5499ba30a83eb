"""Set before torch is imported: one thread per rank (2 cores), loopback only, no network, no shared autograd cache."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# torch's on-disk autograd cache mixes up entries of different optimizers and wrappers (measured on 2.13)
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
