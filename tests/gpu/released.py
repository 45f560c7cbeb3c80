#!/usr/bin/env python3
"""Checkpoints of the released sizes with random weights, and their drafters, on the disk.

    tests/gpu/released.py FOLDER MODEL...          writes FOLDER/MODEL and FOLDER/MODEL/assistant

MODEL is a name of tests/shapes (e2b, e4b, 12b, 31b) and -bf16 or -nvfp4: e4b-bf16 takes 15 GB,
31b-nvfp4 20 GB. The tokenizer is the demo's, filled up to the real number of tokens. Needs NumPy.
What such a model says means nothing; what it costs does:

    brain bench --model FOLDER/MODEL --device cuda --synthetic-acceptance 0.86,0.71,0.55,0.42
"""

import json
import math
import os
import pathlib
import shutil
import struct
import sys

import numpy

ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "brain/assets/demo"
BLOCK = 64 << 20
BYTES = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}


def tensors(facts, prefix, nvfp4):
    """(name, type, shape) of what begins with `prefix`; the products of layers in NVFP4 if asked for."""
    for entry in facts["tensors"]:
        if not entry["name"].startswith(prefix):
            continue
        for layer in numbers(entry.get("layers")):
            name, shape = entry["name"].replace("{}", str(layer)), entry["shape"]
            if nvfp4 and name.endswith("_proj.weight") and ".layers." in name:
                module = name.removesuffix("weight")
                yield module + "weight", "U8", [shape[0], shape[1] // 2]
                yield module + "weight_scale", "F8_E4M3", [shape[0], shape[1] // 16]
                yield module + "weight_scale_2", "F32", []
            else:
                yield name, entry["dtype"], shape


def numbers(ranges):
    if ranges is None:
        return [0]
    ends = (part.split("-") for part in ranges.split(","))
    return [n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]


def blocks():
    """Bytes of each type that are finite, small numbers."""
    random = numpy.random.default_rng(1)
    floats = random.normal(0.0, 0.02, BLOCK // 4).astype(numpy.float32)
    halves = random.normal(0.0, 0.02, BLOCK // 2).astype(numpy.float32).view(numpy.uint32) >> 16
    codes = random.integers(0, 256, BLOCK, dtype=numpy.uint8)
    scales = random.integers(0x28, 0x48, BLOCK, dtype=numpy.uint8)
    return {"F32": abs(floats).tobytes(), "BF16": halves.astype(numpy.uint16).tobytes(),
            "U8": codes.tobytes(), "F8_E4M3": scales.tobytes()}


def write_weights(path, listed):
    header, at = {}, 0
    for name, dtype, shape in listed:
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = blocks()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if entry["dtype"] == "I64":  # an order of tokens
                file.write(numpy.arange((end - begin) // 8, dtype="<i8").tobytes())
                continue
            for start in range(begin, end, BLOCK):
                file.write(memoryview(random[entry["dtype"]])[: min(BLOCK, end - start)])
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(path, size):
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(len(vocabulary), size):
        vocabulary[f"\u2402{token}"] = token
    path.write_text(json.dumps(tokenizer))


def facts_of(name):
    return json.loads((ROOT / f"tests/shapes/{name}.json").read_text())


def make(folder, model):
    """A checkpoint and its drafter, in `folder`."""
    name, _, form = model.rpartition("-")
    facts = facts_of(name)
    config = facts["config"]
    if form == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4",
                                         "group_size": 16, "ignore": ["lm_head"]}
    assistant = folder / "assistant"
    assistant.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"]:
        shutil.copy(DEMO / file, folder)
    write_tokenizer(folder / "tokenizer.json", config["text_config"]["vocab_size"])
    decoder = tensors(facts, "model.language_model.", form == "nvfp4")
    write_weights(folder / "model.safetensors", list(decoder))
    facts = facts_of(f"{name}-assistant")
    (assistant / "config.json").write_text(json.dumps(facts["config"]))
    write_weights(assistant / "model.safetensors", list(tensors(facts, "", False)))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    for wanted in sys.argv[2:]:
        make(pathlib.Path(sys.argv[1]) / wanted, wanted)
