#!/usr/bin/env python3
"""How long brain takes from its start to the first token of a model of real size that lies on the
disk, against a plain read of the same files, both with a cold cache.

    tests/gpu/start.py BRAIN FOLDER [MODEL...]     default: e4b-bf16 31b-nvfp4

The checkpoints are those of tests/gpu/released.py; each is written into FOLDER and taken away again.
Needs a card, and NumPy.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

from released import BLOCK, make


def forget(folder):
    """Takes the files out of the system's cache."""
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(path):
    begin = time.monotonic()
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.monotonic() - begin


def first_token(brain, folder):
    begin = time.monotonic()
    done = subprocess.run(
        [brain, "generate", "--device", "cuda", "--model", folder, "--drafter", "none",
         "--max-model-len", "4096", "--raw", "--prompt", "a ledger", "--max-tokens", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        sys.exit(f"{folder}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    brain, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    print("| model | weights | plain read, cold | start to first token, cold | the rest | warm |")
    print("|---|---|---|---|---|---|")
    for model in sys.argv[3:] or ["e4b-bf16", "31b-nvfp4"]:
        target = folder / model
        make(target, model)
        try:
            weights = target / "model.safetensors"
            forget(target)
            read = plain_read(weights)
            forget(target)
            cold = first_token(brain, target)
            warm = first_token(brain, target)
            size = weights.stat().st_size / 1e9
            print(f"| {model} | {size:.1f} GB | {read:.1f} s, {size / read:.2f} GB/s | {cold:.1f} s "
                  f"| {cold - read:+.1f} s | {warm:.1f} s |", flush=True)
        finally:
            shutil.rmtree(target)


main()
