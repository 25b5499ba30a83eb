#!/usr/bin/env bash
# The first hour on a machine with GPUs, in parts of at most nine minutes:
#
#   PYTHON=python3 scripts/gpu_hour.sh PART [PART ...]     one GPU: programs probe same speed watch features suite
#                                                          eight: plans large sharded pairs
#   scripts/gpu_hour.sh --list [PART ...]                  print the steps, run nothing
#
# Needs PyTorch 2.11 or newer and the packages of pyproject.toml, but no network, git or virtual environment. With
# WHEELS=FOLDER, wheels there are installed to $OUT/site first. $OUT (outputs/gpu) gets a log a step and table.txt, which
# is printed at the end. A step that has a row without a failure there is not run again.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
exec "${PYTHON:-python3}" scripts/gpu_hour.py "$@"
