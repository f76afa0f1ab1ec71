#!/usr/bin/env python3
"""Makes of a checkpoint the file that the page carries.

  pack.py CHECKPOINT FILE

CHECKPOINT is the folder of a checkpoint of train_tiny, or a run's out_dir, of which the newest is
taken: sparse attention, the byte tokenizer, at most 2^24 of anything. Weight matrices become signed
bytes, with a factor for each row; all else stays f32. Python's own library alone. Twin: web.c, which
reads the file.
"""
import array
import json
import math
import os
import pathlib
import struct
import sys

MAGIC = 0x3161736E  # "nsa1"
SMALL = 4096  # elements: below, bytes would save nothing
# The settings that the file's numbers are, in their order; then come context, steps and the tensors.
SIZES = ("dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v")
LENGTHS = ("l", "d", "l_sel", "n_sel", "w")
WORDS = {"nsa.phi": ("avg", "conv", "mlp"), "nsa.gate": ("sigmoid", "softmax"),
         "model.rope_pairs": ("interleaved", "halves")}
MUST_BE = {"model.attention": "nsa", "model.tied_embeddings": False, "model.qk_norm": False, "model.rope_scaling": "none",
           "model.shared_kv": False, "model.mlp": "silu", "model.mlp_hidden": 0, "model.norm_eps": 1e-6,
           "nsa.gate_form": "mlp", "nsa.n_init": 1, "nsa.n_local": 2, "data.tokenizer": "byte"}


def checkpoint_folder(path):
    """The folder itself: of a run the one that `latest` names."""
    for folder in (path, path / "checkpoints"):
        if (folder / "latest").exists():
            return (folder / "latest").resolve()
    return path


def read_tensors(path):
    """The name, shape and numbers of each tensor, in the order of the file, which is the model's."""
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    for name, tensor in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        if tensor["dtype"] != "F32":
            raise SystemExit(f"{path}: {name} is {tensor['dtype']}; expected: F32")
        begin, end = tensor["data_offsets"]
        numbers = array.array("f", data[8 + size + begin:8 + size + end])
        if sys.byteorder == "big":
            numbers.byteswap()
        if len(numbers) != math.prod(tensor["shape"]):
            raise SystemExit(f"{path}: {name} has {len(numbers)} numbers, and a shape of {tensor['shape']}: cut short")
        if not all(map(math.isfinite, numbers)):
            raise SystemExit(f"{path}: {name} has numbers that are not finite")
        yield name, tensor["shape"], numbers


def padded(data):
    return data + bytes(-len(data) % 4)


def pack_tensor(name, shape, numbers):
    """A head, then f32 numbers, or a factor for each row and the rows in units of it."""
    columns = shape[-1]
    rows = len(numbers) // columns
    bits = 8 if len(shape) == 2 and len(numbers) >= SMALL else 32
    head = struct.pack("<64s3i", name.encode(), bits, rows, columns)
    if bits == 32:
        return head + struct.pack(f"<{len(numbers)}f", *numbers)
    factors, values = [], bytearray()
    for i in range(rows):
        row = numbers[i * columns:(i + 1) * columns]
        factor = max(map(abs, row)) / 127 or 1.0
        factors.append(factor)
        values += struct.pack(f"{columns}b", *(max(-127, min(127, round(x / factor))) for x in row))
    return head + struct.pack(f"<{rows}f", *factors) + padded(bytes(values))


def pack(folder):
    content = json.loads((folder / "state.json").read_text())["content"]
    config = content["config"]
    for key, value in MUST_BE.items():
        if config.get(key, value) != value:  # what older checkpoints lack they do not have
            raise SystemExit(f"{folder}: {key} is {config[key]}; the page takes {value} alone")
    tensors = [pack_tensor(*tensor) for tensor in read_tensors(folder / "model.safetensors")]
    numbers = [MAGIC, config["model.vocab_size"] or 256]
    numbers += [config[f"model.{key}"] for key in SIZES] + [config[f"nsa.{key}"] for key in LENGTHS]
    numbers += [words.index(config[key]) for key, words in WORDS.items()]
    numbers += [config["train.seq_len"], content["state"]["step"], len(tensors)]
    return (struct.pack(f"<{len(numbers)}i", *numbers) + struct.pack("<d", config["model.rope_base"]) +
            b"".join(tensors))


def write_file(path, data):
    """Beside its name, and put in place when it is whole: until then an older one stays as it is."""
    is_device = path.exists() and not path.is_file()
    draft = path if is_device else path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        if not is_device:
            draft.unlink(missing_ok=True)
        raise


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    folder, to = checkpoint_folder(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2])
    try:
        data = pack(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error) as error:
        raise SystemExit(f"{folder}: no checkpoint that the page can take: {error!r}")
    try:
        write_file(to.resolve(), data)
    except OSError as error:
        raise SystemExit(f"{to}: cannot write: {error.strerror}")
    print(f"wrote {to}: {len(data)} bytes, from {folder}")


if __name__ == "__main__":
    main()
